"""The fused Triton layers: which models get them, and that they compute what PyTorch computes.

The kernels need a GPU. A GPU's results are compared with float64 on a CPU: the error may be at most
three times that of PyTorch's own float32 kernels on the same GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.datasets import federate, load
from fedcohort.simulate import simulate
from fedcohort.simulate.local import LocalTraining, jobs
from modelstack import stacked, switches
from modelstack.fused_convolution import Block, DenseBlock
from modelstack.trainer import Trainer

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
CLASSES = 4


class Residual(nn.Module):
    """Group norm, a shortcut with a stride, a mean over pixels."""

    def __init__(self):
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16)
        self.two, self.norm2 = nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(32, 32)
        self.short, self.head = nn.Conv2d(16, 32, 1, 2, bias=False), nn.Linear(32, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm1(self.one(x)))
        x = F.relu(self.norm2(self.two(x)) + self.short(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Viewed(nn.Module):
    """A Tanh of images, which has no stacked form, and `.view` after it."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(4 * 9, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).view(-1, 4 * 9))


class Recurrent(nn.Module):
    """A hidden size that is not a multiple of any tile."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 5), nn.LSTM(5, 20, batch_first=True)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def pooled():
    """Odd images, so that the pooling leaves a row and a column out."""
    images = (nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 2, padding=1))
    return nn.Sequential(*images, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, CLASSES))


def deep():
    images = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU())
    dense = (nn.Flatten(), nn.Linear(64 * 4, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    return nn.Sequential(*images, nn.Dropout(0.0), *dense)


def strided():
    images = (
        nn.Conv2d(3, 6, 3, 2, 1, bias=False),
        nn.Conv2d(6, 4, 3, (2, 1)),
        nn.MaxPool2d((1, 2)),
    )
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(4, CLASSES))


def dropped():
    images = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.0), nn.Conv2d(4, 4, 2))
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(100, CLASSES))


def dense():
    hidden = (nn.Linear(192, 40), nn.ReLU(), nn.Linear(40, 8, bias=False), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, CLASSES))


MODELS = {
    "pooled": pooled, "deep": deep, "strided": strided, "dropped": dropped, "dense": dense,
    "residual": Residual, "recurrent": Recurrent, "viewed": Viewed,
}  # fmt: skip


@pytest.fixture
def triton(monkeypatch):
    """Read models as on a GPU with Triton; nothing is computed there."""
    monkeypatch.setattr(stacked, "runs_triton", lambda device: device.type == "cuda")


def test_layers_are_joined_with_what_follows_them(triton):
    parts = [part for _, part in stacked.stackable(deep(), GPU)]
    assert [type(part) for part in parts] == [
        Block, Block, nn.Flatten, nn.Dropout, DenseBlock, DenseBlock
    ]  # fmt: skip
    first, second = parts[:2]
    assert (first.relu, first.pool, second.relu, second.pool.kernel_size) == (True, None, True, 2)
    assert [part.relu for part in parts[4:]] == [True, False]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Tanh()],
        [nn.LocalResponseNorm(2)],
        [nn.MaxPool2d(3, 2)],
        [nn.MaxPool2d(3)],
        [nn.MaxPool2d(2, ceil_mode=True)],
        [nn.MaxPool2d(2, padding=1)],
        [nn.MaxPool2d(2), nn.MaxPool2d(2)],
        [nn.Dropout(), nn.ReLU()],
        [nn.Conv2d(4, 4, 3, groups=2)],
        [nn.Linear(6, 6)],
    ],
)
def test_other_layers_of_images_are_not_fused(layers, triton):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Flatten(), nn.Linear(4, 2))
    assert f"({type(layers[-1]).__name__}) has no stacked form" in stacked.obstacle(model, GPU)


def trained(name, device, options, precision="float32", engine="auto", exact=None, memory=None):
    """Return the changes and gradients of three clients of unequal sizes under two models.

    By `exact`, in float64 on a CPU.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    local = LocalTraining(epochs=2, batch_size=4, lr=0.1, **options)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (17, 7)) if name == "recurrent" else rng.normal(size=(17, 3, 8, 8))
    y = rng.integers(0, CLASSES, 17)
    how = {"device": device, "precision": precision, "engine": engine, "max_memory": memory}
    trainer = Trainer(model, local, **how)
    start = torch.stack([trainer.flat(), 0.9 * trainer.flat()])
    parts = [np.arange(5), np.arange(5, 8), np.arange(8, 17)]
    work = jobs(trainer, 0, 0, "012", parts, [0, 1, 0])
    if exact is None:
        held = trainer.data(x, y)
        found = trainer.train(start, work, held).clone(), trainer.gradients(start, work, held)
    else:
        start = start.double()
        given = (start, work, torch.as_tensor(x), torch.as_tensor(y))
        found = exact(model.double(), local, *given, local.lr)
    rows = torch.tensor([job.row for job in work], device=start.device)
    return torch.cat([found[0] - start[rows], found[1]]).cpu().double()


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


