"""Every engine gives what one client after the other gives, by PyTorch's own optimizers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.simulate.local import LocalTraining, jobs
from fedcohort.simulate.models import CharLSTM, build
from modelstack import batched
from modelstack.jobs import Job
from modelstack.trainer import Trainer, choose
from modelstack.training import Unsupported

# an even kernel makes padding="same" uneven, which PyTorch warns is slow
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

SIZES = (1, 7, 30, 16, 8)  # one sample; fewer, more, exactly and twice the batch
BATCH = 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class DroppedFunctions(nn.Module):
    """Dropout as a function, of numbers and of channels, and between the layers of an LSTM."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36 + 6, 5)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        images = nn.functional.dropout2d(self.conv(x).relu(), 0.4, self.training)
        numbers = nn.functional.dropout(x.squeeze(1), 0.3, self.training)
        return self.fc(torch.cat([images.flatten(1), self.lstm(numbers)[0][:, -1]], 1))


def make(name):
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(7)
        if name == "mlp":
            layers = (nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5))
            return nn.Sequential(nn.Flatten(), *layers)
        if name == "odd":  # activations in a row, no bias, sigmoid
            layers = (nn.Linear(64, 9, bias=False), nn.Sigmoid(), nn.Tanh(), nn.ReLU())
            return nn.Sequential(nn.Flatten(), *layers, nn.Identity(), nn.Linear(9, 5))
        if name == "cnn":
            first = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            second = (nn.Conv2d(4, 6, (2, 3), stride=(1, 2), bias=False), nn.Tanh())
            third = (nn.Conv2d(6, 3, 2, padding="same"), nn.ReLU())
            dense = (nn.Flatten(), nn.Linear(9, 5))
            return nn.Sequential(nn.Sequential(*first), *second, *third, *dense)
        if name == "norms":  # windows that are even, odd and wider than the channels; strong
            first = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.LocalResponseNorm(4, alpha=2.0, k=0.5))
            second = (nn.MaxPool2d(2), nn.LocalResponseNorm(15, alpha=1.0, beta=1.5), nn.Tanh())
            third = (nn.Conv2d(6, 4, 2), nn.LocalResponseNorm(3, 0.5), nn.LocalResponseNorm(1))
            return nn.Sequential(*first, *second, *third, nn.Flatten(), nn.Linear(16, 5))
        if name == "lstm":
            return CharLSTM(vocabulary=5, embedding=3, hidden=6)
        if name == "dropped":
            layers = (nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5))
            return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), *layers)
        return DroppedFunctions()


def data(name, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 5, sum(SIZES))
    if name == "lstm":
        return rng.integers(0, 5, (len(y), 4)), y
    return rng.normal(size=(len(y), 1, 8, 8)).astype(np.float32), y


def jobs_of(trainer, rows=2):
    starts = np.cumsum([0, *SIZES])
    parts = np.split(np.arange(starts[-1]), starts[1:-1])
    names = [f"client {i}" for i in range(len(SIZES))]
    return jobs(trainer, 3, 1, names, parts, [i % rows for i in range(len(SIZES))])


OPTIONS = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "prox": {"prox_mu": 0.7, "momentum": 0.5},
    "decay": {"epoch_decay": 0.5},
    "steps": {"steps": 5},
}
ENGINES = [
    ("mlp", "loop"), ("mlp", "stacked"), ("mlp", "vmap"), ("odd", "stacked"),
    ("cnn", "loop"), ("cnn", "vmap"), ("norms", "vmap"),
    ("lstm", "loop"), ("lstm", "vmap"), ("lstm", "stacked"),
]  # fmt: skip


# All options of an optimizer on one network; the others with the two that hold memory of a round.
CASES = [
    (name, engine, options)
    for name, engine in ENGINES
    for options in (OPTIONS if name == "mlp" else ("momentum", "adam"))
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("name", "engine", "options"), CASES)
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
    rtol, atol, exact = (1e-4, 1e-5, 1e-6) if device == "cpu" else (1e-3, 1e-4, 1e-4)
    for some in (slice(2), slice(None), slice(2, None)):
        trained = trainer.train(params, work[some], held, rate).cpu()
        torch.testing.assert_close(trained, expected[some], rtol=rtol, atol=atol)
    gradients = trainer.gradients(params, work, held).cpu()
    torch.testing.assert_close(gradients, slopes, rtol=rtol, atol=exact)


