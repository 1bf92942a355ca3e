from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.signals.projection import Projection
from fedcohort.simulate import clients
from fedcohort.simulate.clients import TensorVectors


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "sparse"])
def test_the_stored_matrix_gives_what_the_loops_give(kind, monkeypatch):
    monkeypatch.setattr(clients, "BLOCK", 300)
    projection = Projection(1000, 7, kind=kind, seed=3)
    models = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1000))).float()
    stored = models @ clients._matrix(projection, "cpu").T
    expected = TensorVectors(models).project(projection)
    assert expected == pytest.approx(projection.apply(models.numpy()))
    assert stored.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)
