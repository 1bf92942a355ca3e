"""What choosing cohorts by sketches is worth, before any training.

A policy's cohorts are worth as many random clients as have the same discrepancy: the squared
maximum mean discrepancy between the cohort's merged data and the federation's, less the expected
part of sample size and noise. For k of N random clients that is (V / k) (N - k) / (N - 1) in
expectation, with V the variance between clients. Cohorts are chosen on one half of the sketches'
rows and judged on the other, both ways, because a chosen cohort fits the noise that chose it.

Rounds saved: with uniform cohorts of discrepancy D, training took exp(slope * D) times as many
rounds to a target accuracy as with SketchMatch. The mean slope of the measured settings gives the
estimate and their spread its interval. ``benchmarks/plan_gain.py`` makes ``plan_gain.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import binom

from fedcohort.analysis.verdict import few
from fedcohort.exceptions import ConfigError
from fedcohort.policies import POLICIES, Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId, Outcome, Round, stream
from fedcohort.signals.forms import sketch_readings
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import Readings, Stack
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.transforms import Transform
from fedcohort.sketch.uncertainty import too_few

SIGNIFICANT = 3.0  # standard errors
WITH_TIME = "sketch-match with time"
FITTED = Path(__file__).with_name("plan_gain.json")
BUCKETS, LABEL_WEIGHT = 64, 2.0  # of the measured sketches; D depends on them
MAX_CLIENTS = 1000  # policies are tried on a random part of more clients
MAX_ROUNDS = 400

Floats = NDArray[np.float64]


class Gain(NamedTuple):
    """How many times fewer rounds than with uniform cohorts, with a prediction interval."""

    fewer_rounds: float
    low: float
    high: float

    def __str__(self) -> str:
        saved = 1 - 1 / self.fewer_rounds
        return (
            f"about {self.fewer_rounds:.1f} times fewer rounds than uniform cohorts "
            f"({self.low:.1f} to {self.high:.1f}), which saves {saved:.0%} of the rounds"
        )


class GainFit(NamedTuple):
    """Slopes of measured settings: mean, deviation, how many, and their largest D."""

    slope: float
    deviation: float
    settings: int
    largest: float
    level: float = 0.9

    def predict(self, discrepancy: float) -> Gain:
        """Estimate the gain at a discrepancy of uniform cohorts; Student's t interval."""
        from scipy.stats import t

        wide = float(t.ppf((1 + self.level) / 2, self.settings - 1))
        half = wide * self.deviation * math.sqrt(1 + 1 / self.settings)
        slopes = (self.slope, self.slope - half, self.slope + half)
        return Gain(*(math.exp(slope * max(discrepancy, 0.0)) for slope in slopes))


@cache
def shipped_fit() -> GainFit:
    """Return the fit that comes with the package."""
    return GainFit(**json.loads(FITTED.read_text(encoding="utf-8"))["fit"])


@dataclass(frozen=True)
class Worth:
    """What the cohorts of one policy and size are worth."""

    policy: str
    cohort_size: int
    discrepancy: float  # mean squared MMD to the federation
    error: float  # its standard error
    uniform: float  # the discrepancy of random cohorts
    random_clients: float  # that have the same discrepancy
    rounds: int
    rounds_until_all: int | None  # until every client had taken part; None: not all did
    fewest: float  # picks of a client, as a multiple of the equal share
    most: float
    waiting: tuple[ClientId, ...]  # clients never picked, at most ten
    seconds: float | None = None  # of a round, on average

    @property
    def beats_uniform(self) -> bool:
        """Whether the cohorts are closer to the federation than random ones, beyond chance."""
        return self.uniform - self.discrepancy > SIGNIFICANT * self.error


