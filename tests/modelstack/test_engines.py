"""Every engine gives what one client after the other gives, by PyTorch's own optimizers.

The models are written as people write them. "auto" on a GPU takes the engine in the table; the
reason names the layer that prevents a faster one.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.local import LocalTraining, jobs
from fedcohort.simulate.models import CharLSTM
from modelstack import batched, stacked
from modelstack.jobs import Job
from modelstack.kernel import Setup, cross_entropy
from modelstack.trainer import Trainer, choose
from modelstack.training import BatchPlan, Training, Unsupported
from modelstack.vmapped import OneClient, obstacle

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from simulation_models import ResNet18, ViTTiny

pytestmark = [
    # an even kernel makes padding="same" uneven, which PyTorch warns is slow
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

SIZES = (1, 7, 30, 16, 8)  # one sample; fewer, more, exactly and twice the batch
BATCH, CLASSES = 8, 4
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
        return F.dropout(x, 0.5, training=self.training)


class AlwaysDropped(Written):
    """Dropout that stays on in evaluation mode, which the stacked engine does not do."""

    def drop(self, x):
        return F.dropout(x, 0.0)


class DroppedFunctions(nn.Module):
    """Dropout as a function, of numbers and of channels, and between the layers of an LSTM."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36 + 6, CLASSES)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        images = F.dropout2d(self.conv(x).relu(), 0.4, self.training)
        numbers = F.dropout(x.flatten(1, 2), 0.3, self.training)
        return self.fc(torch.cat([images.flatten(1), self.lstm(numbers)[0][:, -1]], 1))


class Flowers(nn.Module):
    """The network of PyTorch's tutorial, as in most example apps: `.view` after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 2)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv2(self.pool(F.relu(self.conv1(x)))))
        return self.fc2(F.relu(self.fc1(x.view(-1, 8 * 2 * 2))))


class Sized(Flowers):
    """Flattens by the number of samples."""

    def forward(self, x):
        x = self.conv2(F.max_pool2d(torch.relu(self.conv1(x)), 2)).relu()
        return self.fc2(torch.tanh(self.fc1(x.view(x.size(0), -1))))


class Tied(nn.Module):
    """A weight used twice, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.head, self.again = nn.Linear(192, CLASSES), nn.Linear(192, CLASSES)
        self.again.weight = self.head.weight

    def forward(self, x):
        return self.head(x.flatten(1)) + self.again(torch.tanh(x.flatten(1)))


class Shared(Written):
    """One layer called twice."""

    def __init__(self):
        super().__init__()
        self.same = nn.Linear(12, 12)

    def drop(self, x):
        return torch.relu(self.same(torch.relu(self.same(x))))


class Counting(Written):
    """Reads a number out of a tensor, which nothing but the plain loop can do."""

    def drop(self, x):
        return x * (2.0 if x.abs().sum().item() > 0 else 1.0)


def mlp():
    first = nn.Sequential(nn.Linear(192, 12), nn.ReLU())
    return nn.Sequential(nn.Flatten(), first, nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def odd():
    """Activations in a row, no bias, sigmoid."""
    layers = (nn.Linear(192, 9, bias=False), nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.Identity())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(9, CLASSES))


def cnn():
    first = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(4, 6, (2, 3), stride=(1, 2), bias=False), nn.Tanh())
    third = (nn.Conv2d(6, 3, 2, padding="same"), nn.ReLU())
    return nn.Sequential(*first, *second, *third, nn.Flatten(), nn.Linear(9, CLASSES))


def response_norms():
    """Windows that are even, odd and wider than the channels; strong."""
    first = (nn.Conv2d(3, 6, 3), nn.ReLU(), nn.LocalResponseNorm(4, alpha=2.0, k=0.5))
    second = (nn.MaxPool2d(2), nn.LocalResponseNorm(15, alpha=1.0, beta=1.5), nn.Tanh())
    third = (nn.Conv2d(6, 4, 2), nn.LocalResponseNorm(3, 0.5), nn.LocalResponseNorm(1))
    return nn.Sequential(*first, *second, *third, nn.Flatten(), nn.Linear(16, CLASSES))


