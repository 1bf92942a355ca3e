"""Attack every private mechanism: how large an epsilon do its outputs prove?

    python tests/soak/audit.py --trials 400000 --jobs 12 --out result.json

The attacker knows two neighboring data sets and sees one output. It scores the output by the
likelihood ratio of the claimed noise and guesses by a threshold. Half of the trials choose the
threshold, the other half measure how often the guess is right; Clopper-Pearson bounds of those two
rates (each wrong with probability 1e-6) give a lower bound of epsilon that must not exceed the
claim. Broken mechanisms are attacked as well, and must be caught.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from fedcohort.privacy import quantiles
from fedcohort.privacy import release as releases
from fedcohort.privacy.noise import gaussian_scale, laplace_scale, sensitivity
from fedcohort.sketch.race import ColumnCounts, RaceSketch

WRONG = 1e-6  # probability that a bound of a rate is wrong
BLOCK = 20_000  # trials at a time


@dataclass(frozen=True)
class Part:
    """Counts of two neighboring data sets, and how they are released."""

    before: np.ndarray
    after: np.ndarray
    epsilon: float
    delta: float = 0.0
    neighbors: str = "add-remove"

    @property
    def mechanism(self):
        rows = len(self.before)
        return releases.noise_for(rows, self.epsilon, self.delta, self.neighbors).mechanism

    def drawn(self, second, trials, rng):
        """Release the counts many times: (rows, buckets, trials).

        Noise on different counts is independent, so that trials may lie side by side.
        """
        counts = self.after if second else self.before
        wide = np.repeat(counts, trials, axis=1)
        noisy, _ = releases.release(wide, self.epsilon, self.delta, self.neighbors, rng=rng)
        return noisy.reshape(*counts.shape, trials)

    def score(self, noisy):
        """Return the logarithm of the likelihood ratio under the claimed noise."""
        cells = sensitivity(len(self.before), self.neighbors)
        a, b = (noisy - counts[:, :, None] for counts in (self.before, self.after))
        if self.mechanism == "laplace":
            t, s = laplace_scale(cells, self.epsilon)
            return ((np.abs(a) - np.abs(b)) * (s / t)).sum((0, 1))
        u, s = gaussian_scale(cells, self.epsilon, self.delta)
        return ((a * a - b * b) / (2 * (u / s) ** 2)).sum((0, 1))


@dataclass(frozen=True)
class Mechanism:
    """What is released together, and its claim.

    Broken on purpose: noise divided by `shrink`, or the exact number of records told as well.
    """

    parts: tuple[Part, ...]
    epsilon: float
    delta: float = 0.0
    shrink: int = 1
    sees_n: bool = False

    def scores(self, second, trials, rng):
        total = np.full(trials, 10.0 * (2 * second - 1) * self.sees_n)
        for part in self.parts:
            noisy = part.drawn(second, trials, rng)
            exact = (part.after if second else part.before)[:, :, None]
            total += part.score(exact + (noisy - exact) // self.shrink)
        return total


@dataclass(frozen=True)
class LabelHistogram:
    """The private counts of labels, attacked through the signal itself.

    The client has as many labels as there are trials: each count has its own noise.
    """

    epsilon: float
    delta: float = 0.0

    def scores(self, second, trials, rng):
        from fedcohort.signals.catalog import SIGNALS

        labels = np.repeat(np.arange(trials), 3 if second else 2)
        clients = SimpleNamespace(
            ids=("client",),
            classes=lambda: trials,
            examples=lambda: [(None, labels)],
            noise_source=lambda client: rng,
        )
        (count,) = SIGNALS["label_histogram"].compute(clients, {"epsilon": self.epsilon})
        return (np.abs(count - 2) - np.abs(count - 3)) * self.epsilon


# Neighbors at which the mechanism spends nearly all of its epsilon, found by trying all data of up
# to 40 records in two of 2 to 32 cells: (quantile, cells with records before, and after).
QUANTILES = {
    "add-remove": [
        ((1, 2), {0: 1, 1: 2}, {0: 2, 1: 2}),
        ((3, 4), {0: 3, 1: 1}, {0: 3, 1: 1, 31: 1}),
    ],
    "replace": [((1, 2), {0: 4, 1: 4}, {0: 3, 1: 4, 31: 1}), ((1, 2), {0: 1, 1: 1}, {1: 1, 31: 1})],
}


@dataclass(frozen=True)
class Quantile:
    """A private quantile: the attacker knows the exact chances of each cell.

    `used` is the epsilon of the draw, broken on purpose if it is more than the claim.
    """

    epsilon: float
    used: float
    neighbors: str = "add-remove"
    which: int = 0
    delta: float = 0.0

    def counts(self, second):
        held, out = QUANTILES[self.neighbors][self.which][1 + second], np.zeros(32, int)
        out[list(held)] = list(held.values())
        return out

    def scores(self, second, trials, rng):
        (a, b), counts = QUANTILES[self.neighbors][self.which][0], self.counts(second)
        draw = quantiles.private_quantile
        drawn = [draw(counts, a, b, self.used, self.neighbors, rng) for _ in range(trials)]
        return (self.chances(1) - self.chances(0))[np.array(drawn)]

    def chances(self, second):
        """Logarithms of the probabilities of the cells, from the mechanism's definition."""
        a, b = QUANTILES[self.neighbors][self.which][0]
        s = quantiles.miss_sensitivity(a, b, self.neighbors)
        weight = -self.used * quantiles.quantile_misses(self.counts(second), a, b) / (2 * s)
        return weight - np.log(np.exp(weight).sum())