@dataclass(frozen=True)
class Plan:
    """What to expect of cohorts, by size and policy."""

    clients: int
    records: float
    left_out: tuple[ClientId, ...]
    tried_on: int  # clients, a random part of many
    variance: float  # between clients, as squared MMD
    worthwhile: bool  # whether random cohorts differ by more than chance and sample size explain
    uniform: dict[int, float]  # the discrepancy of random cohorts, by size
    uniform_seconds: dict[int, float]  # how long their rounds take, by size
    worths: tuple[Worth, ...]
    present: int | None  # the random cohort size in use today
    smallest: dict[str, int | None]  # cohort that is worth so many random clients, by policy
    gain: dict[int, Gain]  # what SketchMatch is expected to save, by cohort size
    no_gain: str  # why that is unknown
    verdict: str

    def lines(self) -> list[str]:
        """Say in sentences what to expect, the conclusion first."""
        out = [self.verdict]
        for k, gain in self.gain.items():
            if self.present in (None, k):
                out.append(f"Estimate for sketch-match with cohorts of {k}: {gain}.")
        if self.worthwhile and not self.gain:
            out.append(f"No estimate of the rounds saved: {self.no_gain}.")
        for policy, size in self.smallest.items():
            cohort = "no smaller cohort is" if size is None else f"{size} matched clients are"
            out.append(f"{policy}: {cohort} worth {self.present} random ones.")
        for k, seconds in self.uniform_seconds.items():
            rest = [w for w in self.worths if w.cohort_size == k and w.seconds is not None]
            times = "".join(f", {w.seconds:,.1f} s with {w.policy}" for w in rest)
            out.append(f"A round of {k} takes {seconds:,.1f} s at random{times}.")
        for worth in self.worths if self.worthwhile else ():
            if worth.waiting:
                case = f"{worth.policy}, cohorts of {worth.cohort_size}: not picked in"
                names = ", ".join(worth.waiting)
                out.append(f"{case} {worth.rounds} rounds: {names} (see turns=1).")
        if self.tried_on < self.clients:
            out.append(f"Policies were tried on {self.tried_on:,} of {self.clients:,} clients.")
        if self.left_out:
            out.append(f"Left out, with too few records for their noise: {few(self.left_out)}.")
        return out


def plan(
    sketches: Readings,
    cohort_sizes: Sequence[int] = (5,),
    policies: Sequence[str] = ("sketch-match",),
    *,
    names: Sequence[ClientId] | None = None,
    present: int | None = None,
    durations: Mapping[ClientId, float] | None = None,
) -> Plan:
    """Judge cohorts of some sizes and policies by the sketches of the clients.

    Parameters
    ----------
    sketches : structured array (N,) or sequence of RaceSketch
        One sketch per client, alike, of two rows or more.
    policies : sequence of str
        Policies that need sketches only, as name:key=value. Uniform cohorts are always judged.
    names : sequence of str, optional
        The clients' names; numbers by default.
    present : int, optional
        The random cohort size in use today: find the smallest matched cohort that is worth as much.
    durations : mapping of str to float, optional
        Seconds that clients take for a round; SketchMatch that minds time is then judged, too.

    Examples
    --------
    >>> from fedcohort import RaceSketch
    >>> rng = np.random.default_rng(0)
    >>> sketches = [RaceSketch.srp(dim=3, rows=10, bits=3) for _ in range(40)]
    >>> for i, sketch in enumerate(sketches):                       # three kinds of clients
    ...     sketch.add(3 * np.eye(3)[i % 3] + rng.standard_normal((200, 3)))
    >>> expected = plan(sketches, cohort_sizes=[3])
    >>> expected.worthwhile, expected.worths[0].random_clients > 15
    (True, True)
    """
    if isinstance(sketches, np.ndarray):
        readings = sketches
    else:
        stack = Stack(sketches)  # alike, and at least one
        readings = sketch_readings(stack.n, stack.noise, np.array([s.counts for s in sketches]))
    enough, count = ~too_few(sketches), len(readings)
    names = names or [f"{i:0{len(str(count))}d}" for i in range(count)]
    if not len(names) == len(set(names)) == count:
        raise ConfigError(f"plan: {len(set(names))} different names for {count} sketches")
    ids = np.array(names, object)
    left_out = tuple(ids[~enough].tolist())
    if left_out:  # else they are not copied
        readings, ids = readings[enough], ids[enough]
    if readings["counts"].shape[1] < 2:
        raise ConfigError(
            "plan: sketches need at least two rows, to choose by one half and judge by the other"
        )
    sizes = _checked_sizes(cohort_sizes, present, len(readings))
    makers = {text: _maker(text) for text in policies}
    if durations is not None:
        if not durations.keys() & set(ids):
            raise ConfigError(f"plan: the durations hold seconds of no client, such as {ids[0]!r}")
        options = {"time": dict(durations)}
        makers[WITH_TIME] = lambda: make("policy", "sketch-match", POLICIES, options)
    trial = Trial(readings, ids, durations)
    between = trial.between
    uniform = {k: between.uniform(k) for k in sizes}
    worths = tuple(trial.worth(text, maker, k) for text, maker in makers.items() for k in sizes)
    seen = between.variance > SIGNIFICANT * between.variance_error
    useful = seen and any(value > between.floor / k for k, value in uniform.items())
    gain, no_gain = _gains(sketches, worths) if useful else ({}, "nothing to gain")
    enough_for = [w for w in worths if present and w.random_clients >= present]
    smallest = {
        p: min((w.cohort_size for w in enough_for if w.policy == p), default=None)
        for p in makers
        if present is not None
    }
    return Plan(
        clients=len(readings),
        records=float(readings["n"].sum()),
        left_out=left_out,
        tried_on=len(trial.ids),
        variance=between.variance,
        worthwhile=useful,
        uniform=uniform,
        uniform_seconds={} if durations is None else {k: trial.seconds_of(k) for k in sizes},
        worths=worths,
        present=present,
        smallest=smallest,
        gain=gain,
        no_gain=no_gain,
        verdict=_verdict(useful, worths),
    )


