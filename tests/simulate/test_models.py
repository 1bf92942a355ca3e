from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.models import build

IMAGE, COLOR = (1, 28, 28), (3, 32, 32)
COUNTS = {
    "mlp-512": (IMAGE, 10, 407_050),
    "mlp-64-30": (IMAGE, 10, 52_500),
    "fedcor-mlp": (IMAGE, 10, 52_500),
    "fcnn-300": (IMAGE, 10, 238_510),
    "lenet5": (IMAGE, 62, 66_126),
    "cnn": (IMAGE, 10, 582_026),
    "fedcor-cnn": (COLOR, 10, 66_570),
    "fedcor-cnn-64": (COLOR, 10, 122_570),
    "cifar-cnn": (COLOR, 10, 62_006),
    "lrn-cnn": (COLOR, 10, 555_178),
    "char-lstm": ((80,), 80, 293_584),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_outputs_and_seeds(name):
    shape, classes, count = COUNTS[name]
    before = torch.get_rng_state()
    model = build(name, shape, classes, seed=3)
    again, other = build(name, shape, classes, seed=3), build(name, shape, classes, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in model.parameters()) == count
    x = torch.zeros(2, *shape, dtype=torch.int64 if name == "char-lstm" else torch.float32)
    assert model(x).shape == (2, classes)
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, again, other)]
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize(
    ("init", "variance"), [("xavier-normal", 2 / 576), ("kaiming-normal", 2 / 512)]
)
def test_weights_are_drawn_as_asked(init, variance):
    """32,768 draws, whose variance has a relative error of 0.8 %."""
    make = lambda shape, classes: nn.Sequential(nn.Linear(512, 64))  # noqa: E731
    model, plain = build(make, (512,), 64, seed=1, init=init), build(make, (512,), 64, seed=1)
    assert float(model[0].weight.detach().var()) == pytest.approx(variance, rel=0.04)
    assert torch.equal(model[0].bias, plain[0].bias)
    with pytest.raises(ConfigError, match="unknown initialization 'zeros'"):
        build("cnn", IMAGE, 10, init="zeros")


def test_images_without_a_channel_are_accepted():
    flat, deep = build("cnn", (28, 28), 10, seed=1), build("cnn", (1, 28, 28), 10, seed=1)
    x = torch.rand(2, 28, 28)
    assert torch.equal(flat(x), deep(x.unsqueeze(1)))


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"unknown model 'resnet'.* Known: mlp-512, "):
        build("resnet", IMAGE, 10)
    with pytest.raises(ConfigError, match=r"input_shape=\(8, 8\) is too small"):
        build("cnn", (8, 8), 10)
    with pytest.raises(ConfigError, match="classes=0"):
        build("mlp-512", IMAGE, 0)
