from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.exceptions import ConfigError
from fedcohort.personalize.finetune import accuracies, finetune, mixed, named_arrays, own_accuracies
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


def test_models_outlive_the_next_training(world):
    trainer, data, parts, _ = world
    first = finetune(trainer, trainer.flat(), parts, data)
    kept = first.clone()
    finetune(trainer, trainer.flat(), parts, data, seed=9)
    assert torch.equal(first, kept)


def test_only_one_model_can_be_fine_tuned(world):
    trainer, data, parts, _ = world
    with pytest.raises(ConfigError, match="not one flat model"):
        finetune(trainer, trainer.flat()[None], parts, data)


def test_accuracies_count_by_hand(world):
    trainer, data, parts, _ = world
    models = finetune(trainer, trainer.flat(), parts, data)
    tests = [np.array([0, 5, 7]), np.array([5, 5, 100, 3]), np.arange(120)]
    expected = np.empty((3, 3))
    for i, model in enumerate(models):
        copy = trainer.load(model, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
        right = (copy(data.x).argmax(1) == data.y).numpy()
        expected[i] = [right[rows].mean() for rows in tests]
    np.testing.assert_array_equal(accuracies(trainer, models, tests, data), expected)
    own = own_accuracies(trainer, models, tests, data)
    np.testing.assert_array_equal(own, np.diag(expected))
    with pytest.raises(ConfigError, match="client 1 has no samples"):
        accuracies(trainer, models, [tests[0], np.array([], np.int64)], data)


def test_mixtures_are_averages_of_parameters(world):
    trainer, data, parts, _ = world
    models = finetune(trainer, trainer.flat(), parts, data)
    made = mixed(models, [[0.25, 0.75, 0.0], [0, 0, 1]])
    torch.testing.assert_close(made[0], 0.25 * models[0] + 0.75 * models[1])
    torch.testing.assert_close(made[1], models[2])


def test_named_arrays_load_back_into_the_module(world):
    trainer, _, _, module = world
    flat = trainer.flat() + 1
    arrays = named_arrays(flat, module)
    state = {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}
    copy = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    copy.load_state_dict(state)
    assert torch.equal(trainer.flat(copy), flat)
