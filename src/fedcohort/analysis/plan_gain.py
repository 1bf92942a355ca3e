"""How many rounds matched cohorts are expected to save: an estimate from measured speed-ups.

Training with uniform cohorts took exp(slope * D) times as many rounds to a target accuracy as with
SketchMatch, where D is the discrepancy of uniform cohorts. Each measured setting has a slope of its
own. Their mean gives the estimate and their spread its interval, which shrinks to "no gain" where
D is 0. ``plan_gain.json`` holds the fit; ``benchmarks/plan_gain.py`` makes that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

FITTED = Path(__file__).with_suffix(".json")
BUCKETS, LABEL_WEIGHT = 64, 2.0  # of the measured sketches; D depends on them


@dataclass(frozen=True)
class Gain:
    """How many times fewer rounds than with uniform cohorts, with a prediction interval."""

    fewer_rounds: float
    low: float
    high: float

    def __str__(self) -> str:
        saved = 1 - 1 / self.fewer_rounds
        return (
            f"about {self.fewer_rounds:.1f} times fewer rounds than uniform cohorts "
            f"({self.low:.1f} to {self.high:.1f}), which saves {saved:.0%} of the rounds"
        )


@dataclass(frozen=True)
class GainFit:
    """Slopes of measured settings.

    Attributes
    ----------
    slope, deviation : float
        Mean and standard deviation over settings of log(rounds of uniform / rounds) / D.
    settings : int
        How many settings were measured.
    largest : float
        The largest D among them.
    level : float
        Probability of the prediction interval.

    Examples
    --------
    >>> fit = GainFit.of([0.01, 0.02, 0.03], [0.2, 0.4, 0.6])
    >>> round(fit.slope, 6), round(fit.predict(0.01).fewer_rounds, 4)
    (20.0, 1.2214)
    """

    slope: float
    deviation: float
    settings: int
    largest: float
    level: float = 0.9

    @classmethod
    def of(cls, discrepancies: Sequence[float], log_ratios: Sequence[float]) -> GainFit:
        """Fit measured settings: uniform's discrepancy and the log of the speed-up of each."""
        slopes = np.asarray(log_ratios, float) / np.asarray(discrepancies, float)
        if len(slopes) < 3 or not np.isfinite(slopes).all():
            raise ValueError(f"GainFit: {len(slopes)} settings, at least 3 with D > 0 are needed")
        spread = float(slopes.std(ddof=1))
        return cls(float(slopes.mean()), spread, len(slopes), float(max(discrepancies)))

    def predict(self, discrepancy: float) -> Gain:
        """Estimate the gain at a discrepancy of uniform cohorts; Student's t interval."""
        from scipy.stats import t

        wide = float(t.ppf((1 + self.level) / 2, self.settings - 1))
        half = wide * self.deviation * math.sqrt(1 + 1 / self.settings)
        slopes = (self.slope, self.slope - half, self.slope + half)
        return Gain(*(math.exp(slope * max(discrepancy, 0.0)) for slope in slopes))


@cache
def shipped() -> GainFit:
    """Return the fit that comes with the package."""
    found: dict[str, Any] = json.loads(FITTED.read_text(encoding="utf-8"))["fit"]
    return GainFit(**found)


def why_none(sketches: object, discrepancy: float) -> str | None:
    """Say why the fit does not apply; None if it does."""
    if not isinstance(sketches, Sequence) or not isinstance(sketches[0], RaceSketch):
        return "the sketches do not state how they were made"
    first = sketches[0]
    step, family = first.transform, first.family
    alike = isinstance(step, Transform) and isinstance(family, SRP) and step.unit
    if not alike or first.buckets != BUCKETS or step.label_weight != LABEL_WEIGHT:  # type: ignore[union-attr]
        return (
            f"speed-ups were measured for sketches of unit vectors with 6 bits and label weight "
            f"{LABEL_WEIGHT:g}"
        )
    largest = shipped().largest
    if discrepancy > 1.1 * largest:
        return f"uniform cohorts are farther from the federation than any measured ({largest:.3f})"
    return None
