from __future__ import annotations

import numpy as np
import pytest

from fedcohort.personalize import Registry
from fedcohort.sketch.race import RaceSketch


@pytest.fixture
def make():
    def sketch_of(angle, seed=0, n=200):
        """Sketch of a cloud of points in the direction of an angle."""
        sketch, center = RaceSketch.srp(dim=2, rows=30, bits=3), [np.cos(angle), np.sin(angle)]
        sketch.add(np.random.default_rng(seed).normal(center, 0.2, (n, 2)))
        return sketch

    return sketch_of


@pytest.fixture
def registry(tmp_path):
    with Registry.create(tmp_path / "warm") as made:
        yield made
