"""Dropout masks belong to a client and a step, whatever else trains beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from modelstack import BatchPlan, Job, Trainer, Training
from modelstack.dropout import MaskKeys, fill_mask, keep_entries, layer_words

CPU = torch.device("cpu")


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
            fill_mask(keys, place, keep, mask)
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


class Masked(nn.Module):
    """Multiplies with the mask of the first step at a place."""

    def __init__(self, seed, place):
        super().__init__()
        self.keys, self.place = MaskKeys(1, CPU), place
        self.keys.restart([seed])

    def forward(self, x):
        mask = torch.empty(1, x.numel())
        fill_mask(self.keys, self.place, 0.5, mask)
        return x * mask.view(x.shape)


def test_a_step_with_dropout_is_that_of_autograd_with_the_same_masks(reference):
    torch.manual_seed(0)
    first, last = (nn.Linear(6, 20), nn.ReLU()), nn.Linear(20, 3)
    model = nn.Sequential(nn.Dropout(0.5), *first, nn.Dropout(0.5), last)
    masked = nn.Sequential(Masked(9, 0), *first, Masked(9, 3 * 3), last)
    trainer = Trainer(model, Training(batch_size=30, lr=0.5), engine="stacked", device="cpu")
    data = trainer.data(torch.randn(30, 6), torch.arange(30) % 3)
    job = Job(0, np.arange(30), BatchPlan(30, 30), seed=9)
    expected, _ = reference(masked, Training(), trainer.flat()[None], [job], *data, 0.5)
    torch.testing.assert_close(trainer.train(trainer.flat(), [job], data), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_masks():
    found = []
    for device in ("cpu", "cuda"):
        keys = MaskKeys(5, torch.device(device))
        keys.restart([1, 2**31, 2**32 - 1, 2**47 + 5, 0])
        keys.next_step()
        mask = torch.empty(5, 3000, device=device)
        fill_mask(keys, 7, 0.3, mask)
        found.append(mask.cpu())
    assert torch.equal(*found)
