"""The cohort whose merged sketch is nearest that of the whole federation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics import herding
from fedcohort.policies.base import Policy, check_at_least, register
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import GlobalSketch

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_GRAM = (
    3000  # clients up to which all inner products are kept: 72 MB, and picks cost next to nothing
)


@dataclass
class SketchMatchState(GlobalSketch):
    """The global sketch so far, and how often each client was picked."""

    used: dict[ClientId, int] = field(default_factory=dict)


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
    clients used least, so that all take part. One sketch a client, once; no losses, no warm-up,
    no model. For private sketches [2]_ the noise's known energy is left out of the distance.

    Parameters
    ----------
    pool : {"less-used", "random"}
        Whom to choose from: the clients used least so far, or any drawn at random, who fit better
        but let clients that fit badly wait for long.
    share : float, default=0.5
        Size of the pool as a share of the available clients.
    average : {"size", "equal"}
        How the cohort's models will be averaged: by size (sketches are pooled) or equally.
    turns : int, default=0
        So many places a round go to the clients used least, whether they fit or not, and the
        others are chosen around them: nobody waits for ever.
    sweeps : int, default=2
        How often each member may be exchanged after the greedy selection.
    largest_pool : int, default=10_000
        With more clients, the pool is a random part of the less used.
    rows, bits, seed, label_weight, centered, epsilon
        Of the sketches: rows of 2^bits buckets (10 x 64 take 1.3 kB); weight of the one-hot label
        appended to the unit-length input (0: no labels); whether inputs are centered by public
        constants, which sharpens angles; privacy budget (0: exact).

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
        average: str = "size",
        turns: int = 0,
        sweeps: int = 2,
        largest_pool: int = 10_000,
        rows: int = 10,
        bits: int = 6,
        seed: int = 0,
        label_weight: float = 2.0,
        centered: bool = True,
        epsilon: float = 0.0,
    ) -> None:
        if pool not in ("less-used", "random"):
            raise ValueError(f"SketchMatch: pool={pool!r} must be 'less-used' or 'random'")
        if not 0 < share <= 1:
            raise ValueError(f"SketchMatch: share={share} must lie in (0, 1]")
        if average not in ("size", "equal"):
            raise ValueError(f"SketchMatch: average={average!r} must be 'size' or 'equal'")
        check_at_least("SketchMatch", 0, turns=turns, sweeps=sweeps)
        check_at_least("SketchMatch", 1, largest_pool=largest_pool)
        self.pool, self.share, self.average = pool, share, average
        self.turns, self.sweeps, self.largest_pool = turns, sweeps, largest_pool
        options: dict[str, Option] = {"rows": rows, "bits": bits, "seed": seed}
        options |= {"label_weight": label_weight, "center": centered, "epsilon": epsilon}
        self.signal_options = {"race_sketch": options}
        self.state = SketchMatchState()
        self._kept: tuple[tuple[ClientId, ...], int, _Field] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Choose the pool, then the set."""
        self.state.include(signals, round.available, round.number)
        if not self.state.clients:
            return Selection(())
        if len(round.available) <= _GRAM:
            field = self._everybody(round.available, signals)
            pool = self._pool(field.clients, round.size, rng)
        else:
            some = self._pool(round.available, round.size, rng)
            field = _Field(signals, tuple(round.available[i] for i in some.tolist()))
            pool = np.arange(len(field.clients))
        if not pool.size:
            return Selection(())
        chosen = self._match(field, pool, min(round.size, pool.size))
        clients = tuple(field.clients[i] for i in chosen)
        return Selection(clients, scores={c: float(self.state.used.get(c, 0)) for c in clients})

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count who was picked, whether or not it finished."""
        for client in outcome.selected:
            self.state.used[client] = self.state.used.get(client, 0) + 1

    def _everybody(self, available: tuple[ClientId, ...], signals: Signals) -> _Field:
        """All available sketches with their inner products, kept until either changes."""
        kept = self._kept
        if kept is None or kept[1] != self.state.changes or kept[0] != available:
            field = _Field(signals, available)
            field.gram = field.q @ field.q.T
            self._kept = kept = (available, self.state.changes, field)
        return kept[2]

    def _pool(self, clients: tuple[ClientId, ...], size: int, rng: Generator) -> Indices:
        """Positions to choose from, in random order so that ties are broken at random."""
        count = len(clients)
        order = rng.random(count)
        if self.pool == "less-used" and self.state.used:
            used = self.state.used.get
            order += np.fromiter((used(c, 0) for c in clients), np.float64, count)
        part = int(np.ceil(self.share * count))
        wanted = min(max(part, size), max(self.largest_pool, size), count)
        first = np.argpartition(order, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        return np.asarray(first[np.argsort(order[first])])

    def _match(self, field: _Field, pool: Indices, size: int) -> list[int]:
        center = "pooled" if self.average == "size" else "mean"
        return herding.match(
            field.q,
            field.n if self.average == "size" else np.ones(field.n.size),
            self.state.center(center).ravel(),
            size,
            pool=pool,
            fixed=self.turns,
            noise=field.noise,
            share=self.state.share(field.n, center),
            sweeps=self.sweeps,
            gram=field.gram,
        )


class _Field:
    """The usable sketches of some clients: normalized rows, sizes, energy of their noise."""

    def __init__(self, signals: Signals, clients: tuple[ClientId, ...]) -> None:
        positions, readings = signals.read("race_sketch", clients)
        if len(positions):
            usable = readings["n"] > 0
            positions, readings = positions[usable], readings[usable]
        self.clients = tuple(clients[i] for i in positions.tolist())
        self.n: Array = np.array(readings["n"]) if len(positions) else np.empty(0)
        self.q: NDArray[Any] = np.empty((0, 1))
        self.noise: Array = np.empty(0)
        self.gram: NDArray[Any] | None = None
        if len(positions):
            counts = readings["counts"].reshape(len(positions), -1).astype(np.float32)
            self.q = counts / self.n[:, None].astype(np.float32)
            self.noise = counts.shape[1] * readings["noise"] / self.n**2
