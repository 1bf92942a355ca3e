"""The old path of `fedcohort.sketch.race`, kept because earlier docs showed it."""

from fedcohort.sketch.race import RaceSketch

__all__ = ["RaceSketch"]
