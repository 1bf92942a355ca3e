from __future__ import annotations

import numpy as np
import pytest

from fedcohort.personalize import Registry
from fedcohort.sketch.race import RaceSketch

EMPTY = RaceSketch.srp(dim=2, rows=30, bits=3, seed=0)


def sketch_of(angle, seed=0, n=200, spread=0.2, empty=EMPTY):
    """Sketch of a cloud of points in the direction of an angle."""
    made = empty.empty_like()
    center = [np.cos(angle), np.sin(angle)]
    made.add(np.random.default_rng(seed).normal(center, spread, (n, 2)))
    return made


@pytest.fixture
def make():
    return sketch_of


@pytest.fixture
def registry(tmp_path):
    with Registry.create(tmp_path / "warm") as made:
        yield made
