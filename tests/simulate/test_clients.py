from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.datasets import federate, load
from fedcohort.policies import DELTA, FedACS
from fedcohort.signals.projection import Projection
from fedcohort.simulate import Simulation, build, clients
from fedcohort.simulate.clients import TensorVectors


@pytest.mark.parametrize("kind", ["uniform", "sparse"])
def test_the_stored_matrix_gives_what_the_loops_give(kind):
    projection = Projection(1000, 7, kind=kind, seed=3)
    models = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1000))).float()
    stored = models @ clients._matrix(projection, "cpu").T
    expected = TensorVectors(models).project(projection)
    assert expected == pytest.approx(projection.apply(models.numpy()))
    assert stored.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        (FedACS(), 0),
        (FedACS(reward="gradients"), (64 + 1) * 64 + (64 + 1) * 30 + (30 + 1) * 10),
        (DELTA(local_variance=1.0), (64 + 1) * 64 + (64 + 1) * 30 + (30 + 1) * 10),
    ],
)
def test_gradients_are_charged_beside_the_updates(policy, values):
    digits = federate(load("digits"), "shards", clients=20, seed=0)
    net = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    simulation = Simulation(digits, net, policy, cohort_size=4, dropout=0.3, device="cpu")
    finished = sum(len(simulation.step()[0].finished) for _ in range(3))
    sent = simulation.seeds[0].session.ledger.by_kind("up")
    assert 0 < finished < 12
    assert sent.get("update_distance", 0) == 4 * values * finished
