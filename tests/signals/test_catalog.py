"""Signals computed from made-up clients: label histograms and bias updates."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.privacy.noise import laplace_moments
from fedcohort.signals.catalog import SIGNALS, Clients, last_layer, update_distance
from fedcohort.signals.projection import Vectors


class Two(Clients):
    ids = ("a", "b")

    def examples(self):
        return [(None, [0, 2, 2]), (None, np.array([1]))]

    def classes(self):
        return 3

    def noise_source(self, client):
        return np.random.default_rng(ord(client))

    def updates(self):
        return Vectors(np.arange(10.0).reshape(2, 5))

    def last_array(self):
        return 2


def test_signals_of_two_clients() -> None:
    counts = SIGNALS["label_histogram"].readings(Two(), {})
    assert {c: h.tolist() for c, h in counts.items()} == {"a": [1, 0, 2], "b": [0, 1, 0]}
    updates = SIGNALS["bias_update"].readings(Two(), {})
    assert {c: u.tolist() for c, u in updates.items()} == {"a": [3, 4], "b": [8, 9]}
    for options, message in (({"classes": 2}, "more than 2 labels"), ({"epsilon": -1.0}, "=-1")):
        with pytest.raises(ConfigError, match=message):
            SIGNALS["label_histogram"].readings(Two(), options)


def test_private_label_histograms_have_the_noise_of_epsilon() -> None:
    """Variance of discrete Laplace noise of scale 2; 30,000 counts, so within 6 percent."""
    found = SIGNALS["label_histogram"].readings(Two(), {"epsilon": 0.5, "classes": 30_000})
    noise = found["b"] - np.bincount([1], minlength=30_000)
    assert abs(noise.var() / laplace_moments(2.0)[0] - 1) < 0.06
    assert abs(noise.mean()) < 4 * noise.std() / np.sqrt(30_000)


def test_distances_are_to_the_mean_update():
    """By hand: the mean is (2, 0), in float64 although updates are float32."""
    updates = np.array([[-1, 4], [5, -4], [2, 0]], np.float32)
    assert update_distance(updates).tolist() == [5, 5, 0]


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
