"""What choosing cohorts by sketches is worth, before any training.

`fedcohort.analysis.worth` judges the cohorts; here are the questions that a plan answers, an
estimate of the rounds saved, and the sentences.

The estimate: training with uniform cohorts took exp(slope * D) times as many rounds to a target
accuracy as with SketchMatch, where D is the discrepancy of uniform cohorts. Each measured setting
has a slope. Their mean gives the estimate and their spread its interval, which shrinks to "no gain"
where D is 0. ``plan_gain.json`` holds the fit; ``benchmarks/plan_gain.py`` makes that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcohort.analysis.worth import Average, BetweenClients, Trial, Worth
from fedcohort.exceptions import ConfigError
from fedcohort.policies import POLICIES, Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId
from fedcohort.signals.forms import sketch_dtype
from fedcohort.sketch.distances import Readings, Stack
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform
from fedcohort.sketch.uncertainty import too_few

SIGNIFICANT = 3.0  # standard errors
WITH_TIME = "sketch-match with time"
FITTED = Path(__file__).with_name("plan_gain.json")
BUCKETS, LABEL_WEIGHT = 64, 2.0  # of the measured sketches; D depends on them


@dataclass(frozen=True)
class Gain:
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


@dataclass(frozen=True)
class GainFit:
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
class Plan:
    """What to expect of cohorts, by size and policy.

    `left_out` are clients that say nothing; the policies were `tried_on` so many of the others.
    `variance` is that between clients, as squared MMD. By cohort size: `floor` is what random
    cohorts show from sample size alone, `uniform` their discrepancy and `uniform_seconds` how long
    their rounds take. `smallest` is, by policy, the smallest cohort that is worth `present` random
    clients, and `gain` how many times fewer rounds SketchMatch is expected to take; `no_gain` says
    why an estimate is missing.
    """

    clients: int
    records: float
    left_out: tuple[ClientId, ...]
    tried_on: int
    average: Average
    variance: float
    variance_error: float
    floor: dict[int, float]
    uniform: dict[int, float]
    uniform_by_draws: dict[int, tuple[float, float]]
    uniform_seconds: dict[int, float]
    worths: tuple[Worth, ...]
    present: int | None
    smallest: dict[str, int | None]
    model_bytes: int | None
    gain: dict[int, Gain]
    no_gain: str
    verdict: str

    @property
    def worthwhile(self) -> bool:
        """Whether matching cohorts can gain anything."""
        return _worthwhile(self.variance, self.variance_error, self.floor, self.uniform)

    def lines(self) -> list[str]:
        """Say in sentences what to expect, the conclusion first."""
        out = [self.verdict]
        for cohort, gain in self.gain.items():
            if self.present is None or cohort == self.present:
                out.append(f"Estimate for sketch-match with cohorts of {cohort}: {gain}.")
        if self.worthwhile and not self.gain:
            out.append(f"No estimate of the rounds saved: {self.no_gain}.")
        if self.present is not None:
            out += [self._smaller(policy, size) for policy, size in self.smallest.items()]
        for cohort, seconds in self.uniform_seconds.items():
            rest = [w for w in self.worths if w.cohort_size == cohort and w.seconds is not None]
            times = "".join(f", {w.seconds:,.1f} s with {w.policy}" for w in rest)
            out.append(f"A round of {cohort} takes {seconds:,.1f} s at random{times}.")
        for worth in self.worths:
            if worth.waiting and self.worthwhile:
                names = ", ".join(worth.waiting)
                case = f"{worth.policy}, cohorts of {worth.cohort_size}"
                out.append(f"{case}: not picked in {worth.rounds} rounds: {names} (see turns=1).")
        if self.tried_on < self.clients:
            out.append(f"Policies were tried on {self.tried_on:,} of {self.clients:,} clients.")
        if self.left_out:
            names = ", ".join(self.left_out[:10])
            out.append(f"Left out, with too few records for their noise: {names}.")
        return out

    def _smaller(self, policy: str, size: int | None) -> str:
        if size is None:
            return f"{policy}: no smaller cohort is worth {self.present} random clients."
        text = f"{policy}: {size} matched clients are worth {self.present} random ones"
        if self.model_bytes is None or self.present is None:
            return f"{text}."
        saved = 2 * (self.present - size) * self.model_bytes / 1e6
        return f"{text}; that saves {saved:,.1f} MB per round."


def plan(
    sketches: Readings,
    cohort_sizes: Sequence[int] = (5,),
    policies: Sequence[str] = ("sketch-match",),
    *,
    names: Sequence[ClientId] | None = None,
    average: Average = "equal",
    present: int | None = None,
    model_bytes: int | None = None,
    durations: Mapping[ClientId, float] | None = None,
    seed: int = 0,
) -> Plan:
    """Estimate, before any training, what choosing cohorts by sketches is worth.

    Parameters
    ----------
    sketches : structured array (N,) or sequence of RaceSketch
        One sketch per client, alike, of two rows or more.
    cohort_sizes : sequence of int
        Cohort sizes to judge.
    policies : sequence of str
        Policies that need sketches only, as name:key=value. Uniform cohorts are always judged.
    names : sequence of str, optional
        The clients' names; numbers by default.
    average : {"equal", "size"}
        How models are averaged.
    present : int, optional
        The random cohort size in use today: the plan looks for the smallest matched cohort that is
        worth as much.
    model_bytes : int, optional
        Bytes of a model, for what a smaller cohort saves.
    durations : mapping of str to float, optional
        Seconds that clients take for a round; SketchMatch that minds time is then judged, too.
    seed : int
        Of the drawn cohorts and of the policies.

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
    readings = _readings(sketches)
    ids, enough = _ids(names, len(readings)), ~too_few(sketches)
    left_out = tuple(ids[i] for i in np.flatnonzero(~enough).tolist())
    if left_out:
        readings, ids = readings[enough], tuple(ids[i] for i in np.flatnonzero(enough).tolist())
    sizes = _checked_sizes(cohort_sizes, present, len(readings), readings["counts"].shape[1])
    makers = {text: _maker(text) for text in policies}
    if durations:
        options = {"time": dict(durations)}
        makers[WITH_TIME] = lambda: make("policy", "sketch-match", POLICIES, options)
    between = BetweenClients(readings, average)
    trial = Trial(readings, ids, average, seed, durations)
    drawn = {k: trial.uniform(k) for k in sizes}
    draws = {k: (mean, error) for k, (mean, error, _) in drawn.items()}
    # The closed form is for equal weights.
    uniform = {k: between.uniform(k) if average == "equal" else draws[k][0] for k in sizes}
    worths = tuple(
        trial.worth(text, maker, k, uniform[k], len(readings))
        for text, maker in makers.items()
        for k in sizes
    )
    smallest = {text: _smallest(text, worths, present) for text in makers}
    floor = {k: between.floor / k for k in sizes}
    useful = _worthwhile(between.variance, between.variance_error, floor, uniform)
    gain, no_gain = _gains(sketches, uniform, worths) if useful else ({}, "nothing to gain")
    return Plan(
        clients=len(readings),
        records=float(readings["n"].sum()),
        left_out=left_out,
        tried_on=len(trial.ids),
        average=average,
        variance=between.variance,
        variance_error=between.variance_error,
        floor=floor,
        uniform=uniform,
        uniform_by_draws=draws,
        uniform_seconds={k: seconds for k, (_, _, seconds) in drawn.items()} if durations else {},
        worths=worths,
        present=present,
        smallest=smallest,
        model_bytes=model_bytes,
        gain=gain,
        no_gain=no_gain,
        verdict=_verdict(useful, worths),
    )