def dropped():
    layers = (nn.Linear(192, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, CLASSES))
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), *layers)


def frozen():
    net = mlp()
    net[1][0].weight.requires_grad_(False)
    return net


def norms(kind):
    return nn.Sequential(nn.Conv2d(3, 4, 3), kind, nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


ZOO = {
    "mlp": (mlp, "stacked", ""),
    "odd": (odd, "stacked", ""),
    "cnn": (cnn, "vmap", "layer '4' (Tanh)"),
    "response norm": (response_norms, "vmap", "layer '2' (LocalResponseNorm)"),
    "lstm": (lambda: CharLSTM(CLASSES + 1, embedding=3, hidden=6), "stacked", ""),
    "dropped": (dropped, "stacked", ""),
    "dropped functions": (DroppedFunctions, "vmap", "'x' is used by 2 layers"),
    "flowers": (Flowers, "stacked", ""),
    "sized": (Sized, "stacked", ""),
    "written": (Written, "stacked", ""),
    "written, dropped": (Dropped, "stacked", ""),
    "always dropped": (AlwaysDropped, "vmap", "the operation 'dropout'"),
    "tied": (Tied, "vmap", "layers share a parameter"),
    "shared": (Shared, "vmap", "a layer with parameters is used twice"),
    "frozen": (frozen, "vmap", "parameter '1.0.weight' is frozen"),
    "group norm": (lambda: norms(nn.GroupNorm(2, 4)), "vmap", "layer '1' (GroupNorm)"),
    "batch norm": (
        lambda: norms(nn.BatchNorm2d(4, track_running_stats=False)), "loop",
        "layer '1' (BatchNorm2d) would see padding",
    ),
    "resnet-18": (lambda: ResNet18(CLASSES, width=4, groups=2), "vmap", "is used by 2 layers"),
    "vit": (lambda: ViTTiny(CLASSES, 8, 2, 2, side=8), "vmap", "depends on the input"),
    "counting": (Counting, "loop", "its forward cannot be batched"),
}  # fmt: skip


def make(name):
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(7)
        return ZOO[name][0]()


def data(name):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, sum(SIZES))
    if name == "lstm":
        return rng.integers(0, 5, (len(y), 4)), y
    return rng.normal(size=(len(y), 3, 8, 8)).astype(np.float32), y


def jobs_of(trainer, rows=2):
    starts = np.cumsum([0, *SIZES])
    parts = np.split(np.arange(starts[-1]), starts[1:-1])
    names = [f"client {i}" for i in range(len(SIZES))]
    return jobs(trainer, 3, 1, names, parts, [i % rows for i in range(len(SIZES))])


@pytest.mark.parametrize("name", ZOO)
def test_the_engine_and_its_reason(name, monkeypatch):
    monkeypatch.setattr(stacked, "runs_triton", lambda device: device.type == "cuda")
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    engine, reason = choose("auto", model, torch.device("cuda"))
    if ZOO[name][1] == "loop" and engine == "vmap":  # only a trial shows what torch.func cannot do
        held = tuple(map(torch.from_numpy, data(name)))
        engine = "loop"
        reason = obstacle(Setup(model, Training(), cross_entropy, torch.device("cpu")), held)
        trainer = Trainer(model, engine="vmap", device="cpu")
        with pytest.raises(Unsupported, match="cannot be batched"):
            trainer.train(trainer.flat(), jobs_of(trainer, rows=1), trainer.data(*held))
    assert (engine, ZOO[name][2] in reason) == (ZOO[name][1], True), reason
    assert bool(reason) == bool(ZOO[name][2])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


