"""The old path of `fedcohort.sketch.transforms`, kept because earlier docs showed it."""

from fedcohort.sketch.transforms import Transform

__all__ = ["Transform"]