STACKED = [(name, "stacked") for name in ("mlp", "lstm", "dropped")]
BATCHED = [*STACKED, *((name, "vmap") for name in ("cnn", "dropped", "dropped functions"))]
GROUPED = [
    *((*case, "in pairs") for case in BATCHED),
    *((*case, "one by one") for case in [*STACKED, ("cnn", "loop")]),
    *((*case, "as on a GPU") for case in BATCHED),  # all of its path but the capture itself
]


@pytest.mark.parametrize(("name", "engine", "variant"), GROUPED)
def test_how_jobs_are_grouped_changes_no_result(name, engine, variant, monkeypatch):
    """Rounds that shrink and grow; a dropout mask that changed would change percents."""
    local = LocalTraining(epochs=3, batch_size=BATCH, **OPTIONS["adam"])
    plain = Trainer(make(name), local, engine=engine, device="cpu", max_memory=2**30)
    memory = {"in pairs": 3 * 4 * plain.size * 4, "one by one": 1}.get(variant)
    if variant == "as on a GPU":
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
    again = other.train(params, work, held).clone()
    assert torch.equal(other.train(params, work, held), again)
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
def test_dropout_drops_in_training_is_seeded_and_leaves_the_global_generator_alone(engine):
    net = make("dropped")
    without = nn.Sequential(*[m for m in net if not isinstance(m, nn.Dropout)])
    local = LocalTraining(batch_size=BATCH)
    trainer = Trainer(net, local, engine=engine, device="cpu")
    held = trainer.data(*data("mlp"))
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


def test_frozen_parameters_stay():
    for engine in ("loop", "vmap"):
        net = make("mlp")
        net[1].weight.requires_grad_(False)
        trainer = Trainer(net, LocalTraining(weight_decay=0.1), engine=engine, device="cpu")
        held = trainer.data(*data("mlp"))
        trained = trainer.train(trainer.flat(), jobs_of(trainer, rows=1), held)
        frozen = net[1].weight.numel()
        assert torch.equal(trained[:, :frozen], trainer.flat()[:frozen].expand(5, -1))
        assert (trained[:, frozen:] != trainer.flat()[frozen:]).any()


def test_on_a_cpu_convolutions_and_recurrent_layers_train_in_a_plain_loop():
    names = ("mlp", "cnn", "lstm")
    found = [choose("auto", make(name), torch.device("cpu")).engine for name in names]
    assert found == ["stacked", "loop", "loop"]
    lrn = choose("auto", build("lrn-cnn", (3, 32, 32), 10), torch.device("cuda"))
    assert lrn.engine == "vmap"


def test_batch_norm_is_refused_unless_it_tracks_nothing():
    def net(tracks):
        norm = nn.BatchNorm1d(8, track_running_stats=tracks)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.Linear(8, 5))

    with pytest.raises(Unsupported, match=r"layer '2' \(BatchNorm1d\) tracks running statistics"):
        Trainer(net(True), device="cpu")
    with pytest.raises(Unsupported, match="layer '2'"):
        Trainer(net(False), device="cpu", engine="vmap")
    trainer = Trainer(net(False), LocalTraining(batch_size=4), device="cpu")
    assert trainer.engine == "loop"
    held = trainer.data(*data("mlp"))
    (job,) = jobs(trainer, 0, 0, "a", [np.arange(8)])
    assert torch.isfinite(trainer.train(trainer.flat(), [job], held)).all()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mlp", {"engine": "fast"}, "engine='fast'"),
        ("dropped functions", {"engine": "stacked"}, "engine='stacked': 'x' is used by 2 layers"),
        ("cnn", {"engine": "stacked"}, r"layer '0.0' \(Conv2d\) has a stacked form only on a GPU"),
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
