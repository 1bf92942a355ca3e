from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.personalize.finetune import finetune, named_arrays
from fedcohort.simulate.local import LocalTraining
from modelstack.trainer import Trainer


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    y = rng.integers(0, 3, 120)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    trainer = Trainer(module, LocalTraining(epochs=3, batch_size=8, lr=0.1), device="cpu")
    parts = {"ann": np.arange(0, 37), "bob": np.arange(37, 60), "eve": np.arange(60, 120)}
    return trainer, trainer.data(x, y), parts, module


def test_together_is_the_same_as_one_by_one(world):
    trainer, data, parts, _ = world
    start = trainer.flat()
    together = finetune(trainer, start, parts, data, seed=4)
    for row, (client, rows) in zip(together, parts.items(), strict=True):
        alone = finetune(trainer, start, {client: rows}, data, seed=4)[0]
        torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)
        assert not torch.equal(row, start)


def test_named_arrays_load_back_into_the_module(world):
    trainer, _, _, module = world
    flat = trainer.flat() + 1
    arrays = named_arrays(flat, module)
    state = {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}
    copy = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    copy.load_state_dict(state)
    assert torch.equal(trainer.flat(copy), flat)
