"""Several models evaluated side by side: the result of one after the other, in one go."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedcohort.datasets import federate, load
from fedcohort.simulate import build, simulation
from modelstack import batched
from modelstack.trainer import Trainer
from modelstack.vmapped import forward_rows

CASES = [("mlp-64-30", (1, 8, 8), 10), ("cnn", (1, 28, 28), 10), ("char-lstm", (12,), 80)]


@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_side_by_side(name, shape, classes):
    trainer = Trainer(build(name, shape, classes, seed=0), device="cpu")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 80, (70, *shape)) if name == "char-lstm" else rng.random((70, *shape))
    data = trainer.data(
        np.asarray(x, np.int64 if name == "char-lstm" else np.float32), rng.integers(0, classes, 70)
    )
    rows = torch.stack([trainer.flat(build(name, shape, classes, seed=s)) for s in range(3)])
    forwards = [partial(forward_rows, trainer.worker.model, rows)]
    forwards.append(trainer._side_by_side(rows))
    one = trainer.worker.scores(rows, data).T
    for forward in forwards:
        together = trainer.worker.scores(rows, data, forward).T
        assert together[0].tolist() == one[0].tolist()
        np.testing.assert_allclose(together[1], one[1], rtol=1e-5)


class Operators(TorchDispatchMode):
    """Counts the operators that PyTorch runs."""

    count = 0

    def __torch_dispatch__(self, function, kinds, given=(), named=None):
        self.count += 1
        return function(*given, **(named or {}))


def test_a_further_seed_adds_no_operators_to_a_round_on_a_gpu(monkeypatch):
    """On a GPU the host's time is that of calling operators; a view of its rows may remain.

    Everything but the steps themselves, which replay as graphs, runs here as it does there.
    """
    monkeypatch.setattr(simulation, "BATCHED_MEANS", {"cpu"})
    monkeypatch.setattr(batched, "GRAPHS", {"cpu"})
    monkeypatch.setattr(batched, "_capture", lambda run, clock: [(1, lambda: None)])
    monkeypatch.setattr(Trainer, "_together", lambda self, rows: self._side_by_side(rows))
    data = load("digits")
    counts = []
    for seeds in (4, 8):
        held = simulation.Simulation(
            federate(data, "shards", clients=20, seed=0),
            lambda seed: build("mlp-64-30", (1, 8, 8), classes=10, seed=seed),
            "uniform",
            cohort_size=5,
            seeds=range(seeds),
            device="cpu",
            max_memory=2**30,
        )
        held.step()
        with Operators() as operators:
            held.step()
        counts.append(operators.count)
    assert counts[1] - counts[0] <= 4 * 2
