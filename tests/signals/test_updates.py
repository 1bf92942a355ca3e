"""Distances of updates against a loop in plain Python, and against the simulator's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedcohort.signals.updates import last_layer, update_distance

UPDATES = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
SIZES = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale_by_size", [False, True])
def test_distances_against_plain_python(weighted, scale_by_size):
    found = update_distance(UPDATES, SIZES, weighted=weighted, scale_by_size=scale_by_size)
    weights = SIZES if weighted else [1] * 5
    total = sum(weights)
    mean = [
        sum(w * float(u[j]) for w, u in zip(weights, UPDATES, strict=True)) / total
        for j in range(7)
    ]
    for i, update in enumerate(UPDATES):
        far = math.sqrt(sum((float(update[j]) - mean[j]) ** 2 for j in range(7)))
        assert found[i] == pytest.approx(far * (math.sqrt(SIZES[i]) if scale_by_size else 1))


def test_one_client_is_the_mean():
    assert update_distance(UPDATES[:1], [3]).tolist() == [0.0]


def test_the_last_layer_of_every_reference_model():
    from torch import nn

    from fedcohort.simulate import MODELS, build

    shapes = {"char-lstm": (5,), "cifar-cnn": (3, 32, 32), "fedcor-cnn": (3, 32, 32)}
    for name in MODELS:
        model = build(name, shapes.get(name, (28, 28)), 10, seed=0)
        state = model.state_dict()
        sizes = [value.numel() for value in state.values()]
        dense = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        expected = dense.weight.numel() + dense.bias.numel()
        assert last_layer(list(state), sizes) == expected, name