def _checked_sizes(sizes: Sequence[int], present: int | None, clients: int) -> list[int]:
    for k in (*sizes, present or 1):
        if not 1 <= k < clients:
            raise ConfigError(
                f"plan: a cohort of {k} out of {clients} clients with enough records; "
                f"choose a size from 1 to {clients - 1}"
            )
    return sorted({*sizes, *range(1, (present or 0) + 1)})


def _maker(text: str) -> Callable[[], Policy]:
    needs = make("policy", text, POLICIES).needs
    if needs.profile != {"race_sketch"} or needs.reply or needs.query:
        raise ConfigError(
            f"plan: {text!r} does not select by sketches alone; choose sketch-match, race-softmax "
            "or kdpp:signal=race_sketch"
        )
    return lambda: make("policy", text, POLICIES)


def _gains(sketches: Readings, worths: Sequence[Worth]) -> tuple[dict[int, Gain], str]:
    """Estimate the rounds saved, by cohort size, and say why an estimate is missing."""
    plain = [w for w in worths if w.policy.startswith("sketch-match") and w.policy != WITH_TIME]
    gains, reason = dict[int, Gain](), "" if plain else "sketch-match was not tried"
    for worth in plain:
        if why := _unmeasured(sketches, worth):
            reason = why
        else:
            gains.setdefault(worth.cohort_size, shipped_fit().predict(worth.uniform))
    return gains, reason


def _unmeasured(sketches: Readings, worth: Worth) -> str:
    """Say why the measured settings tell nothing here."""
    if not worth.beats_uniform:
        return "matched cohorts are not closer to the federation than random ones"
    if isinstance(sketches, np.ndarray):
        return "the sketches do not state how they were made"
    step, srp = sketches[0].transform, isinstance(sketches[0].family, SRP)
    alike = srp and isinstance(step, Transform) and step.unit and step.label_weight == LABEL_WEIGHT
    if not alike or sketches[0].buckets != BUCKETS:
        how = f"unit vectors with 6 bits and label weight {LABEL_WEIGHT:g}"
        return f"speed-ups were measured for sketches of {how}"
    if worth.uniform > 1.1 * shipped_fit().largest:
        far = f"({shipped_fit().largest:.3f})"
        return f"uniform cohorts are farther from the federation than any measured {far}"
    return ""


def _verdict(useful: bool, worths: Sequence[Worth]) -> str:
    if not useful:
        return (
            "Nothing to gain: random cohorts already look like the federation, as far as these "
            "sketches can tell."
        )
    best = max(worths, key=lambda w: w.random_clients / w.cohort_size, default=None)
    if best is None:
        return "Clients differ; no policy was tried."
    if not best.beats_uniform or round(best.random_clients) <= best.cohort_size:
        return "Clients differ, but matched cohorts are no better than random ones."
    return (
        f"{best.cohort_size} clients chosen by {best.policy} represent the federation as well as "
        f"{best.random_clients:.0f} random ones."
    )


class BetweenClients:
    """Center, error variances and the variance between clients, over all sketches."""

    def __init__(self, readings: NDArray[Any]) -> None:
        stack = Stack(readings)
        self.rows, self.clients = stack.rows, len(stack)
        weights = np.full(self.clients, 1 / self.clients)
        self.center = stack.mixture(weights)
        self.errors = stack.error_variance()
        self.center_error = float(self.errors.mean()) / self.clients
        debiased = stack.debiased_squares_to(self.center, weights)
        self.variance = float(debiased.mean())
        self.variance_error = float(debiased.std() / math.sqrt(self.clients))
        noisy = stack.rows * stack.buckets * stack.noise / stack.n**2
        self.floor = float((self.errors - noisy).mean()) / self.rows

    def uniform(self, k: int) -> float:
        """Expected discrepancy of k random clients."""
        return self.variance / k * (self.clients - k) / max(self.clients - 1, 1)

    def random_clients(self, discrepancy: float) -> float:
        """How many random clients have this discrepancy in expectation: `uniform`, solved for k."""
        ratio = max(discrepancy, 0.0) * (self.clients - 1) / self.variance
        return self.clients / (1 + ratio)


