"""Evaluating several models side by side gives what one after the other gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.simulate import build
from fedcohort.simulate.engine import worker
from fedcohort.simulate.engine.trainer import Trainer

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
    one, together = torch.zeros(3, 2).double(), torch.zeros(3, 2).double()
    trainer.worker.model.eval()
    with torch.no_grad():
        worker._add_one_by_one(trainer.worker, rows, data, one)
        worker._add_together(trainer.worker, rows, data, together)
    assert together[:, 0].tolist() == one[:, 0].tolist()
    torch.testing.assert_close(together[:, 1], one[:, 1], rtol=1e-5, atol=1e-4)
