"""``python -m fedcohort.cli``."""

from fedcohort.cli import main

main()
