"""SketchMatch: the cohort whose merged sketch is nearest that of the whole federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, IncompatibleSketches
from fedcohort.numerics import herding
from fedcohort.options import Count, NonNegative, Whole
from fedcohort.policies.base import (
    Array,
    Indices,
    Policy,
    count_up,
    register,
    scored,
    take,
    values_for,
)
from fedcohort.privacy.release import sketch_size
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import Stack
from fedcohort.sketch.federation import GlobalSketch, UniformLabels, precise_mean, shrink
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import error_at_center

_MAX_GRAM = 3000  # up to this many clients all inner products are kept: 72 MB
_MAX_POOL = 10_000  # with more clients, the pool is a random part of the less used
_LARGE = 4  # a cohort is large from one quarter of the clients on
_CUTS = np.linspace(0.2, 1.0, 9)  # shares of the pool, fastest first, among which time decides
_MAX_TIMED_POOL = 600  # nine choices from a larger pool would take too long
_SLOPE = 10.0  # of log seconds in the distance relative to that of random cohorts
_MEMORY = 0.99  # of what is known about a client's speed, per round


@dataclass
class SketchMatchState(GlobalSketch):
    """The global sketch so far, and picks by client; late joiners start at the median."""

    used: dict[ClientId, int] = field(default_factory=dict)
    epoch: list[ClientId] = field(default_factory=list)  # with large cohorts, who was picked in it
    drifted: dict[ClientId, int] = field(default_factory=dict)  # when data were seen to change
    cut: dict[ClientId, list[float]] = field(default_factory=dict)  # last too late, least seconds


@register("sketch-match", when="clients are skewed: cohorts should look like the federation")
class SketchMatch(Policy):
    """Chooses the set of clients, not each client, that looks like the federation.

    The sum of the cohort's counts is the sketch of its data together. Its squared distance to the
    global sketch is rows times the squared maximum mean discrepancy between the data the cohort
    trains on and all data. Each round a greedy selection, like kernel herding, followed by
    exchanges, minimizes it over a pool of the clients used least, so that all take part. It needs
    one sketch per client, once: no losses, no warm-up, no model.

    Parameters
    ----------
    pool : {"less-used", "random", "all"}, optional
        Whom to choose from: the half that was used least so far (the default), a random half (the
        default with `time` or `target`: a better fit, but clients that fit badly or are slow wait
        long), or everybody (they wait for ever).
    turns : int, default=0
        Places per round for the clients used least, around whom the others are chosen: each of N
        clients is then picked within ceil(N / turns) rounds.
    time : bool, "ask" or mapping, default=False
        Whether a cohort's slowest member counts too: of the matched cohorts of the fastest 20 %, 30
        %, ... of the pool, take the one with the least log(seconds) + 10 D / D_random, D being its
        distance and D_random that of random cohorts. Of clients that cannot be told apart, one
        that is twice as slow is used half as often. Seconds are those of a client's last round and
        fade toward the median, at which unknown clients start, unless a mapping gives seconds by
        client or "ask" lets each state what it expects (8 bytes, and in Flower two training steps).
        Both need only be right relative to each other.
    target : RaceSketch, array (rows, buckets) or UniformLabels, optional
        What cohorts should look like; the federation by default.
    refresh : int, default=0
        Ask for new sketches every so many rounds, where data drift; 0 never. Clients whose data
        changed are noted in ``state.drifted``.
    epsilon : float, default=0.0
        Privacy budget of a sketch (0: exact).
    records : int, default=0
        Records of a typical client; `epsilon` and it then set rows and bits.
    rows, bits : int
        Size of a sketch: rows of 2^bits buckets (10 x 64 take 1.3 kB).
    label_weight : float, default=2.0
        Weight of the one-hot label appended to the unit-length input (0: no labels).
    centered : bool, default=True
        Whether inputs are centered by public constants, which sharpens angles.
    hash : {"auto", "srp", "minhash"}
        Sign projections for vectors, or MinHash for rows of tokens, without labels and center.
        "auto" decides by the data in the simulator; in Flower, state "minhash" for tokens.
    embed : {"", "model"}
        "model" sketches the first dense layer's outputs under the model of the last `refresh`, or
        under the initial model, in place of the inputs. Clients download that model.

    Notes
    -----
    Source: ours.
    Checked: choices against brute force, laws and shrinkage by simulation, waits exactly.
    Reference: Chen, Welling, Smola (2010), Super-Samples from Kernel Herding, UAI; Liu et al.
    (2023), One-Pass Distribution Sketch, NeurIPS.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sketch = np.zeros(4, [("n", "f8"), ("noise", "f8"), ("counts", "i2", (1, 2))])
    >>> sketch["n"], sketch["counts"] = 9, [[[9, 0]], [[9, 0]], [[0, 9]], [[0, 9]]]
    >>> sketches = dict(zip("abcd", sketch))
    >>> cohort = select(SketchMatch(pool="all"), "abcd", 2, race_sketch=sketches).clients
    >>> len({"a", "b"} & set(cohort)), len({"c", "d"} & set(cohort))      # one of each kind
    (1, 1)
    """

    needs = Needs(profile=frozenset({"race_sketch"}))

    def __init__(
        self,
        pool: Literal["less-used", "random", "all"] | None = None,
        turns: Whole = 0,
        time: bool | Literal["ask"] | Mapping[ClientId, float] = False,
        target: RaceSketch | UniformLabels | ArrayLike | None = None,
        refresh: Whole = 0,
        epsilon: NonNegative = 0.0,
        records: Whole = 0,
        rows: Count = 10,
        bits: Count = 6,
        label_weight: NonNegative = 2.0,
        centered: bool = True,
        hash: Literal["auto", "srp", "minhash"] = "auto",
        embed: Literal["", "model"] = "",
    ) -> None:
        if records and not epsilon:
            raise ConfigError("SketchMatch: records= sizes private sketches; give epsilon= too")
        if records:
            rows, bits = sketch_size(records, epsilon)[:2]
        self.prior = dict(time) if isinstance(time, Mapping) else {}
        self.timed, self.turns, self.refresh = bool(time), turns, refresh
        self.pool = pool or ("less-used" if target is None and not time else "random")
        self.in_epochs = target is None and pool in (None, "less-used")  # large cohorts
        self.target = None if target is None else _checked_target(target, rows, bits)
        asked = {"expected_duration"} if time == "ask" else set()
        self.needs = Needs(
            profile=frozenset({"race_sketch", *asked}),
            query=frozenset({"race_sketch"} if refresh else ()),
            reply=frozenset({"duration"} if self.timed else ()),
        )
        options: dict[str, Option] = {"rows": rows, "bits": bits, "seed": 0}
        options |= {"label_weight": label_weight, "center": centered, "epsilon": epsilon}
        options |= {"hash": hash} | ({"embed": embed, "refresh": refresh} if embed else {})
        self.signal_options = {"race_sketch": options}
        self.state = SketchMatchState()
        self._kept: tuple[tuple[ClientId, ...], int, str, _Field] | None = None
        self._before: tuple[tuple[ClientId, ...], NDArray[Any]] | None = None

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask for new sketches every `refresh` rounds; who is away then, on its return."""
        self._before = None
        due = round.number - round.number % self.refresh if self.refresh else 0
        if not due:
            return ()
        stamps = signals.rounds("race_sketch", round.available)
        clients = take(round.available, np.flatnonzero((stamps >= 0) & (stamps < due)))
        if clients:
            self._before = clients, np.array(signals.values("race_sketch", clients))
        return clients

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        self._include(round, signals)
        if not self.state.clients:
            return Selection(())
        center = "mean" if round.averaging == "equal" else "pooled"
        if len(round.available) <= _MAX_GRAM:
            field = self._everybody(round.available, signals, center)
            pool = self._pool(field.clients, round.size, rng)
        else:
            some = self._pool(round.available, round.size, rng)
            field = _Field(signals, take(round.available, some), self.state, center)
            pool = np.arange(len(field.clients))
        if not pool.size:
            return Selection(())
        seconds = self._seconds(field.clients, signals, round.number) if self.timed else None
        size = min(round.size, pool.size)
        large = field.gram is not None and size * _LARGE >= len(field.clients)
        if self.in_epochs and field.differ and large:
            chosen = self._from_epoch(field, size, seconds, rng)
        else:
            chosen = self._match(field, pool, self._goal(field, signals), size, seconds)
        return scored(field.clients, chosen, values_for(self.state.used, field.clients)[chosen])

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count who was picked, whether or not it finished; note who was too late."""
        state = self.state
        count_up(state.used, outcome.selected)
        if _LARGE * round.size >= len(round.available):
            state.epoch = list(dict.fromkeys((*state.epoch, *outcome.selected)))
        if self.timed and outcome.cut and outcome.finished:
            _, seconds = signals.read("duration", outcome.finished)
            slowest = float(seconds.max(initial=0.0))
            state.cut.update({client: [float(round.number), slowest] for client in outcome.cut})

    def _include(self, round: Round, signals: Signals) -> None:
        """Add new sketches, let joiners start at the median, and note whose data drifted."""
        had_some = bool(self.state.seen)
        new = self.state.include(signals, round.available, round.number)
        if had_some and new:
            others = tuple(filterfalse(set(new).__contains__, round.available))
            start = int(np.median(values_for(self.state.used, others))) if others else 0
            self.state.used.update(dict.fromkeys(new, start))
        if self._before is not None:
            clients, old = self._before
            far = drift(old, signals.values("race_sketch", clients))
            moved = take(clients, np.flatnonzero(far > 3))
            self.state.drifted.update(dict.fromkeys(moved, round.number))
            self._before = None

    def _everybody(self, available: tuple[ClientId, ...], signals: Signals, center: str) -> _Field:
        """All available sketches with their inner products, kept until either changes."""
        kept = self._kept
        if kept is None or kept[:3] != (available, self.state.changes, center):
            field = _Field(signals, available, self.state, center)
            field.gram = field.points @ field.points.T
            self._kept = kept = (available, self.state.changes, center, field)
        return kept[3]

    def _pool(self, clients: tuple[ClientId, ...], size: int, rng: Generator) -> Indices:
        """Positions to choose from, whose turn it is first; ties are broken at random."""
        count = len(clients)
        order = rng.random(count)
        by_use = order + values_for(self.state.used, clients) if self.state.used else order
        if self.pool != "random":
            order = by_use
        elif self.turns and count:
            due = np.argpartition(by_use, min(self.turns, count) - 1)[: self.turns]
            order[due] = by_use[due] - by_use.max() - 1
        part = count if self.pool == "all" else -(-count // 2)
        most = _MAX_TIMED_POOL if self.timed and count > _MAX_GRAM else _MAX_POOL
        wanted = min(max(part, size), max(most, size), count)
        first = np.argpartition(order, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        return np.asarray(first[np.argsort(order[first])])

    def _seconds(self, clients: tuple[ClientId, ...], signals: Signals, number: int) -> Array:
        """How long each client will take: its last duration, or what it expects."""
        stamps = signals.rounds("duration", clients)
        seconds = values_for(self.prior, clients, np.nan)
        asked, expected = signals.read("expected_duration", clients)
        seconds[asked] = expected
        seconds[~(seconds > 0)] = np.nan
        positions, durations = signals.read("duration", clients)
        ratios = durations / seconds[positions]
        if np.isfinite(ratios).any():
            seconds *= np.nanmedian(ratios)
        seconds[positions] = durations
        for i, client in enumerate(clients) if self.state.cut else ():
            when, least = self.state.cut.get(client, (-1.0, 0.0))
            if when > stamps[i]:
                seconds[i], stamps[i] = max(least, np.nan_to_num(seconds[i])), int(when)
        seconds[~(seconds > 0)] = np.nan
        unknown = np.isnan(seconds)
        if unknown.all():
            return np.ones(len(clients))
        median = float(np.median(seconds[~unknown]))
        age = np.where(stamps >= 0, number - stamps, 0)
        ratio = np.where(unknown, 1.0, seconds / median)
        return np.asarray(median * ratio ** (_MEMORY**age))

    def _from_epoch(
        self, field: _Field, size: int, seconds: Array | None, rng: Generator
    ) -> list[int]:
        """Divide those who have not trained in this epoch; return the first cohort.

        With `time`, the fastest two cohorts are divided, so that the slow wait for each other.
        """
        order = rng.permutation(len(field.clients)).tolist()
        trained = set(self.state.epoch)
        waiting = [i for i in order if field.clients[i] not in trained]
        left_over = 0
        if len(waiting) < size:  # the next epoch begins with those left over
            self.state.epoch, left_over = [], len(waiting)
            waiting += [i for i in order if field.clients[i] in trained]
        if seconds is not None:
            fastest = sorted(waiting[left_over:], key=lambda i: float(seconds[i]))
            waiting = waiting[:left_over] + fastest[: 2 * size - left_over]
        goal = np.zeros(field.points.shape[1])
        return herding.cut(
            field.points, field.weights, goal, size,
            order=waiting, variance=field.variance, fixed=left_over,
        )[0]  # fmt: skip

    def _match(
        self, field: _Field, pool: Indices, goal: Array, size: int, seconds: Array | None
    ) -> list[int]:
        """Return the best cohort of the pool; with `time`, of all cuts by speed."""

        def matched(part: Indices) -> tuple[list[int], float]:
            return herding.match(
                field.points, field.weights, goal, size,
                pool=part, fixed=self.turns, variance=field.variance, gram=field.gram,
            )  # fmt: skip

        alike = not field.differ and self.target is None
        turns, others = pool[: min(self.turns, size)], pool[self.turns :]
        if seconds is None or not others.size:
            return pool[:size].tolist() if alike else matched(pool)[0]
        if alike:
            return self._of_one_speed(field.clients, turns, others, size - len(turns), seconds)
        cohorts, random = [], field.random(size) or np.inf
        for limit in np.unique(np.quantile(seconds[others], _CUTS)):
            part = np.append(turns, others[seconds[others] <= limit])
            if part.size >= size:
                chosen, far = matched(part)
                cohorts.append((np.log(seconds[chosen].max()) + _SLOPE * far / random, chosen))
        return min(cohorts, key=itemgetter(0))[1]

    def _of_one_speed(
        self, clients: tuple[ClientId, ...], turns: Indices, others: Indices, size: int, time: Array
    ) -> list[int]:
        """Return a cohort of clients that cannot be told apart: those of one speed, in turn.

        The fastest in every round would lose what only the others have. Taken where seconds times
        uses are least, a client that is twice as slow is used half as often.
        """
        if size < 1:
            return [*turns.tolist()]
        used = 1 + values_for(self.state.used, clients)
        by_speed = others[np.argsort(time[others], kind="stable")]
        last = len(others) - size  # the slowest are a group, too, if others are in two for that
        groups = [by_speed[start : start + size] for start in (*range(0, last, size), last)]
        best = min(groups, key=lambda group: time[group].max() * used[group].mean())
        return [*turns.tolist(), *best.tolist()]

    def _goal(self, field: _Field, signals: Signals) -> Array:
        """What the cohort should look like, less the center."""
        goal = field.center if self.target is None else self.target
        if isinstance(goal, UniformLabels):
            goal = goal.target(signals, tuple(self.state.seen), self.state.changes)
        return np.asarray(goal - field.center).ravel()


class _Field:
    """The usable sketches of some clients: shrunken points around a center, variances, weights."""

    def __init__(
        self, signals: Signals, clients: tuple[ClientId, ...], state: GlobalSketch, center: str
    ) -> None:
        positions, readings = signals.read("race_sketch", clients)
        if len(positions) and not (usable := readings["n"] > 0).all():
            positions, readings = positions[usable], readings[usable]
        self.clients = take(clients, positions)
        self.center = state.center(center)
        self.points: NDArray[Any] = np.empty((0, self.center.size))
        self.variance: Array = np.empty(0)
        self.weights: Array = np.ones(len(positions))
        self.differ = False
        self.gram: NDArray[Any] | None = None
        if len(positions):
            if center == "mean":
                self.center = precise_mean(readings, self.center)
            else:
                self.weights = np.minimum(readings["n"], state.cap)
            self.points, self.variance, self.differ = shrink(readings, self.center)

    def random(self, size: int) -> float:
        """Expected squared distance, with its variance, of `size` clients drawn at random."""
        squares = np.einsum("ij,ij->i", self.points, self.points) + self.variance
        return float(squares.mean()) / size


def drift(old: NDArray[Any], new: NDArray[Any]) -> Array:
    """How far each client's sketch moved, in standard errors of its squared distance."""
    before, after = Stack(old), Stack(new)
    squares = np.zeros(len(before))
    for (_, a), (_, b) in zip(before.chunks(), after.chunks(), strict=True):
        squares += np.einsum("irb,irb->i", a - b, a - b)
    error = np.hypot(error_at_center(before), error_at_center(after))
    with np.errstate(divide="ignore", invalid="ignore"):
        far = (squares - before.error_variance() - after.error_variance()) / error
    return np.asarray(np.nan_to_num(far, nan=0.0))


def _checked_target(target: object, rows: int, bits: int) -> Array | UniformLabels:
    """Return a target of the right size, normalized."""
    if isinstance(target, UniformLabels):
        shape: tuple[int, ...] = (target.empty.rows, target.empty.buckets)
    else:
        target = np.asarray(target.normalized() if isinstance(target, RaceSketch) else target)
        shape = target.shape
    if shape != (rows, 1 << bits):
        raise IncompatibleSketches(
            f"SketchMatch: the target has the shape {shape}, the sketches ({rows}, {1 << bits}); "
            "make the target with the same rows and bits"
        )
    return target