OPTIONS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "sgd": {},
    "prox": {"prox_mu": 0.7, "momentum": 0.5},
    "decay": {"epoch_decay": 0.5},
    "steps": {"steps": 5},
}
IMAGES = ("flowers", "sized")  # stacked on a GPU only
RANDOM = ("dropped", "dropped functions", "written, dropped")


def cases():
    """All options on one network; on the others momentum, which holds memory of a round."""
    for name, (_, fastest, _) in ZOO.items():
        if name in RANDOM:
            continue
        engines = ["loop", "vmap", "stacked"][: ["loop", "vmap", "stacked"].index(fastest) + 1]
        some = {"mlp": list(OPTIONS), "lstm": ["momentum", "adam"]}.get(name, ["momentum"])
        for engine, options in product(engines, some):
            if engine != "stacked" or name not in IMAGES:
                yield name, engine, options, "cpu"
            if name in ("mlp", "lstm", "cnn", "response norm", "flowers"):
                yield pytest.param(name, engine, options, "cuda", marks=GPU)


@pytest.mark.parametrize(("name", "engine", "options", "device"), cases())
def test_training_and_gradients_equal_pytorch(reference, name, engine, options, device):
    local = LocalTraining(**{"epochs": 3, "batch_size": BATCH, "lr": 0.1} | OPTIONS[options])
    model = make(name)
    trainer = Trainer(model, local, engine=engine, device=device)
    held = trainer.data(*data(name))
    params = torch.stack([trainer.flat(), 0.9 * trainer.flat()])
    work, rate = jobs_of(trainer), local.lr / 2
    given = [tensor.cpu() for tensor in (params, *held)]
    expected, slopes = reference(model, local, given[0], work, *given[1:], rate)
    moved = (expected - given[0][[job.row for job in work]]).abs().amax(1)
    assert moved.min() > 1e-3
    # float32 rounding over 12 steps; Adam divides by gradients that may be near zero
    rtol, atol = (1e-4, 1e-5) if device == "cpu" else (1e-3, 1e-4)
    for some in (slice(2), slice(2, None), slice(None)):
        trained = trainer.train(params, work[some], held, rate).clone()
        torch.testing.assert_close(trained.cpu(), expected[some], rtol=rtol, atol=atol)
    if (engine, device) != ("loop", "cuda"):  # cuDNN may add in any order
        assert torch.equal(trainer.train(params, work, held, rate), trained)
    gradients = trainer.gradients(params, work, held).cpu()
    torch.testing.assert_close(gradients, slopes, rtol=rtol, atol=atol)


BATCHED = [(name, "stacked") for name in ("mlp", "lstm", "dropped")]
BATCHED += [(name, "vmap") for name in ("cnn", "dropped", "dropped functions")]


