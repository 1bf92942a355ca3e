"""Modules that cannot be imported everywhere are not searched for doctests where they cannot."""

from importlib.util import find_spec

collect_ignore = []
if find_spec("triton") is None:
    collect_ignore.append("src/fedcohort/simulate/_sketch_triton.py")
