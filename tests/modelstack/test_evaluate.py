"""Accuracy, losses and features equal those in float64, one model at a time or side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.simulate import build
from modelstack import trainer
from modelstack.jobs import Job
from modelstack.trainer import Trainer
from modelstack.training import Unsupported

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 1, 16, 16)).astype(np.float32)
Y = RNG.integers(0, 4, 150)
JOBS = [Job(1, np.arange(40)), Job(0, np.array([3])), Job(1, np.arange(20, 150))]


@pytest.mark.parametrize("model", ["mlp-64-30", "cnn"])
def test_accuracy_losses_and_features_equal_float64(model):
    trainer = Trainer(build(model, X.shape[1:], 4), device="cpu")
    data = trainer.data(X, Y)
    rows = torch.stack([trainer.flat(), 1.5 * trainer.flat()])
    nets = [trainer.load(row, build(model, X.shape[1:], 4)).double() for row in rows]
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
    features = trainer.features(rows, JOBS, data)
    assert features.dtype == np.float32
    expected = [hidden[job.row][job.positions].mean(0) for job in JOBS]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)


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


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = {"mlp-64-30": (1, 8, 8), "cnn": (1, 28, 28), "char-lstm": (12,)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("engine", ["stacked", "vmap"])
@pytest.mark.parametrize("name", SHAPES)
def test_side_by_side(name, engine, device, monkeypatch):
    """Several models in one go, as on a GPU: the result of one after the other."""
    if (name, engine, device) == ("cnn", "stacked", "cpu"):
        pytest.skip("convolutions are stacked on a GPU only")
    shape, classes = SHAPES[name], 80
    held = Trainer(build(name, shape, classes, seed=0), device=device, engine=engine)
    rng = np.random.default_rng(0)
    x = rng.random((70, *shape)) if len(shape) == 3 else rng.integers(0, 80, (70, *shape))
    data = held.data(x, rng.integers(0, classes, 70))
    rows = torch.stack([held.flat(build(name, shape, classes, seed=s)) for s in range(3)])
    monkeypatch.setattr(trainer, "TOGETHER", set())
    one = held.evaluate(rows, data)
    monkeypatch.setattr(trainer, "TOGETHER", {device})
    for _ in range(2):
        together = held.evaluate(rows, data)
        assert together[0].tolist() == one[0].tolist()
        np.testing.assert_allclose(together[1], one[1], rtol=1e-5)