def _worthwhile(
    variance: float, error: float, floor: Mapping[int, float], uniform: Mapping[int, float]
) -> bool:
    """Whether clients differ by more than chance, and random cohorts by more than sample size."""
    seen = variance > SIGNIFICANT * error
    return seen and any(uniform[k] > floor[k] for k in uniform)


def _readings(sketches: Readings) -> NDArray[np.void]:
    if isinstance(sketches, np.ndarray):
        return np.atleast_1d(sketches)
    Stack(sketches)  # alike, and at least one
    counts = np.array([s.counts for s in sketches])
    out = np.zeros(len(sketches), sketch_dtype(counts.shape[1], counts.shape[2], "i8"))
    out["n"], out["noise"] = [s.n for s in sketches], [s.noise for s in sketches]
    out["counts"] = counts
    return out


def _ids(names: Sequence[ClientId] | None, count: int) -> tuple[ClientId, ...]:
    if names is None:
        width = len(str(count))
        return tuple(f"{i:0{width}d}" for i in range(count))
    if len(names) != count or len(set(names)) != count:
        raise ConfigError(f"plan: {len(set(names))} different names for {count} sketches")
    return tuple(names)


def _checked_sizes(
    sizes: Sequence[int], present: int | None, clients: int, rows: int
) -> tuple[int, ...]:
    if rows < 2:
        raise ConfigError(
            "plan: sketches need at least two rows, to choose by one half and judge by the other"
        )
    wanted = {*sizes, *range(1, (present or 0) + 1)}
    for k in (*sorted(wanted), *([] if present is None else [present])):
        if not 1 <= k < clients:
            raise ConfigError(
                f"plan: a cohort of {k} out of {clients} clients with enough records; "
                f"choose a size from 1 to {clients - 1}"
            )
    return tuple(sorted(wanted))


