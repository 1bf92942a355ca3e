"""``python -m fedcohort.cli``."""

from fedcohort.cli import main

if __name__ == "__main__":  # worker processes of a benchmark import this module
    main()
