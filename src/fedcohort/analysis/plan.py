"""What choosing cohorts by sketches is worth, before any training.

`cohort_worth` judges the cohorts; here are the questions that a plan answers, and its sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.analysis.cohort_worth import Average, BetweenClients, Trial, Worth
from fedcohort.analysis.plan_gain import Gain, shipped, why_none
from fedcohort.exceptions import ConfigError
from fedcohort.policies import POLICIES, Policy
from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.forms import sketch_dtype
from fedcohort.sketch.distances import Readings, Stack

SIGNIFICANT = 3.0  # standard errors


@dataclass(frozen=True)
class Plan:
    """What to expect of cohorts, by size and policy.

    Attributes
    ----------
    clients, records : int, float
        The federation.
    tried_on : int
        How many of the clients, drawn at random, the policies were tried on.
    average : {"equal", "size"}
        How models are averaged.
    variance, variance_error : float
        Variance between clients as squared MMD, with its standard error.
    floor : dict
        By cohort size: squared MMD that random cohorts show from sample size alone.
    uniform : dict
        By cohort size: discrepancy of random cohorts, in closed form for equal averaging.
    uniform_by_draws : dict
        By cohort size: (mean, standard error) over drawn cohorts.
    worths : tuple of Worth
        By policy and cohort size.
    present : int or None
        The random cohort size in use today.
    smallest : dict
        By policy: the smallest cohort that represents the federation as well as `present` random
        clients, None if none of the tried sizes does.
    saved : dict
        By policy: client-hours and bytes saved per round by that cohort, where known.
    gain : dict
        By cohort size: how many times fewer rounds SketchMatch is expected to take than uniform
        cohorts, an estimate; empty where `no_gain` says why there is none.
    no_gain : str
        Why there is no such estimate for some size; empty if there is one for all.
    verdict : str
        One sentence.
    """

    clients: int
    records: float
    tried_on: int
    average: Average
    variance: float
    variance_error: float
    floor: dict[int, float]
    uniform: dict[int, float]
    uniform_by_draws: dict[int, tuple[float, float]]
    worths: tuple[Worth, ...]
    present: int | None
    smallest: dict[str, int | None]
    saved: dict[str, dict[str, float]]
    gain: dict[int, Gain]
    no_gain: str
    verdict: str

    @property
    def worthwhile(self) -> bool:
        """Whether matching cohorts can gain anything."""
        return worthwhile(self.variance, self.variance_error, self.floor, self.uniform)

    def lines(self) -> list[str]:
        """Say in sentences what to expect, the conclusion first."""
        out = [self.verdict]
        for cohort, gain in self.gain.items():
            if self.present is None or cohort == self.present:
                out.append(f"Estimate for sketch-match with cohorts of {cohort}: {gain}.")
        if self.worthwhile and not self.gain:
            out.append(f"No estimate of the rounds saved: {self.no_gain}.")
        for policy, size in self.smallest.items():
            if self.present is None:
                break
            if size is None:
                out.append(f"{policy}: no smaller cohort is worth {self.present} random clients.")
                continue
            saved = self.saved[policy]
            extra = [f"{saved['bytes'] / 1e6:,.1f} MB"] if "bytes" in saved else []
            extra += [f"{saved['hours']:g} client-hours"] if "hours" in saved else []
            text = f"{policy}: {size} matched clients are worth {self.present} random ones"
            out.append(text + (f"; that saves {' and '.join(extra)} per round." if extra else "."))
        for worth in self.worths:
            if worth.waiting and self.worthwhile:
                names = ", ".join(worth.waiting)
                case = f"{worth.policy}, cohorts of {worth.cohort_size}"
                out.append(f"{case}: not picked in {worth.rounds} rounds: {names} (see turns=1).")
        if self.tried_on < self.clients:
            out.append(f"Policies were tried on {self.tried_on:,} of {self.clients:,} clients.")
        return out


def plan(
    sketches: Readings,
    cohort_sizes: Sequence[int] = (5,),
    policies: Sequence[str | tuple[str, Mapping[str, Any]]] = ("sketch-match",),
    *,
    names: Sequence[ClientId] | None = None,
    average: Average = "equal",
    present: int | None = None,
    model_bytes: int | None = None,
    hours: float | None = None,
    seed: int = 0,
) -> Plan:
    """Estimate, before any training, what choosing cohorts by sketches is worth.

    Parameters
    ----------
    sketches : structured array (N,) or sequence of RaceSketch
        One sketch per client, alike, of two rows or more.
    cohort_sizes : sequence of int
        Cohort sizes to judge.
    policies : sequence
        Names of policies that need sketches only, or pairs of a name and options. Uniform cohorts
        are always judged.
    names : sequence of str, optional
        The clients' names; numbers by default.
    average : {"equal", "size"}
        How models are averaged.
    present : int, optional
        The random cohort size in use today: the plan looks for the smallest matched cohort that is
        worth as much.
    model_bytes, hours : optional
        Bytes of a model, and hours that a client trains per round, for what a smaller cohort saves.
    seed : int
        Of the drawn cohorts and of the policies.

    Examples
    --------
    >>> from fedcohort import RaceSketch
    >>> rng = np.random.default_rng(0)
    >>> sketches = [RaceSketch.srp(dim=3, rows=10, bits=3) for _ in range(40)]
    >>> for i, sketch in enumerate(sketches):                       # three kinds of clients
    ...     sketch.add(3 * np.eye(3)[i % 3] + rng.standard_normal((200, 3)))
    >>> found = plan(sketches, cohort_sizes=[3])
    >>> found.worthwhile, found.worths[0].random_clients > 15
    (True, True)
    """
    readings = _readings(sketches)
    ids = _ids(names, len(readings))
    usable = readings["n"] >= 2
    if not usable.all():
        readings, ids = readings[usable], tuple(c for c, u in zip(ids, usable, strict=True) if u)
    sizes = _checked(cohort_sizes, present, len(readings), readings["counts"].shape[1])
    made = [_policy(p) for p in policies]
    whole = BetweenClients(readings, average)
    uniform = {k: whole.uniform(k) for k in sizes}
    trial = Trial(readings, ids, average, seed)
    draws = {k: trial.draws(k) for k in sizes}
    if average == "size":  # the closed form is for equal weights
        uniform = {k: mean for k, (mean, _) in draws.items()}
    worths = tuple(
        trial.worth(label, make, k, uniform[k], len(readings))
        for label, make in made
        for k in sizes
    )
    smallest = {label: _smallest(label, worths, present) for label, _ in made}
    floor = {k: whole.floor / k for k in sizes}
    useful = worthwhile(whole.variance, whole.error, floor, uniform)
    gain, no_gain = _gains(sketches, uniform, worths) if useful else ({}, "nothing to gain")
    return Plan(
        len(readings),
        float(readings["n"].sum()),
        len(trial.ids),
        average,
        whole.variance,
        whole.error,
        floor,
        uniform,
        draws,
        worths,
        present,
        smallest,
        {p: _saved(k, present, model_bytes, hours) for p, k in smallest.items()},
        gain,
        no_gain,
        _verdict(useful, worths),
    )


def worthwhile(
    variance: float, error: float, floor: Mapping[int, float], uniform: Mapping[int, float]
) -> bool:
    """Whether clients differ by more than chance, and random cohorts by more than sample size."""
    seen = variance > SIGNIFICANT * error
    return seen and any(uniform[k] > floor[k] for k in uniform)


def _readings(sketches: Readings) -> NDArray[Any]:
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


def _checked(sizes: Sequence[int], present: int | None, clients: int, rows: int) -> tuple[int, ...]:
    if rows < 2:
        raise ConfigError(
            "plan: sketches need at least two rows, to choose by one half and judge by the other"
        )
    wanted = sorted({*sizes, *([] if present is None else range(1, present + 1))})
    for k in (*wanted, *([] if present is None else [present])):
        if not 1 <= k < clients:
            raise ConfigError(
                f"plan: a cohort of {k} out of {clients} clients with two or more records; "
                f"choose a size from 1 to {clients - 1}"
            )
    return tuple(wanted)


def _policy(
    policy: str | tuple[str, Mapping[str, Any]],
) -> tuple[str, Callable[[], Policy]]:
    name, options = (policy, {}) if isinstance(policy, str) else (policy[0], dict(policy[1]))
    kind = lookup("policy", name, POLICIES)
    needs = kind(**options).needs
    if needs.profile != {"race_sketch"} or needs.reply or needs.query:
        raise ConfigError(
            f"plan: {name!r} does not select by sketches alone; choose sketch-match, race-softmax "
            "or kdpp with signal='race_sketch'"
        )
    label = name + "".join(f" {k}={v}" for k, v in options.items())
    return label, lambda: kind(**options)


def _smallest(policy: str, worths: Sequence[Worth], present: int | None) -> int | None:
    if present is None:
        return None
    enough = [w.cohort_size for w in worths if w.policy == policy and w.random_clients >= present]
    return min(enough, default=None)


def _saved(
    size: int | None, present: int | None, model_bytes: int | None, hours: float | None
) -> dict[str, float]:
    if size is None or present is None:
        return {}
    fewer = present - size
    saved: dict[str, float] = {"clients": fewer}
    if model_bytes is not None:
        saved["bytes"] = 2.0 * fewer * model_bytes
    if hours is not None:
        saved["hours"] = fewer * hours
    return saved


def _gains(
    sketches: Readings, uniform: Mapping[int, float], worths: Sequence[Worth]
) -> tuple[dict[int, Gain], str]:
    """Estimate the rounds saved, by cohort size, and say why an estimate is missing."""
    found: dict[int, Gain] = {}
    reason = "" if worths else "no policy was tried"
    for worth in (w for w in worths if w.policy.startswith("sketch-match")):
        size, better = worth.cohort_size, worth.uniform - worth.discrepancy
        why = why_none(sketches, uniform[size])
        if better <= SIGNIFICANT * worth.error:
            why = "matched cohorts are not closer to the federation than random ones"
        if why is None:
            found.setdefault(size, shipped().predict(uniform[size]))
        else:
            reason = why
    return found, reason


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
