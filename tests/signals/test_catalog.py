"""Signals computed from made-up clients: label histograms and bias updates."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.privacy.noise import laplace_moments
from fedcohort.signals.catalog import SIGNALS, Clients
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


def test_label_histograms_count_labels() -> None:
    found = SIGNALS["label_histogram"].readings(Two(), {})
    assert {c: h.tolist() for c, h in found.items()} == {"a": [1, 0, 2], "b": [0, 1, 0]}
    with pytest.raises(ConfigError, match="more than 2 labels"):
        SIGNALS["label_histogram"].readings(Two(), {"classes": 2})


def test_private_label_histograms_have_the_noise_of_epsilon() -> None:
    """Variance of discrete Laplace noise of scale 2; 30,000 counts, so within 6 percent."""
    found = SIGNALS["label_histogram"].readings(Two(), {"epsilon": 0.5, "classes": 30_000})
    noise = found["b"] - np.bincount([1], minlength=30_000)
    assert abs(noise.var() / laplace_moments(2.0)[0] - 1) < 0.06
    assert abs(noise.mean()) < 4 * noise.std() / np.sqrt(30_000)
    with pytest.raises(ConfigError, match="epsilon=-1"):
        SIGNALS["label_histogram"].readings(Two(), {"epsilon": -1.0})


def test_bias_updates_are_the_last_array() -> None:
    found = SIGNALS["bias_update"].readings(Two(), {})
    assert {c: u.tolist() for c, u in found.items()} == {"a": [3, 4], "b": [8, 9]}
