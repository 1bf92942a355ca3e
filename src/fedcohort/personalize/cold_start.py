"""A newcomer with unlabeled data: which model to start from, or "none is near".

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithm 2. The mixtures, the clusters and the limit are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, NoClients
from fedcohort.personalize import calibration, limits
from fedcohort.personalize.clusters import MOST, clusters
from fedcohort.personalize.limits import Limit
from fedcohort.personalize.mixing import average
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, Search
from fedcohort.personalize.weights import by_distance, matching, mixture_square
from fedcohort.rounds import ClientId
from fedcohort.signals.distances import distances_to, gram
from fedcohort.signals.race import RaceSketch
from fedcohort.signals.stack import Stack

Floats = NDArray[np.float64]
Strategy = Literal["nearest", "k-nearest", "match", "cluster"]
TAKEN = {"nearest": 1, "k-nearest": 5, "match": 20, "cluster": 1}
SAMPLED = 200


@dataclass(frozen=True)
class Advice:
    """What a newcomer should start from.

    Parameters
    ----------
    strategy : str
    neighbors : tuple of Neighbor
        The nearest clients, the nearest first.
    weights : dict
        Whose models to average, by how much. Empty: nobody is near, take the global model.
    distance, squared : float
        From the newcomer to that average of clients: debiased, as in `Neighbor`.
    max_distance : float
        The limit for this newcomer; infinite if there is none, 0 if nobody could be near.
    """

    strategy: str
    neighbors: tuple[Neighbor, ...]
    weights: dict[ClientId, float]
    distance: float
    squared: float
    max_distance: float

    @property
    def near(self) -> bool:
        """Whether somebody is near."""
        return bool(self.weights)


class ColdStart:
    """Finds models for newcomers in a registry.

    Parameters
    ----------
    registry : Registry
    max_distance : float, "auto" or None
        Beyond it the advice is the global model. "auto": the limit that `calibration.keep`
        stored, else one by the distances among up to 200 warm clients (`limits`). None: no limit.
    search : Search, optional

    Examples
    --------
    >>> import tempfile
    >>> empty = RaceSketch.srp(dim=2, rows=50, bits=3)
    >>> def sketch(center, seed):
    ...     made = empty.empty_like()
    ...     made.add(np.random.default_rng(seed).normal(center, 0.2, (200, 2)))
    ...     return made
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Registry.create(f"{folder}/warm") as registry:
    ...         for i in range(6):
    ...             center = [1, 0] if i < 3 else [0, 1]
    ...             registry.add(f"client {i}", sketch(center, i), {"w": [float(i)]})
    ...         start = ColdStart(registry)
    ...         near = start.advise(sketch([0, 1], 7), "k-nearest", k=3)
    ...         far = start.advise(sketch([-1, 0], 8))
    ...         sorted(near.weights), far.weights, start.model(near)["w"].round()
    (['client 3', 'client 4', 'client 5'], {}, array([4.]))
    """

    def __init__(
        self,
        registry: Registry,
        *,
        max_distance: float | Literal["auto"] | None = "auto",
        search: Search | None = None,
    ) -> None:
        self.registry = registry
        self.search = Search(registry) if search is None else search
        self._limit: Limit | None = None  # not known yet
        if max_distance is None:
            self._limit = limits.NEVER
        elif max_distance != "auto":
            self._limit = limits.distance_limit(float(max_distance))

    @property
    def limit(self) -> Limit:
        """Up to where somebody is near."""
        if self._limit is None:
            self._limit = calibration.kept(self.registry)
        if self._limit is None:
            self._limit = calibration.calibrated(self.search, most=SAMPLED)
        return self._limit

    def nearest(self, sketch: RaceSketch, k: int = 1) -> list[Neighbor]:
        """Return the k nearest clients with their distances, whatever the limit."""
        return self.search.nearest(sketch, k)

    def advise(
        self,
        sketch: RaceSketch,
        strategy: Strategy = "nearest",
        k: int | None = None,
        *,
        neighbors: Sequence[Neighbor] | None = None,
    ) -> Advice:
        """Say whose model, or which average of models, to start from.

        Parameters
        ----------
        sketch : RaceSketch
            Of the newcomer's data.
        strategy : {"nearest", "k-nearest", "match", "cluster"}
            The nearest client's model (paper 0); the average of the k nearest, weighted by
            distance; the average by the weights with which the k nearest clients' sketches add
            up to the newcomer's; or that of the nearest group of clients.
        k : int, optional
            How many clients to consider: by default 1, 5, 20 and 1.
        neighbors : sequence of Neighbor, optional
            What `nearest` returned for this sketch, to spare the search.
        """
        if strategy not in get_args(Strategy):
            known = ", ".join(get_args(Strategy))
            raise ConfigError(f"unknown strategy {strategy!r}; there are {known}")
        count = k or TAKEN[strategy]
        found = self.search.nearest(sketch, count) if neighbors is None else neighbors[:count]
        if not found:
            raise NoClients(f"nobody is registered in {self.registry.path}, or nobody else")
        if strategy == "cluster":
            weights, square = self._nearest_group(sketch)
        else:
            weights, square = self._blend(found, strategy)
        allowed = self.limit.squared_for(found[0].error)
        return Advice(
            strategy,
            tuple(found),
            weights if square <= allowed else {},
            max(square, 0.0) ** 0.5,
            square,
            max(allowed, 0.0) ** 0.5,
        )

    def _blend(
        self, found: Sequence[Neighbor], strategy: str
    ) -> tuple[dict[ClientId, float], float]:
        if strategy == "nearest" or len(found) == 1:
            return {found[0].client: 1.0}, found[0].squared
        sketches = [self.registry.sketch(near.client) for near in found]
        products = gram(sketches, debias=True) * sketches[0].rows
        squares = [near.squared for near in found]
        if strategy == "match":
            share = matching(products, squares, Stack(sketches).energy())
        else:
            share = by_distance(squares, [near.error for near in found])
        weights = dict(zip((near.client for near in found), share.tolist(), strict=True))
        return {c: w for c, w in weights.items() if w > 0}, mixture_square(products, squares, share)

    def _nearest_group(self, sketch: RaceSketch) -> tuple[dict[ClientId, float], float]:
        names, sketches, shares, products = self._groups
        squares = distances_to(sketches, sketch, "mmd") * sketch.rows
        found = [mixture_square(products, squares, share) for share in shares]
        best = int(np.argmin(found))
        members = np.flatnonzero(shares[best]).tolist()
        return {names[i]: float(shares[best][i]) for i in members}, found[best]

    @cached_property
    def _groups(self) -> tuple[list[ClientId], list[RaceSketch], Floats, Floats]:
        """The clients, each group's weights of them, and their inner products; made once."""
        if len(self.registry) > MOST:
            raise ConfigError(
                f"cluster: {len(self.registry)} clients are more than {MOST}; "
                "use the strategy 'match' or 'k-nearest'"
            )
        names = [entry.client for entry in self.registry.entries()]
        sketches = [self.registry.sketch(name) for name in names]
        groups = clusters(sketches)
        sizes = np.array([sketch.n for sketch in sketches], float)
        shares = np.where(groups == np.arange(groups.max() + 1)[:, None], sizes, 0.0)
        shares /= shares.sum(axis=1, keepdims=True)
        return names, sketches, shares, gram(sketches, debias=True) * sketches[0].rows

    def model(self, advice: Advice) -> dict[str, NDArray[Any]]:
        """Load what is advised: the average of the neighbors' models, or the global model."""
        if not advice.near:
            return self.registry.global_model()
        return average({c: (w, self.registry.model(c)) for c, w in advice.weights.items()})
