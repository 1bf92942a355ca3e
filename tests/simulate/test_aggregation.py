from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.datasets import federate, load
from fedcohort.simulate import build, simulation
from fedcohort.simulate.aggregation import AGGREGATIONS, FedAdam, FedAvgM, Mean, WeightedMean

CURRENT = torch.tensor([1.0, 2.0, 3.0])
UPDATES = torch.tensor([[2.0, 2.0, 2.0], [4.0, 0.0, 3.0]])
MEAN_STEP = Mean.step


def test_plain_and_weighted_means():
    assert Mean().step(CURRENT, UPDATES, [1, 3]).tolist() == [3.0, 1.0, 2.5]
    assert WeightedMean().step(CURRENT, UPDATES, [1, 3]).tolist() == [3.5, 0.5, 2.75]


def test_selection_weights_are_used_as_they_are():
    """current + sum w_i (x_i - current), even if the weights do not sum to one."""
    expected = CURRENT + 2.0 * (UPDATES[0] - CURRENT) + 0.5 * (UPDATES[1] - CURRENT)
    for name in ("mean", "size-weighted"):
        got = AGGREGATIONS[name]().step(CURRENT, UPDATES, [1, 3], [2.0, 0.5])
        torch.testing.assert_close(got, expected)


def test_momentum_by_hand():
    server = FedAvgM(lr=0.5, momentum=0.9)
    first = server.step(CURRENT, UPDATES, [2, 2])
    step = UPDATES.mean(0) - CURRENT
    torch.testing.assert_close(first, CURRENT + 0.5 * step)
    second = server.step(first, UPDATES, [2, 2])
    velocity = 0.9 * step + (UPDATES.mean(0) - first)
    torch.testing.assert_close(second, first + 0.5 * velocity)


def test_adam_by_hand():
    server = FedAdam(lr=0.1, betas=(0.9, 0.99), tau=1e-3)
    got = server.step(CURRENT, UPDATES, [2, 2]).double().numpy()
    step = (UPDATES.mean(0) - CURRENT).double().numpy()
    m, v = 0.1 * step, 0.99 * 1e-6 + 0.01 * step**2
    assert got == pytest.approx(CURRENT.numpy() + 0.1 * m / (np.sqrt(v) + 1e-3), rel=1e-6)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_state_continues_bit_for_bit(name):
    one, other = AGGREGATIONS[name](), AGGREGATIONS[name]()
    model = one.step(CURRENT, UPDATES, [1, 3])
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.step(model, UPDATES, [1, 3]), other.step(model, UPDATES, [1, 3]))


def test_cohorts_of_all_seeds_averaged_at_once(monkeypatch):
    """As a GPU does it: the same records and, to rounding, the same models."""
    federation = federate(load("digits"), "shards", clients=20, seed=0)
    found, calls = [], []
    spied = lambda self, *given: calls.append(1) or MEAN_STEP(self, *given)  # noqa: E731
    monkeypatch.setattr(Mean, "step", spied)
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(simulation, "BATCHED_MEANS", devices)
        held = simulation.Simulation(
            federation,
            lambda seed: build("mlp-64-30", (1, 8, 8), classes=10, seed=seed),
            "uniform",
            cohort_size=6,
            seeds=(0, 1, 2),
            device="cpu",
        )
        cohorts = [[record.selected for record in held.step()] for _ in range(3)]
        found.append((cohorts, torch.stack([seed.model for seed in held.seeds])))
    assert len(calls) == 9 + 3
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)
