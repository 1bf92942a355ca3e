"""k-DPP selection: frequencies by enumeration, inclusion, candidates, joins and leaves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from fedcohort import testing
from fedcohort.numerics import dpp
from fedcohort.policies import KDPP, kdpp
from fedcohort.rounds import Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals

IDS = tuple("abcdef")
PROFILES = np.random.default_rng(0).normal(size=(6, 3))


def recorded(profiles=PROFILES, ids=IDS, signal="feature_profile") -> Signals:
    return testing.recorded(**{signal: dict(zip(ids, profiles, strict=True))})


def test_of_many_clients_some_are_drawn_uniformly(monkeypatch) -> None:
    """With 3 of 6 and a cohort of 3, everybody is included with probability 1/2."""
    monkeypatch.setattr(kdpp, "_MAX_CLIENTS", 3)
    counts = dict.fromkeys(IDS, 0)
    for i in range(1500):
        selection = KDPP().select(Round(0, IDS, 3), recorded(), stream(0, i))
        assert list(selection.scores.values()) == pytest.approx([0.5] * 3)
        for client in selection.clients:
            counts[client] += 1
    assert all(abs(count - 750) < 5 * np.sqrt(375) for count in counts.values())


def test_largest_distance_is_kept_when_the_farthest_leaves() -> None:
    far = np.vstack([PROFILES[:3], [[9.0, 0.0, 0.0]]])  # 6 distances: too few to call one false
    policy, signals = KDPP(), recorded(far, IDS[:4])
    policy.select(Round(0, IDS[:4], 2), signals, stream(0))
    scale = policy.state.scale
    assert scale == pytest.approx(pdist(far).max())
    chosen = policy.select(Round(1, IDS[:3], 2), signals, stream(1))
    kernel = dpp.similarity_kernel(pdist(far[:3]), scale)
    expected = dpp.FixedSizeDPP.from_kernel(kernel).inclusion(2)
    for client, chance in chosen.scores.items():
        assert chance == pytest.approx(expected[IDS.index(client)])


@pytest.mark.parametrize("kernel", ["similarity", "features"])
def test_one_client_in_another_unit_does_not_make_all_others_alike(kernel) -> None:
    """60 clients, one scaled by 100: the other 59 share the places as without it, within 10 %.

    Before, that client was in every cohort, and the others were drawn uniformly: the correlation
    of their inclusion with that of the federation without it was 0.
    """
    profiles = np.random.default_rng(1).normal(size=(60, 8)) * np.r_[3.0, np.ones(7)]
    ids = tuple(f"{i:02d}" for i in range(60))

    def inclusion(rows):
        policy, scores = KDPP(kernel=kernel), {}
        for n in range(400):
            scores |= policy.select(Round(0, ids, 5), recorded(rows, ids), stream(n)).scores
        return np.array([scores[c] for c in ids[1:]]), scores[ids[0]]

    clean, _ = inclusion(profiles)
    scaled = profiles.copy()
    scaled[0] *= 100
    others, liar = inclusion(scaled)
    assert np.corrcoef(clean, others)[0, 1] > 0.9
    assert liar < 0.7


def test_sketches_serve_as_profiles() -> None:
    readings = np.zeros(6, sketch_dtype(2, 4, "i2"))
    readings["n"] = [10, 20, 10, 20, 10, 0]
    readings["counts"][:, :, 0] = [[10], [20], [0], [0], [0], [0]]
    readings["counts"][:, :, 1] = [[0], [0], [10], [20], [0], [0]]
    readings["counts"][:, :, 2] = [[0], [0], [0], [0], [10], [0]]
    policy = KDPP("race_sketch")
    signals = recorded(readings, signal="race_sketch")
    for i in range(30):  # never two of a kind, never the empty client
        chosen = set(policy.select(Round(0, IDS, 3), signals, stream(i)).clients)
        assert [len(chosen & set(kind)) for kind in ("ab", "cd", "e", "f")] == [1, 1, 1, 0]
