"""Whether runs differ by more than chance: intervals over paired seeds, rows and curves of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedcohort.experiments.results import Results, Run, Spread, Summary, spread

TIMES_DIFFER = 1.1  # ratio of the mean seconds per round of two runs
NUMBERS = Summary._fields[1:]  # all but the seed


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_interval(differences: Sequence[float], comparisons: int = 1) -> Interval | None:
    """Return the 95 % interval of a mean of paired differences [1]_; None of fewer than two.

    Both members of a pair share a seed, hence a split and a first model. Without an effect the
    interval misses zero in at most about 5 % of the cases from three seeds on; a percentile
    bootstrap would in 25 %. `comparisons` intervals hold together, by Bonferroni's correction [2]_.

    References
    ----------
    .. [1] Student (1908), The probable error of a mean, Biometrika 6.
    .. [2] Dunn (1961), Multiple comparisons among means, JASA 56.

    Examples
    --------
    >>> interval = paired_interval([1.0, 3.0, 2.0])
    >>> [round(value, 2) for value in interval]
    [2.0, -0.48, 4.48]
    """
    values, n = np.asarray(differences, float), len(differences)
    if n < 2:
        return None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n)
    margin = float(stats.t.ppf(1 - 0.025 / comparisons, n - 1)) * error
    return Interval(mean, mean - margin, mean + margin)


class ComparisonRow(NamedTuple):
    """One run of a comparison, over all seeds; its baseline is that of `Results.baseline`."""

    policy: str
    seeds: int
    means: dict[str, Spread]  # of every number of a `Summary`
    accuracy_change: Spread | None  # in percent of the baseline's; None without one
    gain: Interval | None  # over the baseline; None for itself, and of fewer than two paired seeds

    @property
    def accuracy(self) -> Spread:
        """The accuracy over seeds."""
        return self.means["accuracy"]

    def as_dict(self) -> dict[str, Any]:
        """Return the row as one flat mapping."""
        fields = self._asdict()
        return {**fields.pop("means"), **fields}


class Curve(NamedTuple):
    """Mean accuracy over seeds, and one sample standard deviation to either side."""

    policy: str
    rounds: list[int]  # from 1
    megabytes: list[float]  # sent so far, in both directions
    seconds: list[float]  # of simulated time so far
    mean: list[float]
    low: list[float]  # NaN for one seed
    high: list[float]


def comparison(results: Sequence[Run]) -> list[ComparisonRow]:
    """Return one row per run, in the order of the results; the intervals of all hold together."""
    every = Results(results)
    baselines = [every.baseline(r) for r in results]
    count = sum(b is not None and b is not r for r, b in zip(results, baselines, strict=True))
    return [_comparison_row(r, b, count) for r, b in zip(results, baselines, strict=True)]


def _comparison_row(r: Run, baseline: Run | None, comparisons: int) -> ComparisonRow:
    others = {} if baseline is None else {s.seed: s.accuracy for s in baseline.summaries}
    pairs = [(s.accuracy, others[s.seed]) for s in r.summaries if s.seed in others]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    changes = [100 * (a / b - 1) if b else None for a, b in pairs]
    return ComparisonRow(
        policy=r.policy,
        seeds=len(r.summaries),
        means={name: spread([getattr(s, name) for s in r.summaries]) for name in NUMBERS},
        accuracy_change=spread(changes) if pairs else None,
        gain=None if baseline is r else paired_interval([a - b for a, b in pairs], comparisons),
    )


def durations_differ(results: Sequence[Run]) -> bool:
    """Whether the rounds of some run take longer than those of another."""
    seconds = [[x.seconds for h in r.histories for x in h.rounds] for r in results]
    means = [float(np.mean(values)) for values in seconds if values]
    return bool(means) and max(means) > TIMES_DIFFER * min(means)


def curve(run: Run) -> Curve:
    """Return the curve of a run, over the rounds in which every seed was evaluated."""
    histories = run.histories
    length = min(len(h.rounds) for h in histories)
    rounds = [h.rounds[:length] for h in histories]
    accuracy = np.array([h.accuracy[:length] for h in histories])
    sent = np.cumsum([[r.bytes_up + r.bytes_down for r in seed] for seed in rounds], axis=1)
    elapsed = np.array([[r.elapsed for r in seed] for seed in rounds])
    evaluated = np.flatnonzero(np.isfinite(accuracy).all(axis=0))
    mean, megabytes, seconds = (
        values[:, evaluated].mean(axis=0) for values in (accuracy, sent / 1e6, elapsed)
    )
    several = len(histories) > 1
    std = accuracy[:, evaluated].std(axis=0, ddof=1) if several else np.full(len(mean), np.nan)
    low, high = np.maximum(mean - std, 0), np.minimum(mean + std, 1)
    columns = [values.tolist() for values in (megabytes, seconds, mean, low, high)]
    return Curve(run.policy, (evaluated + 1).tolist(), *columns)
