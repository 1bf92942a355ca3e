"""Sketch-to-Select: one client from each cluster of model sketches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import kmeans, sample_positions, unit_rows
from fedcohort.options import Count
from fedcohort.policies.base import Policy, register, values_for
from fedcohort.policies.readings import vectors
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals

_MAX_FITTED = 5_000  # k-means is fitted to this many sketches; the others join the nearest center
_FITTED_PER_CLUSTER = 10  # at least this many per cluster


@dataclass
class SketchToSelectState:
    """The clusters of the last selection round, and the client drawn from each."""

    cluster: dict[ClientId, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    chosen: list[ClientId] = field(default_factory=list)


@register("sketch-to-select", when="models may be compared by tiny projections every now and then")
class SketchToSelect(Policy):
    """Algorithm 3 of Kollias, Salonidis and Wang.

    Every `interval` rounds the clients send a random projection of their model to k numbers;
    k-means (k-means++ start, Lloyd steps) makes as many clusters as the cohort is large, and one
    client of each is drawn. That cohort trains until the next selection.

    Parameters
    ----------
    interval : int, default=100
        Rounds between selections, u.
    k : int, default=100
        Length of a projection. The paper's is 10, which is too short to tell directions apart.
    fresh : bool, default=True
        Clients take their local steps from the current model before they sketch. False is the
        literal reading: all others hold the same model, so the old cohort is picked again.
    compare : {"steps", "models"}
        "models" is the paper's; most fall into one cluster once clients have learned their data.
        "steps" clusters the directions of fresh steps away from the global model.
    restarts : int, default=10
        Starts of k-means, of which the best is kept. The paper uses one.

    Notes
    -----
    Source: paper.
    Checked: clusters and draws by hand, replacements exactly.
    Reference: Kollias, Salonidis, Wang (2022), Sketch to Skip and Select.

    A chosen client that is away is replaced by a random one of its cluster. Scores are one over the
    size of the cluster.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sketches = {"a": [0.0, 0.1], "b": [0.1, 0.0], "c": [9.0, 9.0], "d": [9.1, 9.0]}
    >>> chosen = select(SketchToSelect(), "abcd", 2, model_sketch=sketches).clients
    >>> len({"a", "b"} & set(chosen)), len({"c", "d"} & set(chosen))
    (1, 1)
    """

    needs = Needs(query=frozenset({"model_sketch"}))

    def __init__(
        self,
        interval: Count = 100,
        k: Count = 100,
        fresh: bool = True,
        compare: Literal["steps", "models"] = "steps",
        restarts: Count = 10,
    ) -> None:
        self.interval, self.restarts = interval, restarts
        self.by_direction = compare == "steps" and fresh
        options: dict[str, Option] = {"k": k, "kind": "uniform", "seed": 0}
        options |= {"fresh": fresh, "step": self.by_direction}
        self.signal_options = {"model_sketch": options}
        self.state = SketchToSelectState()

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        return round.available if self._selects(round) else ()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        if self._selects(round):
            self._cluster(round, signals, rng)
        available = set(round.available)
        here = [c for c in self.state.chosen if c in available]
        chosen = (here + self._replacements(round, set(here), rng))[: round.size]
        inclusion = {c: 1 / self.state.sizes[self.state.cluster[c]] for c in chosen}
        return Selection(tuple(chosen), scores=inclusion)

    def _replacements(self, round: Round, present: set[ClientId], rng: Generator) -> list[ClientId]:
        """Draw a client of the same cluster for each chosen one that is away."""
        missing = [self.state.cluster[c] for c in self.state.chosen if c not in present]
        if not missing:
            return []
        cluster = {c: label for c, label in self.state.cluster.items() if c not in present}
        labels = values_for(cluster, round.available, -1)
        members = {label: np.flatnonzero(labels == label) for label in missing}
        rest = [members[label] for label in missing if members[label].size]
        return [round.available[at[int(rng.integers(at.size))]] for at in rest]

    def _selects(self, round: Round) -> bool:
        return round.number % self.interval == 0 or not self.state.chosen

    def _cluster(self, round: Round, signals: Signals, rng: Generator) -> None:
        dtype = np.float32 if self.by_direction else np.float64  # models may be far from zero
        positions, rows = vectors(signals, "model_sketch", round.available, round.number, dtype)
        self.state = SketchToSelectState()
        if not len(positions):
            return
        if self.by_direction:
            rows = unit_rows(rows)
        limit = max(_MAX_FITTED, _FITTED_PER_CLUSTER * round.size)
        fitted = rows[sample_positions(len(rows), limit, rng)]
        clusters = min(round.size, len(np.unique(fitted, axis=0)))  # at most one per different row
        labels = kmeans(fitted, clusters, self.restarts, rng).predict(rows)
        clients = [round.available[i] for i in positions.tolist()]
        self.state.cluster = dict(zip(clients, labels.tolist(), strict=True))
        for label in range(labels.max() + 1):
            inside = np.flatnonzero(labels == label)
            self.state.sizes.append(inside.size)
            if inside.size:
                self.state.chosen.append(clients[int(rng.choice(inside))])