@pytest.mark.parametrize(("name", "engine"), BATCHED)
@pytest.mark.parametrize("variant", ["in pairs", "as on a GPU"])
def test_how_jobs_are_grouped_changes_no_result(name, engine, variant, monkeypatch):
    """Rounds that shrink and grow; a dropout mask that changed would change percents."""
    local = LocalTraining(epochs=3, batch_size=BATCH, **OPTIONS["adam"])
    plain = Trainer(make(name), local, engine=engine, device="cpu", max_memory=2**30)
    memory = 3 * 4 * plain.size * 4 if variant == "in pairs" else None
    if variant == "as on a GPU":  # all of its path but the capture itself
        monkeypatch.setattr(batched, "GRAPHS", {"cpu"})
    other = Trainer(make(name), local, engine=engine, device="cpu", max_memory=memory)
    held, work = plain.data(*data(name)), jobs_of(plain)
    params = torch.stack([plain.flat(), 0.9 * plain.flat()])
    with monkeypatch.context() as patch:
        patch.setattr(batched, "GRAPHS", {"cuda"})
        cohorts = (work[:2], work, work[2:], work[:1])
        calls = [(call, cohort) for cohort in cohorts for call in ("train", "gradients")]
        expected = [getattr(plain, call)(params, cohort, held).clone() for call, cohort in calls]
    for (call, cohort), exact in zip(calls, expected, strict=True):
        found = getattr(other, call)(params, cohort, held)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    measured = (t.losses(params, work, held) for t in (other, plain))
    np.testing.assert_allclose(*measured, rtol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
def test_a_loss_of_ones_own(engine, reference):
    def squared(outputs, y):
        return (outputs[:, 0] - y).square()

    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    local = LocalTraining(batch_size=4, lr=0.05, epochs=2)
    trainer = Trainer(net, local, loss=squared, engine=engine, device="cpu")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 3)), rng.normal(size=11)
    held = trainer.data(x, y)
    (job,) = jobs(trainer, 0, 0, "a", [np.arange(11)])
    trained = trainer.train(trainer.flat(), [job], held)
    expected, _ = reference(net, local, trainer.flat()[None], [job], *held, 0.05, loss=squared)
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(trainer.evaluate(trained, held)[0]).all()


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
@pytest.mark.parametrize("name", ["dropped", "written, dropped"])
def test_dropout_drops_in_training_is_seeded_and_leaves_the_global_generator_alone(name, engine):
    net = make(name)
    without = Written()
    if name == "dropped":
        without = nn.Sequential(*[m for m in net if not isinstance(m, nn.Dropout)])
    without.load_state_dict(dict(zip(without.state_dict(), net.state_dict().values(), strict=True)))
    local = LocalTraining(batch_size=BATCH)
    trainer = Trainer(net, local, engine=engine, device="cpu")
    held = trainer.data(*data(name))
    work = jobs_of(trainer, rows=1)
    before = torch.get_rng_state()
    first = trainer.train(trainer.flat(), work, held).clone()
    again = trainer.train(trainer.flat(), work, held).clone()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    other = [Job(job.row, job.positions, job.plan, job.seed + 1) for job in work]
    assert not torch.equal(trainer.train(trainer.flat(), other, held), first)
    plain = Trainer(without, local, engine=engine, device="cpu")
    assert not torch.allclose(plain.train(trainer.flat(), work, held), first, atol=1e-4)
    for call in ("gradients", "losses"):
        found, expected = (getattr(t, call)(t.flat(), work, held) for t in (trainer, plain))
        torch.testing.assert_close(found, expected)
    assert trainer.evaluate(trainer.flat(), held)[1] == plain.evaluate(plain.flat(), held)[1]


def test_on_a_cpu_convolutions_and_recurrent_layers_train_in_a_plain_loop():
    names = ("mlp", "cnn", "lstm")
    found = [choose("auto", make(name), torch.device("cpu")).engine for name in names]
    assert found == ["stacked", "loop", "loop"]


def test_batch_norm_is_refused_unless_it_tracks_nothing():
    with pytest.raises(Unsupported, match=r"layer '1' \(BatchNorm2d\) tracks running statistics"):
        Trainer(norms(nn.BatchNorm2d(4)), device="cpu")
    with pytest.raises(Unsupported, match="layer '1'"):
        Trainer(make("batch norm"), device="cpu", engine="vmap")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mlp", {"engine": "fast"}, "engine='fast'"),
        ("dropped functions", {"engine": "stacked"}, "engine='stacked': 'x' is used by 2 layers"),
        ("cnn", {"engine": "stacked"}, r"layer '0' \(Conv2d\) has a stacked form only on a GPU"),
        ("mlp", {"loss": "huber"}, "loss='huber' is unknown"),
        ("mlp", {"max_memory": 0}, "max_memory=0"),
        ("mlp", {"device": "nowhere"}, "device='nowhere'"),
        ("mlp", {"precision": "half"}, "precision='half'"),
        ("mlp", {"precision": "tf32"}, "'tf32' needs a GPU, not cpu"),
    ],
)
def test_a_wrong_option_is_named(name, options, words):
    with pytest.raises(Unsupported, match=words):
        Trainer(make(name), **{"device": "cpu"} | options)


