"""The sketch of the whole federation, from the clients' sketches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedcohort.signals.stack import Floats, Stack

if TYPE_CHECKING:
    from fedcohort.signals.race import RaceSketch


def pooled(sketches: Iterable[RaceSketch]) -> RaceSketch:
    """Return the sketch of all data together: the sum of counts."""
    total: RaceSketch | None = None
    for sketch in sketches:
        total = sketch if total is None else total + sketch
    if total is None:
        raise ValueError("no sketches to pool")
    return total


def mean_sketch(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the paper's global sketch: the unweighted mean of the normalized sketches."""
    stack = Stack(sketches)
    return stack.mixture(stack.weights("mean"))
