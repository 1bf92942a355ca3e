"""One client's measuring in plain PyTorch, against closed forms and the simulator's engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.attach import Answers
from fedcohort.flower.client.data import Examples
from fedcohort.simulate import LocalTraining, build
from fedcohort.simulate.local import Job, Trainer

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(300, 6)).astype(np.float32), np.arange(300) % 3


@pytest.fixture
def measured(client, context):
    """Make a client that measures a model."""

    def make(model):
        examples = Examples((X, Y))
        given = (lambda _: examples, lambda _: model, None, None, None, None, 3, None, "cpu")
        answers = Answers(*given, own_train=None, own_evaluate=None, mods=[])
        message = client.message("query.fedcohort", ArrayRecord(model.state_dict()))
        return answers.asked(message, context)

    return make


class HeadFirst(nn.Module):
    """Defines its output layer before its input layer."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def test_a_linear_model_against_its_closed_forms(measured):
    model = nn.Linear(6, 3)
    weights, bias = (p.detach().double().numpy() for p in model.parameters())
    logits = X @ weights.T + bias
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(chances[np.arange(300), Y])
    one = measured(model)
    assert one.losses() == pytest.approx(losses.mean(), rel=1e-6)
    assert one.losses(power=2) == pytest.approx((losses**2).mean(), rel=1e-6)
    np.testing.assert_allclose(one.features()[0], logits.mean(0), atol=1e-6)
    error = (chances - np.eye(3)[Y]) / 300
    expected = np.concatenate([(error.T @ X).ravel(), error.sum(0)])
    np.testing.assert_allclose(one.gradients().numpy()[0], expected, atol=1e-6)


@pytest.mark.parametrize("make", [HeadFirst, lambda: build("mlp-64-30", (6,), 3)])
def test_the_engines_measure_the_same(make, measured):
    """The profile is of the layer that runs first, in the simulator and at a client alike."""
    torch.manual_seed(0)
    model = make()
    trainer = Trainer(model, LocalTraining(), device="cpu")
    data, jobs = trainer.data(X, Y), [Job(0, np.arange(300))]
    one, flat = measured(model), trainer.flat()
    np.testing.assert_allclose(one.losses(), trainer.losses(flat, jobs, data), rtol=1e-6)
    assert one.features().shape == (1, 5 if isinstance(model, HeadFirst) else 64)
    np.testing.assert_allclose(one.features(), trainer.features(flat, jobs, data), atol=1e-6)
    gradients = trainer.gradients(flat, jobs, data)
    np.testing.assert_allclose(one.gradients().numpy(), gradients, atol=1e-6)


def test_what_is_not_used_has_no_gradient_and_a_model_without_dense_layer_no_profile(measured):
    model = nn.Sequential(nn.Conv1d(1, 3, 6), nn.Flatten())
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[1](model[0](x[:, None]))
    gradient = measured(model).gradients().numpy()[0]
    assert gradient[-6:].tolist() == [0.0] * 6 and np.abs(gradient[:-6]).min() > 0
    with pytest.raises(ConfigError, match="dense layer"):
        measured(model).features()