class Half(BetweenClients):
    """Some rows of the sketches: a federation of its own, whose clients `at` can be picked."""

    def __init__(self, readings: NDArray[Any], at: NDArray[np.int64], rows: NDArray[Any]) -> None:
        half = sketch_readings(readings["n"], readings["noise"], readings["counts"][:, rows])
        super().__init__(half)
        self.readings, self.errors = half[at], self.errors[at]
        shapes = self.readings["counts"] * (1 / self.readings["n"])[:, None, None] - self.center
        self.points = shapes.reshape(len(at), -1).astype(np.float32)

    def judge(self, cohort: NDArray[np.int64]) -> float:
        """Debiased squared MMD between a cohort's merged data and the federation's."""
        weight = 1 / len(cohort)
        gap = self.points[cohort].mean(axis=0, dtype=np.float64)
        counted_twice = weight * (weight - 2 / self.clients)
        error = self.center_error + counted_twice * self.errors[cohort].sum()
        return float((gap @ gap - error) / self.rows)


class Trial:
    """Cohorts of some clients, chosen on one half of the rows and judged on the other."""

    def __init__(
        self,
        readings: NDArray[Any],
        ids: NDArray[Any],
        durations: Mapping[ClientId, float] | None = None,
    ) -> None:
        self.between = BetweenClients(readings)
        at = np.arange(len(ids))
        if len(ids) > MAX_CLIENTS:
            drawn = stream(0, "plan", "clients").choice(len(ids), MAX_CLIENTS, replace=False)
            at = np.sort(drawn)
        self.ids: tuple[ClientId, ...] = tuple(ids[at].tolist())
        stated = durations or {}
        usual = float(np.median(list(stated.values()))) if stated else math.nan  # if not stated
        self.seconds = np.array([stated.get(client, usual) for client in self.ids])
        rows = np.arange(readings["counts"].shape[1])
        self.halves = [Half(readings, at, rows % 2 == side) for side in (0, 1)]

    def seconds_of(self, k: int) -> float:
        """Mean seconds of a round with random cohorts of k: of C(n, k), C(i, k - 1) wait for i."""
        slowest = binom(np.arange(len(self.ids)), k - 1) / binom(len(self.ids), k)
        return float(np.sort(self.seconds) @ slowest)

    def worth(self, label: str, make: Callable[[], Policy], k: int) -> Worth:
        """Try one policy with cohorts of k."""
        values, waits, rounds, picks = [], [], [], []
        for chooser, judge in (self.halves, self.halves[::-1]):
            cohorts = self.cohorts(make(), chooser, k)
            values += [judge.judge(cohort) for cohort in cohorts]
            waits += [self.seconds[cohort].max() for cohort in cohorts]
            rounds.append(len(cohorts))
            picks.append(np.bincount(np.concatenate(cohorts), minlength=len(self.ids)))
        mean, uniform = float(np.mean(values)), self.between.uniform(k)
        total = np.sum(picks, axis=0)
        share = total / total.mean()
        return Worth(
            policy=label,
            cohort_size=k,
            discrepancy=mean,
            error=float(np.std(values) / math.sqrt(len(values))),
            uniform=uniform,
            random_clients=self.between.random_clients(mean) if uniform > 0 else float(k),
            rounds=max(rounds),
            rounds_until_all=max(rounds) if np.all(picks) else None,
            fewest=float(share.min()),
            most=float(share.max()),
            waiting=tuple(self.ids[i] for i in np.flatnonzero(total == 0)[:10].tolist()),
            seconds=None if math.isnan(waits[0]) else float(np.mean(waits)),
        )

    def cohorts(self, policy: Policy, half: Half, k: int) -> list[NDArray[np.int64]]:
        """Run the policy until everybody took part, at most 20 times as long as that must take."""
        signals, at = Signals(), {c: i for i, c in enumerate(self.ids)}
        signals.record("race_sketch", dict(zip(self.ids, half.readings, strict=True)), 0)
        unused, cohorts = set(self.ids), list[NDArray[np.int64]]()
        most = min(MAX_ROUNDS, max(20, 20 * math.ceil(len(self.ids) / k)))
        while unused and len(cohorts) < most:
            round = Round(len(cohorts), self.ids, k, "equal")
            chosen = policy.select(round, signals, stream(0, "plan", k, round.number)).clients
            policy.observe(round, Outcome(chosen, chosen), signals)
            cohorts.append(np.array([at[c] for c in chosen]))
            unused.difference_update(chosen)
        return cohorts
