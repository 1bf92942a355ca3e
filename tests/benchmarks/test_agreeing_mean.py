"""CMFL as paper 1's released code has it, against one parameter after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agreeing_mean import AgreeingMean


def agreeing_one_by_one(current, updates, threshold):
    """One parameter after the other; also who is kept."""
    steps = [[u - c for u, c in zip(update, current, strict=True)] for update in updates]
    mean = [sum(column) / len(steps) for column in zip(*steps, strict=True)]
    same = [sum(np.sign(s) == np.sign(m) for s, m in zip(r, mean, strict=True)) for r in steps]
    kept = [i for i, n in enumerate(same) if n >= threshold * len(current)]
    kept = kept or [int(np.argmax(same))]
    return updates[kept].mean(axis=0), kept


@pytest.mark.parametrize("threshold", [0.0, 0.6, 0.7, 1.0])
def test_only_models_that_agree_with_the_mean_are_averaged(threshold):
    counts = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        current = rng.normal(size=40)
        updates = current + rng.normal(size=40) + 1.2 * rng.normal(size=(7, 40))
        updates[0] = current - rng.random(40)  # a zero step in a parameter agrees with no sign
        updates[1, :5] = current[:5]
        expected, kept = agreeing_one_by_one(current, updates, threshold)
        counts.add(len(kept))
        given = torch.from_numpy(current), torch.from_numpy(updates), [1] * 7
        got = AgreeingMean(threshold).step(given[0].float(), given[1].float(), given[2])
        assert got.numpy() == pytest.approx(expected, abs=1e-5)
    assert counts == {7} if threshold == 0 else counts == {1} if threshold == 1 else len(counts) > 1


def test_models_left_out_pass_their_weight_on():
    current, signs = torch.zeros(4), torch.ones(4)
    updates = torch.stack([signs, 3 * signs, -signs])
    got = AgreeingMean().step(current, updates, [1, 1, 1], [1.0, 2.0, 3.0])
    assert got.tolist() == pytest.approx([2.0 * 1 + 4.0 * 3] * 4)
