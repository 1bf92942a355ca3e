from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.simulate.models import build
from modelstack.jobs import Job
from modelstack.trainer import Trainer
from modelstack.training import Unsupported

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 1, 16, 16)).astype(np.float32)
Y = RNG.integers(0, 4, 150)
JOBS = [Job(1, np.arange(40)), Job(0, np.array([3])), Job(1, np.arange(20, 150))]


def exact(trainer, model):
    """The model in float64."""
    rows = torch.stack([trainer.flat(), 1.5 * trainer.flat()])
    nets = []
    for row in rows:
        net = build(model, X.shape[1:], 4).double()
        nn.utils.vector_to_parameters(row.double(), net.parameters())
        nets.append(net)
    return rows, nets


@pytest.mark.parametrize("model", ["mlp-64-30", "cnn"])
def test_accuracy_losses_and_features_equal_float64(model):
    trainer = Trainer(build(model, X.shape[1:], 4), device="cpu")
    data = trainer.data(X, Y)
    rows, nets = exact(trainer, model)
    x, y = data.x.double(), data.y
    with torch.no_grad():
        outputs = [net(x) for net in nets]
        each = [nn.functional.cross_entropy(out, y, reduction="none").numpy() for out in outputs]
        hidden = [net[: list(net._modules).index("fc1") + 1](x).numpy() for net in nets]
    accuracy, loss = trainer.evaluate(rows, data)
    assert accuracy.tolist() == [(out.argmax(1) == y).double().mean().item() for out in outputs]
    assert loss == pytest.approx([e.mean() for e in each], rel=1e-5)
    losses = trainer.losses(rows, JOBS, data)
    assert losses == pytest.approx([each[job.row][job.positions].mean() for job in JOBS], rel=1e-5)
    squares = trainer.losses(rows, JOBS, data, power=2)
    expected = [(each[job.row][job.positions] ** 2).mean() for job in JOBS]
    assert squares == pytest.approx(expected, rel=1e-5)
    for job in JOBS:
        right = (outputs[job.row].argmax(1) == y).numpy()[job.positions]
        assert trainer.hits(rows[job.row], [job.positions], data).tolist() == right.tolist()
    features = trainer.features(rows, JOBS, data)
    assert features.dtype == np.float32
    expected = [hidden[job.row][job.positions].mean(0) for job in JOBS]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_off():
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(256, 4))
    trainer = Trainer(net, device="cpu")
    data = trainer.data(X, Y)
    plain = Trainer(nn.Sequential(nn.Flatten(), nn.Linear(256, 4)), device="cpu")
    rows = trainer.flat()
    assert trainer.evaluate(rows, data)[1] == plain.evaluate(rows, data)[1]
    assert trainer.losses(rows, JOBS[1:2], data) == plain.losses(rows, JOBS[1:2], data)
    found, expected = (t.gradients(rows, JOBS[1:2], data) for t in (trainer, plain))
    torch.testing.assert_close(found, expected)


def test_a_single_output_is_a_logit():
    def logistic(outputs, y):
        return nn.functional.softplus(outputs[:, 0] * (1 - 2 * y))

    trainer = Trainer(nn.Sequential(nn.Linear(1, 1)), loss=logistic, device="cpu")
    data = trainer.data(np.array([[-1.0], [2.0], [3.0], [-4.0]]), np.array([0, 1, 0, 0]))
    accuracy, loss = trainer.evaluate(torch.tensor([1.0, 0.0]), data)
    assert accuracy.tolist() == [0.75]
    expected = np.log1p(np.exp([-1, -2, 3, -4])).mean()
    assert loss == pytest.approx([expected])


def test_features_need_a_layer():
    trainer = Trainer(nn.Sequential(nn.Conv2d(1, 4, 16), nn.Flatten()), device="cpu")
    with pytest.raises(Unsupported, match="dense layer"):
        trainer.features(trainer.flat(), JOBS[1:2], trainer.data(X, Y))