def test_what_cannot_be_trained_is_named():
    trainer = Trainer(make("mlp"), device="cpu")
    held, flat, two = trainer.data(*data("mlp")), trainer.flat(), np.arange(2)
    dense = Trainer(nn.Sequential(nn.Linear(8, 5)), engine="stacked", device="cpu")
    for words, call in {
        "no trainable parameter": lambda: Trainer(nn.Flatten()),
        "without a plan": lambda: trainer.train(flat, [Job(0, two)], held),
        "job 0: row=1, but there are 1 models": lambda: trainer.losses(flat, [Job(1, two)], held),
        r"job 1: n, .* plan are \(2, 1, 1, None\), of the training \(2, 32, 1, None\)": lambda: (
            trainer.train(flat, [Job(0, two, BatchPlan(2, b)) for b in (32, 1)], held)
        ),
        "job 0 has no samples": lambda: trainer.losses(flat, [Job(0, two[:0])], held),
        "the model has": lambda: trainer.evaluate(torch.zeros(3), held),
        r"put nn.Flatten\(\) before it": lambda: dense.train(
            dense.flat(), jobs_of(dense, rows=1), held
        ),
    }.items():
        with pytest.raises(Unsupported, match=words):
            call()
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="sees no GPU"):
            Trainer(make("mlp"), device="cuda")


def test_a_view_of_channels_last_is_copied_in_a_mode_of_one_client():
    with OneClient(torch.zeros(2), torch.zeros(1)):
        images = torch.arange(24.0).view(1, 2, 3, 4).permute(0, 3, 1, 2)
        assert torch.equal(images.view(-1, 24), images.reshape(1, 24))
        assert images.view(1, 4, 2, 3).data_ptr() == images.data_ptr()
        with pytest.raises(RuntimeError, match="invalid for input"):
            images.view(5)


def test_short_runs_do_not_pay_for_a_compiler():
    """What "auto" takes on a CPU never loads torch._dynamo, which takes a second or more."""
    code = """
import sys
import numpy as np
from fedcohort.simulate.models import build
from fedcohort.simulate.local import Trainer, jobs
for name in ("mlp-64-30", "cnn"):
    trainer = Trainer(build(name, (1, 28, 28), 10), device="cpu")
    data = trainer.data(np.zeros((9, 1, 28, 28), np.float32), np.arange(9))
    work = jobs(trainer, 0, 0, "a", [np.arange(9)])
    trained = trainer.train(trainer.flat(), work, data)
    trainer.evaluate(trained, data), trainer.gradients(trained, work, data)
    assert "torch._dynamo" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_users_model_and_no_jobs_are_left_alone():
    net = make("mlp")
    before = [p.clone() for p in net.parameters()]
    trainer = Trainer(net, device="cpu")
    held = trainer.data(*data("mlp"))
    trainer.train(2 * trainer.flat(), jobs_of(trainer, rows=1), held)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert trainer.train(trainer.flat(), [], held).shape == (0, trainer.size)
    assert trainer.gradients(trainer.flat(), [], held).shape == (0, trainer.size)


def test_on_a_cpu_images_have_channels_last_unless_the_model_cannot_take_it():
    for name, last in {"flowers": False, "cnn": True}.items():
        net = make(name)
        trainer = Trainer(net, device="cpu", engine="loop")
        assert trainer.worker.last
        held = trainer.data(*data(name))
        accuracy, _ = trainer.evaluate(trainer.flat(), held)
        assert trainer.worker.last == last
        expected = (net(held.x).argmax(1) == held.y).double().mean()
        assert accuracy[0] == pytest.approx(float(expected))
    # PyTorch 2.13 corrupts memory where a 1x1 convolution of stride 2 has channels last.
    assert not Trainer(make("resnet-18"), device="cpu").worker.last
