from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedcohort.datasets import federate, load
from fedcohort.simulate import build, simulation
from fedcohort.simulate.aggregation import AGGREGATIONS, FedAdam, FedAvgM, Mean, WeightedMean
from modelstack import batched, trainer

CURRENT = torch.tensor([1.0, 2.0, 3.0])
UPDATES = torch.tensor([[2.0, 2.0, 2.0], [4.0, 0.0, 3.0]])


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


class Operators(TorchDispatchMode):
    """Counts the operators that PyTorch runs."""

    count = 0

    def __torch_dispatch__(self, function, kinds, given=(), named=None):
        self.count += 1
        return function(*given, **(named or {}))


def round_of(seeds):
    """Return the cohorts and models after two rounds, and the operators of the second."""
    run = simulation.Simulation(
        federate(load("digits"), "shards", clients=20, seed=0),
        lambda seed: build("mlp-64-30", (1, 8, 8), classes=10, seed=seed),
        "uniform",
        cohort_size=6,
        seeds=range(seeds),
        device="cpu",
        max_memory=2**30,
    )
    run.step()
    with Operators() as operators:
        records = run.step()
    models = torch.stack([seed.model for seed in run.seeds])
    return [record.selected for record in records], models, operators.count


def test_all_seeds_go_together_as_on_a_gpu(monkeypatch):
    """There the host's time is that of calling operators, to which a further seed adds no more.

    A view of its rows may remain. Cohorts are the same, and to rounding the models.
    """
    selected, models, _ = round_of(4)
    for module, name in (
        (simulation, "BATCHED_MEANS"), (batched, "GRAPHS"), (trainer, "TOGETHER")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, {"cpu"})
    same, close, few = round_of(4)
    assert same == selected
    torch.testing.assert_close(close, models, rtol=1e-5, atol=1e-6)
    assert round_of(8)[2] - few <= 4 * 2
