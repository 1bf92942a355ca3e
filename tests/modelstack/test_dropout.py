"""Dropout masks belong to a client and a step, whatever else trains beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.local import LocalTraining, jobs
from modelstack.batched import GraphStepper
from modelstack.dropout import MaskKeys, fill_mask, keep_entries, layer_words
from modelstack.trainer import Trainer

SIZES = (1, 7, 30, 16, 8)
CPU = torch.device("cpu")


class Written(nn.Module):
    """Dropout as a function, of numbers and of channels; two paths, so that it is not a chain."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36 + 64, 5)

    def forward(self, x):
        images = F.dropout2d(self.conv(x).relu(), 0.4, self.training)
        both = torch.cat([images.flatten(1), F.dropout(x, 0.3, self.training).flatten(1)], 1)
        return self.fc(both)


class Recurrent(nn.Module):
    """Dropout between the layers of an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.5), nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.lstm(x.squeeze(1))[0][:, -1])


def make(name):
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(7)
        if name == "dense":
            dense = (nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5))
            return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), *dense)
        if name == "images":
            first = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2))
            return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5))
        return Written() if name == "written" else Recurrent()


CASES = [("dense", "stacked"), ("images", "stacked"), ("dense", "vmap"), ("written", "vmap")]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("name", "engine"), [*CASES, ("recurrent", "vmap")])
def test_the_memory_bound_changes_no_mask(name, engine, graphs):
    """All clients at once, in pairs and one by one; a mask that changed would change percents."""
    local = LocalTraining(epochs=2, batch_size=8, lr=0.1, momentum=0.5)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 5, sum(SIZES))
    parts = np.split(np.arange(len(y)), np.cumsum(SIZES)[:-1])
    x = rng.normal(size=(len(y), 1, 8, 8)).astype(np.float32)
    found, each = [], 0
    for bound in (2**30, "pairs", 1):
        memory = 2 * each if bound == "pairs" else bound
        trainer = Trainer(make(name), local, engine=engine, device="cpu", max_memory=memory)
        trainer._engine.graphs = graphs
        data = trainer.data(x, y)
        work = jobs(trainer, 3, 1, [f"client {i}" for i in range(len(parts))], parts)
        found.append(trainer.train(trainer.flat(), work, data).clone())
        each = trainer._engine.client_bytes
        groups = len(list(trainer._engine._groups(list(range(5)), data)))
        assert groups == {2**30: 1, "pairs": 3, 1: 5}[bound]
    (stepper,) = trainer._engine.steppers.values()
    assert isinstance(stepper, GraphStepper) == graphs
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def test_cutting_batches_into_parts_changes_no_mask(monkeypatch):
    from modelstack import stacked

    local = LocalTraining(epochs=2, batch_size=8, lr=0.1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 1, 8, 8)).astype(np.float32), rng.integers(0, 5, 24)
    found = []
    for parts in (1, 8):
        monkeypatch.setitem(stacked.PARTS, "cpu", parts)
        trainer = Trainer(make("images"), local, engine="stacked", device="cpu")
        work = jobs(trainer, 0, 0, "ab", [np.arange(24)] * 2)
        found.append(trainer.train(trainer.flat(), work, trainer.data(x, y)).clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_functional_dropout_in_a_chain_differs_between_clients_and_rounds():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 12), nn.Linear(12, 5)

        def forward(self, x):
            return self.two(F.dropout(self.one(x.flatten(1)).relu(), 0.5, self.training))

    trainer = Trainer(Chain(), LocalTraining(batch_size=8), device="cpu")
    assert trainer.engine == "stacked"
    data = trainer.data(np.ones((8, 1, 8, 8), np.float32), np.arange(8) % 5)
    part = np.arange(8)
    work = jobs(trainer, 0, 0, "ab", [part, part]) + jobs(trainer, 0, 1, "a", [part])
    trained = trainer.train(trainer.flat(), work, data)
    assert not torch.equal(trained[0], trained[1]) and not torch.equal(trained[0], trained[2])


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_masks_keep_their_share_and_are_independent(keep):
    """64 clients, 2 steps, 2 layers, 4096 entries: a million bits.

    The share kept has a standard error of 0.0005 at most, each correlation of two masks (4096
    entries) one of 0.016; the largest of the 32,640 pairs is below 5 of those in expectation
    (4.2 for normal numbers). Masks shifted or repeated would correlate fully.
    """
    masks = []
    keys = MaskKeys(64, CPU)
    keys.restart([*range(60), 2**47, 2**47 + 1, 2**32, 2**33])
    for _ in range(2):
        for place in (0, 3):
            mask = torch.empty(64, 4096)
            fill_mask(keys, place, keep, None, mask)
            masks.append(mask)
        keys.next_step()
    bits = torch.cat(masks)
    assert set(bits.unique().tolist()) <= {0.0, float(np.float32(1 / max(keep, 1e-30)))}
    assert float((bits > 0).double().mean()) == pytest.approx(keep, abs=0.0025)
    if 0 < keep < 1:
        correlation = torch.corrcoef((bits > 0).double()) - torch.eye(len(bits))
        assert correlation.abs().max() < 6 / 64
        runs = ((bits[:, 1:] > 0) == (bits[:, :-1] > 0)).double().mean()
        assert float(runs) == pytest.approx(keep**2 + (1 - keep) ** 2, abs=0.004)


def test_positions_choose_the_entries():
    """Entry i of a mask depends on position[i] alone."""
    keys = MaskKeys(3, CPU)
    keys.restart([5, 6, 7])
    plain, moved = torch.empty(3, 100), torch.empty(3, 100)
    fill_mask(keys, 1, 0.5, None, plain)
    position = torch.from_numpy(np.random.default_rng(0).permutation(100).astype(np.int32))
    fill_mask(keys, 1, 0.5, position, moved)
    assert torch.equal(moved, plain[:, position.long()])


def test_the_hash_in_python_integers():
    """The same words, computed by hand without wrapping."""

    def mix(h):
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    seed, step, place = 0x123456789ABC, 5, 4
    keys = MaskKeys(1, CPU)
    keys.restart([seed])
    keys.step.fill_(step)
    first = mix((seed + step * 0x9E3779B9) % 2**32)
    first = mix((first + place * 0x85EBCA6B) % 2**32)
    second = mix(first ^ seed >> 32)
    found = layer_words(keys.words, keys.step, place)
    assert [int(word) % 2**32 for word in found] == [first, second]
    position = torch.arange(300, dtype=torch.int32)
    words = [mix((mix(i * 0x9E3779B9 % 2**32 ^ first) + second) % 2**32) for i in range(300)]
    expected = [(word >> 8) < round(0.3 * 2**24) for word in words]
    assert keep_entries(*found, position, 0.3).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_masks():
    position = torch.from_numpy(np.random.default_rng(0).permutation(3000).astype(np.int32))
    for given in (None, position):
        found = []
        for device in ("cpu", "cuda"):
            keys = MaskKeys(5, torch.device(device))
            keys.restart([1, 2**31, 2**32 - 1, 2**47 + 5, 0])
            keys.next_step()
            mask = torch.empty(5, 3000, device=device)
            fill_mask(keys, 7, 0.3, None if given is None else given.to(device), mask)
            found.append(mask.cpu())
        assert torch.equal(*found)