class RoundedConvolution(torch.autograd.Function):
    """A convolution in float64 whose factors are rounded to the 11 bits of TF32, in both passes."""

    @staticmethod
    def forward(ctx, x, weight, geometry):
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return F.conv2d(eleven_bits(x), eleven_bits(weight), None, *geometry)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = eleven_bits(grad)
        below = nn.grad.conv2d_input(x.shape, eleven_bits(weight), grad, *ctx.geometry)
        on_weight = nn.grad.conv2d_weight(eleven_bits(x), weight.shape, grad, *ctx.geometry)
        return below, on_weight, None


def eleven_bits(x):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)


def rounded_forward(conv, x):
    out = RoundedConvolution.apply(x, conv.weight, (conv.stride, conv.padding))
    return out if conv.bias is None else out + conv.bias[:, None, None]


def interpret(name):
    """Run the kernels on a CPU, in a process that has set TRITON_INTERPRET."""
    switches.FUSED.add("cpu")
    engine = "vmap" if name in ("residual", "viewed") else "stacked"
    print(trained(name, "cpu", {"momentum": 0.9}, engine=engine).tolist())


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", ["strided", "recurrent", "viewed"])
def test_the_kernels_in_tritons_interpreter(name, reference):
    """The interpreter needs no GPU; it is slow, so only the smallest models run in it."""
    code = f"import test_fused; test_fused.interpret({name!r})"
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": here}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = trained(name, "cpu", {"momentum": 0.9}, exact=reference)
    found = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    assert distance(found, expected) < 1e-5


@gpu
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["sgd", "momentum"])
@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_are_as_exact_as_float32_on_a_gpu(name, options, monkeypatch, reference):
    """And with precision="tf32" as exact as training whose factors have 11 bits.

    Rounding changes which units a ReLU lets through, so errors of a deep network are some percent.
    """
    expected = trained(name, "cpu", options, exact=reference)
    fused, rough = (trained(name, "cuda", options, mode) for mode in ("float32", "tf32"))
    monkeypatch.setattr(switches, "FUSED", set())
    plain = trained(name, "cuda", options)
    error, usual, larger = (distance(found, expected) for found in (fused, plain, rough))
    assert error < max(3 * usual, 2e-6), (error, usual, larger)
    monkeypatch.setattr(nn.Conv2d, "forward", rounded_forward)
    rounded = trained(name, "cpu", options, exact=reference)
    assert larger < max(3 * distance(rounded, expected), 2e-2)
    assert torch.isfinite(fused).all()


def half_dropped():
    return nn.Sequential(*dense()[:3], nn.Dropout(0.5), *dense()[3:])


def half_dropped_images():
    return nn.Sequential(*dropped()[:2], nn.Dropout(0.5), *dropped()[3:])


@gpu
def test_dropout_masks_on_a_gpu_are_those_of_any_device_and_grouping(monkeypatch):
    """A mask that changed would change percents."""
    for name, make in {"dense": half_dropped, "dropped": half_dropped_images}.items():
        monkeypatch.setitem(MODELS, name, make)
        found = trained(name, "cuda", {})
        assert distance(trained(name, "cuda", {}, memory=1), found) < 1e-3
        if name == "dense":
            assert distance(trained(name, "cpu", {}), found) < 1e-3


@gpu
def test_huge_and_tiny_numbers_keep_their_digits_on_a_gpu():
    """16-bit numbers end at 65,504; each client's factors are scaled by their largest."""
    torch.manual_seed(0)
    model = pooled()
    found = {}
    for scale in (1.0, 2.0**20, 2.0**-20):  # powers of two: every product is only shifted
        trainer = Trainer(model, LocalTraining(), device="cuda")
        held = trainer.data(
            scale * torch.randn(8, 3, 8, 8, generator=torch.manual_seed(1)), [0] * 8
        )
        params = trainer.flat()
        params[3 * 6 * 9 : 3 * 6 * 9 + 6] = 0  # without the bias, outputs scale with the images
        start = params.clone()
        start[: 3 * 6 * 9] /= scale
        (job,) = jobs(trainer, 0, 0, "a", [np.arange(8)])
        found[scale] = trainer.gradients(start, [job], held)[0, 3 * 6 * 9 + 6 :].cpu()
    for scale in (2.0**20, 2.0**-20):
        torch.testing.assert_close(found[scale], found[1.0], rtol=1e-4, atol=1e-7)


def small_cnn(seed):
    torch.manual_seed(seed)
    images = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*images, nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10))


@gpu
def test_reduced_precision_stays_within_the_spread_of_seeds_on_a_gpu():
    """The means of five seeds differ by less than the seeds themselves do."""
    clients = federate(load("digits"), "shards", clients=20, seed=0)
    options = {"local": LocalTraining(epochs=3, batch_size=10, lr=0.1), "seeds": range(5)}
    options |= {"cohort_size": 5, "rounds": 15, "evaluate_every": 15, "device": "cuda"}

    def accuracies(mode):
        histories = simulate(clients, small_cnn, "uniform", precision=mode, **options)
        return np.array([history.accuracy[-1] for history in histories])

    exact, rough = accuracies("float32"), accuracies("tf32")
    assert abs(rough.mean() - exact.mean()) <= max(exact.std(ddof=1), 0.01)
