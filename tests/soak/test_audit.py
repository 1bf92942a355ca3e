"""A short attack on every private mechanism; `make soak` takes many more trials."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedcohort.privacy.release import release
from fedcohort.sketch.race import RaceSketch

sys.path.insert(0, str(Path(__file__).parent))
import audit

GOOD, BROKEN = audit.mechanisms()


@pytest.mark.parametrize("name", [*GOOD, *BROKEN])
def test_no_attack_proves_more_than_the_claim_unless_it_is_broken(name):
    """Each bound is wrong with probability 2e-6 if the claim holds."""
    assert audit.one(name, 3_000, seed=1)["right"]


def test_both_kinds_of_noise_are_attacked():
    parts = [part for mechanism in GOOD.values() for part in getattr(mechanism, "parts", ())]
    assert {part.mechanism for part in parts} == {"laplace", "gaussian"}


def test_the_attack_comes_close_to_the_truth():
    """Laplace noise on one count: the best event has exactly the ratio exp(epsilon)."""
    part = audit.Part(np.array([[5, 0]]), np.array([[6, 0]]), 1.0)
    found = audit.attack(audit.Mechanism((part,), 1.0), 40_000, np.random.default_rng(0))
    assert 0.85 < found <= 1.0


def test_a_sketch_is_released_as_the_audit_does():
    sketch = RaceSketch.srp(dim=3, rows=4, bits=2)
    sketch.add(np.eye(3))
    for n in ("public", "private"):
        made = sketch.privatize(0.5, n=n, rng=np.random.default_rng(3))
        counts, _ = release(sketch.counts, 0.5, n=n, rng=np.random.default_rng(3))
        np.testing.assert_array_equal(made.counts, counts)
    assert made.n == counts.sum() / 4  # a function of what is released, so it tells nothing more
