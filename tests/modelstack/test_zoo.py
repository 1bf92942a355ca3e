"""A zoo of models as people write them: each trains in every engine that takes it, alike.

"auto" on a GPU would take the engine in the table; the reason names the layer that prevents a
faster one. All of it runs on a CPU.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.local import LocalTraining, jobs
from modelstack import stacked
from modelstack.kernel import Setup, cross_entropy
from modelstack.trainer import Trainer, choose
from modelstack.training import Training, Unsupported
from modelstack.vmapped import obstacle

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from simulation_models import ResNet18, ViTTiny

GPU = torch.device("cuda")
SHAPE, CLASSES = (3, 8, 8), 4


class Flowers(nn.Module):
    """The network of PyTorch's tutorial, as in most example apps: `.view` after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 2)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        return self.dense(F.relu(self.conv2(x)).view(-1, 8 * 2 * 2))

    def dense(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Sized(Flowers):
    """Flattens by the number of samples."""

    def forward(self, x):
        x = self.conv2(F.max_pool2d(torch.relu(self.conv1(x)), 2)).relu()
        return self.fc2(torch.tanh(self.fc1(x.view(x.size(0), -1))))


class Written(nn.Module):
    """Dense layers as functions."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(192, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(torch.flatten(x, 1)))))

    def drop(self, x):
        return x


class Dropped(Written):
    """Functional dropout that follows the mode of the model."""

    def drop(self, x):
        return F.dropout(x, 0.25, training=self.training)


class AlwaysDropped(Flowers):
    """Dropout that stays on in evaluation mode, which the stacked engine does not do."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.dense(torch.flatten(F.dropout(F.relu(self.conv2(x)), 0.0), 1))


class Tied(nn.Module):
    """An autoencoder's weight used twice, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.code, self.back = nn.Linear(192, 5, bias=False), nn.Linear(5, 192)
        self.back.weight = nn.Parameter(self.code.weight.detach().T.clone())
        self.head = nn.Linear(192, CLASSES)
        self.again = nn.Linear(192, CLASSES)
        self.again.weight = self.head.weight

    def forward(self, x):
        hidden = self.back(torch.tanh(self.code(x.flatten(1))))
        return self.head(hidden) + self.again(x.flatten(1))


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.same = nn.Linear(192, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.relu(self.first(x.flatten(1)))
        return self.last(torch.relu(self.same(torch.relu(self.same(x)))))


def small_resnet():
    return ResNet18(CLASSES, width=4, groups=2)


class Counting(nn.Module):
    """Reads a number out of a tensor, which nothing but the plain loop can do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.head(x.flatten(1)) * (2.0 if x.abs().sum().item() > 0 else 1.0)


class Words(nn.Module):
    """Embedding, mean of the words, dense layers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

    def forward(self, words):
        return self.head(self.embedding(words).mean(1))


def frozen():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    net[1].weight.requires_grad_(False)
    return net


def norms(kind):
    return nn.Sequential(nn.Conv2d(3, 4, 3), kind, nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def dense_norm():
    layers = (nn.Linear(192, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


ZOO = {
    "flowers": (Flowers, "stacked", ""),
    "sized": (Sized, "stacked", ""),
    "written": (Written, "stacked", ""),
    "dropped": (Dropped, "stacked", ""),
    "always dropped": (AlwaysDropped, "vmap", "the operation 'dropout'"),
    "tied": (Tied, "vmap", "layers share a parameter"),
    "shared": (Shared, "vmap", "a layer with parameters is used twice"),
    "frozen": (frozen, "vmap", "parameter '1.weight' is frozen"),
    "group norm": (lambda: norms(nn.GroupNorm(2, 4)), "vmap", "layer '1' (GroupNorm)"),
    "layer norm": (dense_norm, "vmap", "layer '2' (LayerNorm)"),
    "batch norm": (
        lambda: norms(nn.BatchNorm2d(4, track_running_stats=False)), "loop",
        "layer '1' (BatchNorm2d) would see padding",
    ),
    "resnet-18": (small_resnet, "vmap", "is used by 2 layers"),
    "vit": (lambda: ViTTiny(CLASSES, 8, 2, 2, side=8), "vmap", "depends on the input"),
    "words": (Words, "vmap", "the operation 'mean'"),
    "counting": (Counting, "loop", "its forward cannot be batched"),
}  # fmt: skip


def setup(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = ZOO[name][0]()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, *SHAPE)).astype(np.float32)
    if name == "words":
        x = rng.integers(0, 20, (30, 5))
    return model, x, rng.integers(0, CLASSES, 30)


def trained(model, x, y, engine):
    """Three clients, the middle one with a batch to itself, under two models."""
    local = LocalTraining(epochs=2, batch_size=4, lr=0.05, momentum=0.5)
    trainer = Trainer(model, local, engine=engine, device="cpu")
    data = trainer.data(x, y)
    params = torch.stack([trainer.flat(), 0.9 * trainer.flat()])
    parts = [np.arange(0, 11), np.arange(11, 12), np.arange(12, 30)]
    work = jobs(trainer, 0, 0, "012", parts, [0, 1, 0])
    found = trainer.train(params, work, data).clone()
    return trainer, found, trainer.gradients(params, work, data), trainer.losses(params, work, data)


@pytest.mark.parametrize("name", ZOO)
def test_the_engine_and_its_reason(name, monkeypatch):
    monkeypatch.setattr(stacked, "runs_triton", lambda device: device.type == "cuda")
    model, x, y = setup(name)
    before = copy.deepcopy(model.state_dict())
    engine, reason = choose("auto", model, GPU)
    if ZOO[name][1] == "loop" and engine == "vmap":  # only a trial shows what torch.func cannot do
        data = (torch.from_numpy(x), torch.from_numpy(y))
        setup_of_it = Setup(model, Training(), cross_entropy, torch.device("cpu"))
        engine, reason = "loop", obstacle(setup_of_it, data)
        with pytest.raises(Unsupported, match="cannot be batched"):
            trained(model, x, y, "vmap")
    assert engine == ZOO[name][1], reason
    assert ZOO[name][2] in reason
    assert bool(reason) == bool(ZOO[name][2])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_side_by_side_equals_one_after_the_other(name):
    model, x, y = setup(name)
    trainer, *expected = trained(model, x, y, "loop")
    assert all(np.isfinite(np.asarray(values)).all() for values in expected)
    assert (expected[0] - trainer.flat()).abs().amax() > 1e-3
    if ZOO[name][1] == "loop" or name == "dropped":
        return
    images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    for engine in {"vmap" if images else ZOO[name][1], "vmap"}:  # images are stacked on GPUs only
        _, *found = trained(model, x, y, engine)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                torch.as_tensor(one), torch.as_tensor(other), rtol=1e-3, atol=1e-5
            )


def test_functional_dropout_drops_in_training_only():
    model, x, y = setup("dropped")
    plain = Written()
    plain.load_state_dict(model.state_dict())
    for engine in ("stacked", "vmap", "loop"):
        _, found, gradients, losses = trained(model, x, y, engine)
        _, expected, exact, exact_losses = trained(plain, x, y, engine)
        assert not torch.allclose(found, expected, atol=1e-4)
        torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(losses, exact_losses, rtol=1e-5)


def test_a_view_after_a_convolution_keeps_the_usual_layout():
    model, x, y = setup("flowers")
    flat = Trainer(model, device="cpu", engine="loop")
    assert flat.worker.last
    data = flat.data(x, y)
    accuracy, _ = flat.evaluate(flat.flat(), data)
    assert not flat.worker.last
    expected = (model(data.x).argmax(1) == data.y).double().mean()
    assert accuracy[0] == pytest.approx(float(expected))
    other = Trainer(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4)), device="cpu"
    )
    other.evaluate(other.flat(), data)
    assert other.worker.last


def test_strided_shortcuts_keep_the_usual_layout():
    """PyTorch 2.13 corrupts memory where a 1x1 convolution of stride 2 has channels last."""
    assert not Trainer(small_resnet(), device="cpu").worker.last