def _maker(text: str) -> Callable[[], Policy]:
    needs = make("policy", text, POLICIES).needs
    if needs.profile != {"race_sketch"} or needs.reply or needs.query:
        raise ConfigError(
            f"plan: {text!r} does not select by sketches alone; choose sketch-match, race-softmax "
            "or kdpp:signal=race_sketch"
        )
    return lambda: make("policy", text, POLICIES)


def _smallest(policy: str, worths: Sequence[Worth], present: int | None) -> int | None:
    if present is None:
        return None
    enough = [w.cohort_size for w in worths if w.policy == policy and w.random_clients >= present]
    return min(enough, default=None)


def _gains(
    sketches: Readings, uniform: Mapping[int, float], worths: Sequence[Worth]
) -> tuple[dict[int, Gain], str]:
    """Estimate the rounds saved, by cohort size, and say why an estimate is missing."""
    gains: dict[int, Gain] = {}
    reason = "" if worths else "no policy was tried"
    for worth in worths:
        if not worth.policy.startswith("sketch-match") or worth.policy == WITH_TIME:
            continue
        size, better = worth.cohort_size, worth.uniform - worth.discrepancy
        why = _not_measured(sketches, uniform[size])
        if better <= SIGNIFICANT * worth.error:
            why = "matched cohorts are not closer to the federation than random ones"
        if why is None:
            gains.setdefault(size, shipped_fit().predict(uniform[size]))
        else:
            reason = why
    return gains, reason


def _not_measured(sketches: Readings, discrepancy: float) -> str | None:
    """Say why the fit does not apply; None if it does."""
    if isinstance(sketches, np.ndarray):
        return "the sketches do not state how they were made"
    first: RaceSketch = sketches[0]
    step = first.transform
    alike = isinstance(step, Transform) and isinstance(first.family, SRP) and step.unit
    if not alike or first.buckets != BUCKETS or step.label_weight != LABEL_WEIGHT:  # type: ignore[union-attr]
        return (
            f"speed-ups were measured for sketches of unit vectors with 6 bits and label weight "
            f"{LABEL_WEIGHT:g}"
        )
    largest = shipped_fit().largest
    if discrepancy > 1.1 * largest:
        return f"uniform cohorts are farther from the federation than any measured ({largest:.3f})"
    return None


def _verdict(useful: bool, worths: Sequence[Worth]) -> str:
    if not useful:
        return (
            "Nothing to gain: random cohorts already look like the federation, as far as these "
            "sketches can tell."
        )
    best = max(worths, key=lambda w: w.random_clients / w.cohort_size, default=None)
    if best is None:
        return "Clients differ; no policy was tried."
    better = best.uniform - best.discrepancy > SIGNIFICANT * best.error
    if not better or round(best.random_clients) <= best.cohort_size:
        return "Clients differ, but matched cohorts are no better than random ones."
    return (
        f"{best.cohort_size} clients chosen by {best.policy} represent the federation as well as "
        f"{best.random_clients:.0f} random ones."
    )