def changed(before, after):
    """Keep the counts that differ, as many in each row; the noise of others tells nothing."""
    differ = before != after
    keep = np.argsort(~differ, axis=1, kind="stable")[:, : max(1, differ.sum(1).max())]
    return np.take_along_axis(before, keep, 1), np.take_along_axis(after, keep, 1)


def counted(empty, records, *others):
    """Return the changed counts of records, and of others, hashed in batches of other sizes."""
    before, after = empty.empty_like(), empty.empty_like()
    before.add(records)
    for batch in others:
        after.add(batch)
    return changed(before.counts, after.counts)


def families(rows):
    """Every family, with the counts without and with one more record."""
    rng = np.random.default_rng(0)
    vectors, one = rng.normal(size=(40, 6)), rng.normal(size=(1, 6))
    sets = [{int(v) for v in rng.integers(0, 50, 8)} for _ in range(40)]
    yield "srp", counted(RaceSketch.srp(6, rows, bits=2), vectors, one, vectors)
    yield "pstable", counted(RaceSketch.pstable(6, rows, buckets=4), vectors, one, vectors)
    yield "minhash", counted(RaceSketch.minhash(rows, buckets=4), sets, [{1, 2, 3}], sets)


def columns_parts(epsilon):
    """A sketch with its columns one by one: both parts share the budget."""
    before, after = ColumnCounts.empty(2), ColumnCounts.empty(2)
    bins = np.array([[1, 2], [3, 4], [1, 1], [5, 2]])
    before.add(bins)
    after.add(np.concatenate([bins, [[2, 2]]]))
    (_, counts), *_ = families(2)
    joint = Part(*counts, epsilon / 2)
    return joint, Part(*changed(before.counts, after.counts), epsilon / 2)


