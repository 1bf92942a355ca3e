from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedcohort.privacy.release import signal_to_noise, sketch_size
from fedcohort.sketch.distances import distance_matrix
from fedcohort.sketch.race import RaceSketch


def federation(rows, bits, epsilon, delta=0.0, n=2000, seed=0):
    """Distances of 12 clients, private, of Gaussian clusters mixed by Dirichlet(0.5)."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((10, 20))
    sketches = []
    for _ in range(12):
        labels = rng.choice(10, n, p=rng.dirichlet(np.full(10, 0.5)))
        sketch = RaceSketch.srp(dim=20, rows=rows, bits=bits)
        sketch.add(centers[labels] + rng.standard_normal((n, 20)))
        sketches.append(sketch)
    upper = np.triu_indices(12, 1)
    private = [s.privatize(epsilon, delta, rng=rng) for s in sketches] if epsilon else sketches
    return distance_matrix(private, "mmd")[upper], private


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_plan_ranks_clients_where_a_thousand_rows_drown(delta):
    truth, _ = federation(1000, 6, None)
    size = sketch_size(2000, 1.0, delta, dim=20)
    planned, sketches = federation(size.rows, size.bits, 1.0, delta)
    assert spearmanr(truth, planned).statistic > 0.85
    assert signal_to_noise(sketches[0]) == pytest.approx(size.signal_to_noise)
    if delta == 0:
        drowned, noisy = federation(1000, 6, 1.0)
        assert spearmanr(truth, drowned).statistic < 0.5
        assert signal_to_noise(noisy[0]) < 1
