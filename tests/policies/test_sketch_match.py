"""SketchMatch: the set objective recomputed naively, participation, privacy, large federations."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.policies import SketchMatch, Uniform, sketch_match
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.session import Session
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals


def federation(clients: int = 40, seed: int = 0, noise: float = 0.0):
    """Clients of two of ten kinds; a sketch of 4 rows tells the kinds apart."""
    rng = np.random.default_rng(seed)
    bucket = rng.integers(0, 16, size=(4, 10))
    out = np.zeros(clients, sketch_dtype(4, 16, "i4"))
    labels = np.zeros((clients, 10))
    for one, row in zip(out, labels, strict=True):
        kinds = rng.choice(10, 2, replace=False)
        row[kinds] = rng.integers(20, 60, size=2)
        one["n"] = row.sum()
        for r in range(4):
            np.add.at(one["counts"][r], bucket[r], row.astype(int))
        one["noise"] = noise
        one["counts"] += np.round(np.sqrt(noise) * rng.normal(size=(4, 16))).astype(int)
    ids = tuple(f"{i:03d}" for i in range(clients))
    signals = Signals()
    signals.record("race_sketch", dict(zip(ids, out, strict=True)), 0)
    return ids, out, labels, signals


def gap(readings: np.ndarray, chosen: list[int]) -> float:
    merged = readings["counts"][chosen].sum(axis=0) / readings["n"][chosen].sum()
    whole = readings["counts"].sum(axis=0) / readings["n"].sum()
    return float(((merged - whole) ** 2).sum())


def test_greedy_steps_equal_naive_merging() -> None:
    ids, readings, _, signals = federation()
    policy = SketchMatch(share=1.0, sweeps=0)
    chosen = [ids.index(c) for c in policy.select(Round(0, ids, 6), signals, stream(0)).clients]
    for step in range(6):
        done = chosen[:step]
        best = min(gap(readings, [*done, i]) for i in range(40) if i not in done)
        assert gap(readings, chosen[: step + 1]) == pytest.approx(best, rel=1e-4)


def test_exchanges_bring_the_cohort_nearer() -> None:
    ids, readings, _, signals = federation()
    gaps = {}
    for sweeps in (0, 2):
        policy = SketchMatch(share=1.0, sweeps=sweeps)
        chosen = policy.select(Round(0, ids, 6), signals, stream(0)).clients
        gaps[sweeps] = gap(readings, [ids.index(c) for c in chosen])
    assert gaps[2] < gaps[0]


def run(policy, ids, signals, rounds: int, size: int = 5) -> list[list[int]]:
    cohorts = []
    for number in range(rounds):
        round = Round(number, ids, size)
        chosen = policy.select(round, signals, stream(0, number)).clients
        policy.observe(round, Outcome(chosen, chosen), signals)
        cohorts.append([ids.index(c) for c in chosen])
    return cohorts


def test_cohorts_cover_all_kinds_better_than_uniform_ones() -> None:
    ids, _, labels, signals = federation()
    whole = labels.sum(axis=0) / labels.sum()

    def skew(cohorts: list[list[int]]) -> float:
        mixes = [labels[c].sum(axis=0) / labels[c].sum() for c in cohorts]
        return float(np.mean([np.abs(mix - whole).sum() for mix in mixes]))

    ours = skew(run(SketchMatch(), ids, signals, 40))
    assert ours < 0.4 * skew(run(Uniform(), ids, signals, 40))


def test_everybody_takes_part() -> None:
    """The pool is the less used half, so use never differs by much."""
    ids, _, _, signals = federation()
    counts = np.bincount(np.concatenate(run(SketchMatch(), ids, signals, 64)), minlength=40)
    assert counts.sum() == 320  # 8 each on average
    assert counts.min() >= 2  # a client that fits badly waits, but never for ever
    assert counts.max() <= 10
    assert np.mean(np.abs(counts - 8) <= 2) > 0.8
    everyone = np.bincount(
        np.concatenate(run(SketchMatch(share=1.0), ids, signals, 64)), minlength=40
    )
    assert everyone.min() == 0  # the best set alone would leave many out


def test_turns_leave_nobody_out() -> None:
    """Two of five places go to the least used: everybody is picked within 40 / 2 rounds."""
    ids, _, _, signals = federation()
    cohorts = run(SketchMatch(share=1.0, turns=2), ids, signals, 20)
    assert len(set(np.concatenate(cohorts).tolist())) == 40


def test_private_sketches_lose_little() -> None:
    ids, readings, _, _ = federation(200)
    _, noisy, _, signals = federation(200, noise=4.0)
    assert not np.array_equal(readings["counts"], noisy["counts"])
    cohorts = run(SketchMatch(), ids, signals, 30)
    uniform = run(Uniform(), ids, signals, 30)
    private = np.mean([gap(readings, c) for c in cohorts])
    assert private < 0.4 * np.mean([gap(readings, c) for c in uniform])


def test_large_federations_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kept Gram matrix, from the pool's sketches alone."""
    ids, _, _, signals = federation()
    small = run(SketchMatch(), ids, signals, 10)
    monkeypatch.setattr(sketch_match, "_GRAM", 5)
    assert run(SketchMatch(), ids, signals, 10) == small


def test_pool_size_is_limited() -> None:
    ids, _, _, signals = federation()
    policy = SketchMatch(largest_pool=8)
    policy.state.include(signals, ids, 0)
    assert policy._pool(ids, 5, stream(0)).size == 8
    assert policy._pool(ids, 12, stream(0)).size == 12
    assert SketchMatch()._pool(ids, 5, stream(0)).size == 20


def test_equal_average_matches_the_mean_of_distributions() -> None:
    ids, readings, _, signals = federation(12)
    policy = SketchMatch(share=1.0, average="equal", sweeps=5)
    chosen = [ids.index(c) for c in policy.select(Round(0, ids, 4), signals, stream(0)).clients]
    q = readings["counts"] / readings["n"][:, None, None]
    reached = ((q[chosen].mean(axis=0) - q.mean(axis=0)) ** 2).sum()
    rng = np.random.default_rng(0)
    random = [rng.choice(12, 4, replace=False) for _ in range(200)]
    others = [((q[s].mean(axis=0) - q.mean(axis=0)) ** 2).sum() for s in random]
    assert reached <= np.quantile(others, 0.04)


def test_a_session_asks_for_one_small_sketch_a_client() -> None:
    ids, readings, _, _ = federation()
    table = dict(zip(ids, readings, strict=True))
    policy = SketchMatch(rows=4, bits=4)
    session = Session(policy, cohort_size=5, seed=0, model_bytes=1000)
    for _ in range(3):
        selection = session.begin(ids, lambda name, clients: {c: table[c] for c in clients})
        session.finish({}, selection.clients)
    assert session.ledger.by_kind("up") == {
        "race_sketch": 40 * readings.dtype.itemsize,
        "model": 15_000,
    }
    options = SketchMatch().signal_options["race_sketch"]
    assert (options["rows"], options["bits"]) == (10, 6)