@cache
def mechanisms(epsilon=1.0, delta=1e-3, rows=2, many=20):
    """Return what must hold and what must be caught; with `many` rows, noise is Gaussian."""
    good, broken = {}, {}
    for name, counts in families(rows):
        part = Part(*counts, epsilon)
        good[f"{name}, laplace, one record more"] = Mechanism((part,), epsilon)
        broken[f"{name}, laplace of half the scale"] = Mechanism((part,), epsilon, shrink=2)
    broken["one record more, exact n seen"] = Mechanism((part,), epsilon, sees_n=True)
    twice = replace(part, after=2 * part.after - part.before)
    broken["a record that moves two counts per row"] = Mechanism((twice,), epsilon)
    for name, counts in families(many):
        part = Part(*counts, epsilon, delta)
        good[f"{name}, gaussian, one record more"] = Mechanism((part,), epsilon, delta)
    broken["gaussian of a third of the scale"] = Mechanism((part,), epsilon, delta, shrink=3)
    vectors = np.random.default_rng(1).normal(size=(40, 6))
    opposite = np.concatenate([-vectors[:1], vectors[1:]])  # another bucket in every row
    exchanged = counted(RaceSketch.srp(6, rows, bits=2), vectors, opposite)
    swap = Part(*exchanged, epsilon, neighbors="replace")
    good["srp, laplace, one record replaced"] = Mechanism((swap,), epsilon)
    public = replace(swap, neighbors="add-remove")
    good["srp, public n, one record replaced: twice epsilon"] = Mechanism((public,), 2 * epsilon)
    good["sketch with columns one by one"] = Mechanism(columns_parts(epsilon), epsilon)
    good["label histogram"] = LabelHistogram(epsilon)
    good["label histogram, odd epsilon"] = LabelHistogram(0.7213)
    for neighbors, pairs in QUANTILES.items():
        for which in range(len(pairs)):
            name = f"quantile {which + 1}, {neighbors}"
            good[name] = Quantile(epsilon, epsilon, neighbors, which)
        broken[f"quantile, {neighbors}, of four times epsilon"] = Quantile(
            epsilon, 4 * epsilon, neighbors
        )
    return good, broken


def bound(likely, unlikely, trials, delta):
    """Return the epsilon that an event proves, from how often it happened on either side."""
    low = beta.ppf(WRONG, likely, trials - likely + 1) - delta if likely else 0.0
    high = beta.ppf(1 - WRONG, unlikely + 1, trials - unlikely) if unlikely < trials else 1.0
    return math.log(low / high) if low > 0 else 0.0


def attack(mechanism, trials, rng):
    """Return the lower bound of epsilon that the best threshold proves."""
    sizes = [min(BLOCK, trials // 2 - at) for at in range(0, trials // 2, BLOCK)]
    first, scores = (
        [np.concatenate([mechanism.scores(second, n, rng) for n in sizes]) for second in (0, 1)]
        for _ in range(2)
    )
    _, sign, limit = max(_events(first, mechanism.delta), key=lambda event: event[0])
    likely, unlikely = _hits(scores, sign, limit)
    return max(0.0, bound(likely, unlikely, trials // 2, mechanism.delta))


def _hits(scores, sign, limit):
    hits = [int((sign * s >= limit).sum()) for s in scores]
    return hits[::-1] if sign > 0 else hits


def _events(scores, delta):
    """Yield (bound, sign, limit) of candidate events: scores above, or below, a limit."""
    for sign in (1, -1):
        limits = np.unique(np.quantile(sign * np.concatenate(scores), np.linspace(0, 0.999, 200)))
        for limit in limits:
            yield bound(*_hits(scores, sign, limit), len(scores[0]), delta), sign, float(limit)


def one(name, trials, seed):
    """Attack one mechanism by name."""
    good, broken = mechanisms()
    mechanism = {**good, **broken}[name]
    rng = np.random.default_rng([seed, list({**good, **broken}).index(name)])
    proven = attack(mechanism, trials, rng)
    return {
        "mechanism": name,
        "epsilon": mechanism.epsilon,
        "delta": mechanism.delta,
        "proven": round(proven, 4),
        "broken": name in broken,
        "right": (proven > mechanism.epsilon) == (name in broken),
    }


def main():
    from provenance import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=400_000, help="on either side [400000]")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the bounds and where they come from, as JSON")
    args = parser.parse_args()
    good, broken = mechanisms()
    rows = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(one, n, args.trials, args.seed) for n in (*good, *broken)]
        for future in futures:
            rows.append(future.result())
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write(args.out, {"trials": args.trials, "wrong": WRONG, "mechanisms": rows})
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
