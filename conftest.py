"""Modules that cannot be imported everywhere are not searched for doctests where they cannot."""

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("triton") is None:
    collect_ignore_glob.append("src/fedcohort/**/_*triton*.py")
