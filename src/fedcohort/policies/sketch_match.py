"""SketchMatch: the cohort whose merged sketch is nearest that of the whole federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.numerics import herding
from fedcohort.policies.base import Policy, check_at_least, register, values_for
from fedcohort.privacy.planning import sketch_size
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import Stack
from fedcohort.sketch.federation import GlobalSketch, shrink
from fedcohort.sketch.labels import UniformLabels
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import error_at_center

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_GRAM = 3000  # up to this many clients all inner products are kept: 72 MB, and picks cost little
_LARGE = 4  # a cohort is large from one quarter of the clients on


@dataclass
class SketchMatchState(GlobalSketch):
    """The global sketch so far, and who was used how often.

    Attributes
    ----------
    used : dict
        How often each client was picked. A client that joins late starts at the median.
    epoch : list
        With large cohorts: who was picked in this epoch.
    drifted : dict
        Clients whose data changed by more than chance, with the round in which it was noticed.
    """

    used: dict[ClientId, int] = field(default_factory=dict)
    epoch: list[ClientId] = field(default_factory=list)
    drifted: dict[ClientId, int] = field(default_factory=dict)


@register(
    "sketch-match",
    when="clients are skewed: the cohort together should look like the federation",
)
class SketchMatch(Policy):
    """Chooses the set of clients, not each client, that looks like the federation.

    Sketches merge: the sum of the cohort's counts is the sketch of its data together. Its squared
    distance to the global sketch is rows times the squared maximum mean discrepancy, under the
    hash family's kernel, between the data the cohort trains on and all data. Each round a greedy
    selection, like kernel herding [1]_, followed by exchanges, minimizes it over a pool of the
    clients used least, so that all take part. It needs one sketch per client, once: no losses, no
    warm-up, no model.

    Sketches [2]_ of few records or with privacy noise are uncertain. Each is shrunk toward the
    federation's by its share of error, and the variance that remains is added to the objective
    (empirical Bayes), so that clients are not preferred for noise. Where clients do not differ by
    more than chance, the cohort is drawn from the pool at random.

    When the cohort is a quarter of the clients or more, all clients are divided into cohorts at
    once and each trains once per epoch; a client that is away is planned for again when it is back.

    Parameters
    ----------
    pool : {"less-used", "random"}
        Whom to choose from: the clients used least so far, or a random part of all. The random pool
        fits better, but clients that fit badly wait long.
    share : float, default=0.5
        Size of the pool as a share of the available clients.
    average : {"auto", "size", "equal"}
        How the cohort's models will be averaged: by size (sketches are pooled) or equally. "auto"
        takes what the engine says, and "size" where it says nothing.
    turns : int, default=0
        This many places per round go to the clients used least, whether they fit or not, and the
        others are chosen around them. Of N clients that stay available, each is then picked within
        ceil(N / turns) rounds. Without turns, a client that fits no cohort may never be picked.
    sweeps : int, default=2
        How often each member may be exchanged after the greedy selection.
    largest_pool : int, default=10_000
        With more clients, the pool is a random part of the less used.
    target : RaceSketch, array (rows, buckets) or UniformLabels, optional
        What cohorts should look like; the federation by default. A sketch of public data must be
        made as the policy's sketches are. Cohorts of a long-tailed federation that match a balanced
        target train on few clients more often: use ``pool="random"``, and expect others to wait.
    mix : float, default=1.0
        Share of `target` in what cohorts should look like; the rest is the federation. Smaller
        values let more clients take part.
    refresh : int, default=0
        Ask for new sketches every so many rounds, where data drift; 0 never. The new sketch
        replaces the old one, and clients whose data changed are noted in ``state.drifted``. A
        client whose privacy budget is spent does not answer, and its old sketch stays.
    rows, bits, seed, label_weight, centered, epsilon
        How sketches are made: rows of 2^bits buckets (10 x 64 take 1.3 kB); weight of the one-hot
        label appended to the unit-length input (0: no labels); whether inputs are centered by
        public constants, which sharpens angles; privacy budget (0: exact).
    records : int, default=0
        Records of a typical client. With `epsilon`, rows and bits are then those of
        `fedcohort.privacy.planning.sketch_size`, because a large private sketch of few records
        is mostly noise. 0 keeps `rows` and `bits`.
    hash : {"auto", "srp", "minhash"}
        Sign projections for vectors, or MinHash for rows of integer tokens. "auto" decides by the
        data in the simulator; Flower clients read inputs as floats, so state "minhash" for tokens
        there. MinHash uses neither labels nor a center.
    embed : {"", "model"}
        "model" sketches the first dense layer's outputs under the model of the last `refresh`, or
        under the initial model without one, in place of the inputs. Clients download that model.
        For a public model see ``simulate(embed=...)``.

    References
    ----------
    .. [1] Chen, Welling, Smola (2010), Super-Samples from Kernel Herding, UAI.
    .. [2] Liu et al. (2023), One-Pass Distribution Sketch for Measuring Data Heterogeneity in
       Federated Learning, NeurIPS.

    Examples
    --------
    >>> sketch = np.zeros(4, [("n", "f8"), ("noise", "f8"), ("counts", "i2", (1, 2))])
    >>> sketch["n"], sketch["counts"] = 9, [[[9, 0]], [[9, 0]], [[0, 9]], [[0, 9]]]
    >>> signals = Signals()
    >>> _ = signals.record("race_sketch", dict(zip("abcd", sketch)), stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> policy = SketchMatch(share=1.0)
    >>> cohort = policy.select(round, signals, np.random.default_rng(0)).clients
    >>> sorted(cohort) in [["a", "c"], ["a", "d"], ["b", "c"], ["b", "d"]]     # one of each kind
    True
    """

    needs = Needs(profile=frozenset({"race_sketch"}))

    def __init__(
        self,
        pool: str = "less-used",
        share: float = 0.5,
        average: str = "auto",
        turns: int = 0,
        sweeps: int = 2,
        largest_pool: int = 10_000,
        target: RaceSketch | UniformLabels | ArrayLike | None = None,
        mix: float = 1.0,
        refresh: int = 0,
        rows: int = 10,
        bits: int = 6,
        seed: int = 0,
        label_weight: float = 2.0,
        centered: bool = True,
        epsilon: float = 0.0,
        hash: str = "auto",
        embed: str = "",
        records: int = 0,
    ) -> None:
        _one_of("pool", pool, "less-used", "random")
        _one_of("average", average, "auto", "size", "equal")
        _one_of("hash", hash, "auto", "srp", "minhash")
        _one_of("embed", embed, "", "model")
        if not 0 < share <= 1:
            raise ValueError(f"SketchMatch: share={share} must lie in (0, 1]")
        if not 0 <= mix <= 1:
            raise ValueError(f"SketchMatch: mix={mix} must lie in [0, 1]")
        check_at_least("SketchMatch", 0, turns=turns, sweeps=sweeps, refresh=refresh)
        check_at_least(
            "SketchMatch", 0, records=records, label_weight=label_weight, epsilon=epsilon
        )
        if records and not epsilon:
            raise ValueError("SketchMatch: records= sizes private sketches; give epsilon= too")
        if records:
            rows, bits = sketch_size(records, epsilon)[:2]
        check_at_least("SketchMatch", 1, largest_pool=largest_pool)
        self.pool, self.share, self.average = pool, share, average
        self.turns, self.sweeps, self.largest_pool = turns, sweeps, largest_pool
        self.target = None if target is None else _checked_target(target, rows, bits)
        self.mix, self.refresh = mix, refresh
        if refresh:
            self.needs = Needs(frozenset({"race_sketch"}), query=frozenset({"race_sketch"}))
        options: dict[str, Option] = {"rows": rows, "bits": bits, "seed": seed}
        options |= {"label_weight": label_weight, "center": centered, "epsilon": epsilon}
        options |= {"hash": hash} | ({"embed": embed, "refresh": refresh} if embed else {})
        self.signal_options = {"race_sketch": options}
        self.state = SketchMatchState()
        self._kept: tuple[tuple[ClientId, ...], int, str, _Field] | None = None
        self._before: tuple[tuple[ClientId, ...], NDArray[Any]] | None = None

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask for new sketches every `refresh` rounds; those who are away then, on their return."""
        self._before = None
        due = round.number - round.number % self.refresh if self.refresh else 0
        if not due:
            return ()
        stamps = signals.rounds("race_sketch", round.available)
        old = np.flatnonzero((stamps >= 0) & (stamps < due))
        clients = tuple(round.available[i] for i in old.tolist())
        if clients:
            self._before = clients, np.array(signals.values("race_sketch", clients))
        return clients

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Choose the pool, then the set."""
        self._include(round, signals)
        if not self.state.clients:
            return Selection(())
        average = round.averaging or "size" if self.average == "auto" else self.average
        if len(round.available) <= _GRAM:
            field = self._everybody(round.available, signals, average)
            pool = self._pool(field.clients, round.size, rng)
        else:
            some = self._pool(round.available, round.size, rng)
            clients = tuple(round.available[i] for i in some.tolist())
            field = _Field(signals, clients, self.state, average)
            pool = np.arange(len(field.clients))
        if not pool.size:
            return Selection(())
        size = min(round.size, len(field.clients))
        if not field.differ and self.target is None:
            chosen = pool[:size].tolist()
        elif self._is_large(size, field):
            chosen = self._from_epoch(field, size, rng)
        else:
            chosen = self._match(field, pool, min(size, pool.size), average, signals)
        clients = tuple(field.clients[i] for i in chosen)
        return Selection(clients, scores={c: float(self.state.used.get(c, 0)) for c in clients})

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count who was picked, whether or not it finished."""
        for client in outcome.selected:
            self.state.used[client] = self.state.used.get(client, 0) + 1
        if _LARGE * round.size >= len(round.available):
            self.state.epoch = list(dict.fromkeys((*self.state.epoch, *outcome.selected)))

    def _include(self, round: Round, signals: Signals) -> None:
        """Add new sketches, let joiners start at the median, and note whose data drifted."""
        known = len(self.state.seen)
        new = self.state.include(signals, round.available, round.number)
        if known and new:
            others = tuple(filterfalse(set(new).__contains__, round.available))
            start = int(np.median(values_for(self.state.used, others))) if others else 0
            self.state.used.update(dict.fromkeys(new, start))
        if self._before is not None:
            clients, old = self._before
            far = drift(old, signals.values("race_sketch", clients))
            moved = [clients[i] for i in np.flatnonzero(far > 3).tolist()]
            self.state.drifted.update(dict.fromkeys(moved, round.number))
            self._before = None

    def _everybody(self, available: tuple[ClientId, ...], signals: Signals, average: str) -> _Field:
        """All available sketches with their inner products, kept until either changes."""
        kept = self._kept
        if kept is None or kept[:3] != (available, self.state.changes, average):
            field = _Field(signals, available, self.state, average)
            field.gram = field.points @ field.points.T
            self._kept = kept = (available, self.state.changes, average, field)
        return kept[3]

    def _pool(self, clients: tuple[ClientId, ...], size: int, rng: Generator) -> Indices:
        """Positions to choose from, in random order so that ties are broken at random."""
        count = len(clients)
        order = rng.random(count)
        if self.pool == "less-used" and self.state.used:
            order += values_for(self.state.used, clients)
        part = int(np.ceil(self.share * count))
        wanted = min(max(part, size), max(self.largest_pool, size), count)
        first = np.argpartition(order, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        return np.asarray(first[np.argsort(order[first])])

    def _is_large(self, size: int, field: _Field) -> bool:
        """Whether to plan an epoch: other targets and random pools do not use everybody alike."""
        plain = self.pool == "less-used" and (self.target is None or not self.mix)
        return plain and field.gram is not None and size * _LARGE >= len(field.clients)

    def _from_epoch(self, field: _Field, size: int, rng: Generator) -> list[int]:
        """Divide those who have not trained in this epoch; return the first cohort."""
        order = rng.permutation(len(field.clients)).tolist()
        trained = set(self.state.epoch)
        waiting = [i for i in order if field.clients[i] not in trained]
        left_over = 0
        if len(waiting) < size:  # the next epoch begins with those left over
            self.state.epoch, left_over = [], len(waiting)
            waiting += [i for i in order if field.clients[i] in trained]
        zero = np.zeros(field.points.shape[1])
        cohorts = herding.cut(
            field.points,
            field.weights,
            zero,
            size,
            order=waiting,
            variance=field.variance,
            fixed=left_over,
        )
        return cohorts[0]

    def _match(
        self, field: _Field, pool: Indices, size: int, average: str, signals: Signals
    ) -> list[int]:
        return herding.match(
            field.points,
            field.weights,
            self._goal(average, signals) - field.center.ravel(),
            size,
            pool=pool,
            fixed=self.turns,
            variance=field.variance,
            sweeps=self.sweeps,
            gram=field.gram,
        )

    def _goal(self, average: str, signals: Signals) -> Array:
        """What the cohort should look like."""
        center = self.state.center(_center(average))
        if self.target is None or not self.mix:
            return np.asarray(center.ravel())
        goal = self.target
        if isinstance(goal, UniformLabels):
            goal = goal.target(signals, tuple(self.state.seen), self.state.changes)
        return np.asarray(((1 - self.mix) * center + self.mix * goal).ravel())


class _Field:
    """The usable sketches of some clients: shrunken points around a center, variances, weights."""

    def __init__(
        self, signals: Signals, clients: tuple[ClientId, ...], state: GlobalSketch, average: str
    ) -> None:
        positions, readings = signals.read("race_sketch", clients)
        if len(positions):
            usable = readings["n"] > 0
            if not usable.all():
                positions, readings = positions[usable], readings[usable]
        self.clients = tuple(clients[i] for i in positions.tolist())
        self.center = state.center(_center(average))
        self.points: NDArray[Any] = np.empty((0, self.center.size))
        self.variance: Array = np.empty(0)
        self.weights: Array = np.empty(0)
        self.differ = False
        self.gram: NDArray[Any] | None = None
        if len(positions):
            self.points, self.variance, self.differ = shrink(readings, self.center)
            self.weights = np.array(readings["n"]) if average == "size" else np.ones(len(positions))


def drift(old: NDArray[Any], new: NDArray[Any]) -> Array:
    """How far each client's sketch moved, in standard errors of its squared distance."""
    before, after = Stack(old), Stack(new)
    squares = np.zeros(len(before))
    for (_, a), (_, b) in zip(before.chunks(), after.chunks(), strict=True):
        squares += np.einsum("irb,irb->i", a - b, a - b)
    errors = np.hypot(error_at_center(before), error_at_center(after))
    with np.errstate(divide="ignore", invalid="ignore"):
        far = (squares - before.error_variance() - after.error_variance()) / errors
    return np.asarray(np.nan_to_num(far, nan=0.0))


def _center(average: str) -> str:
    return "pooled" if average == "size" else "mean"


def _one_of(option: str, value: str, *known: str) -> None:
    if value not in known:
        names = " or ".join(repr(name) for name in known)
        raise ValueError(f"SketchMatch: {option}={value!r} must be {names}")


def _checked_target(target: object, rows: int, bits: int) -> Array | UniformLabels:
    """Return a target of the right size, normalized."""
    if isinstance(target, UniformLabels):
        shape, made = (target.empty.rows, target.empty.buckets), None
    else:
        made = np.asarray(target.normalized() if isinstance(target, RaceSketch) else target, float)
        shape = made.shape
    if shape != (rows, 1 << bits):
        raise IncompatibleSketches(
            f"SketchMatch: the target has the shape {shape}, the sketches ({rows}, {1 << bits}); "
            "make the target with the same rows and bits"
        )
    return target if made is None else made  # type: ignore[return-value]
