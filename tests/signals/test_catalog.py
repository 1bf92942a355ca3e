"""Signals computed from made-up clients: label histograms and bias updates."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.privacy.noise import laplace_moments
from fedcohort.signals.catalog import SIGNALS, Clients, update_distance
from fedcohort.signals.projection import Vectors


class Two(Clients):
    ids = ("a", "b")

    def __init__(self, labels=3):
        self.labels = labels

    def examples(self):
        return [(None, [0, 2, 2]), (None, np.array([1]))]

    def classes(self):
        return self.labels

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
    for labels, epsilon, message in ((2, 0.0, "more than 2 labels"), (3, -1.0, "=-1")):
        with pytest.raises(ConfigError, match=message):
            SIGNALS["label_histogram"].readings(Two(labels), {"epsilon": epsilon})
    private = SIGNALS["label_histogram"].readings(Two(2), {"epsilon": 1.0})
    assert len(private["a"]) == 2  # no error tells the server that a label is odd


def test_private_label_histograms_have_the_noise_of_epsilon() -> None:
    """Variance of discrete Laplace noise of scale 2; 30,000 counts, so within 6 percent."""
    found = SIGNALS["label_histogram"].readings(Two(30_000), {"epsilon": 0.5})
    noise = found["b"] - np.bincount([1], minlength=30_000)
    assert abs(noise.var() / laplace_moments(2.0)[0] - 1) < 0.06
    assert abs(noise.mean()) < 4 * noise.std() / np.sqrt(30_000)


def test_distances_are_to_the_mean_update():
    """By hand: the mean is (2, 0), in float64 although updates are float32."""
    updates = np.array([[-1, 4], [5, -4], [2, 0]], np.float32)
    assert update_distance(updates).tolist() == [5, 5, 0]
