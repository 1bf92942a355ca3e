"""A newcomer with unlabeled data: which model it should start from, or "no client is near enough".

Four strategies: the model of the nearest client; the k nearest clients' models averaged by
distance; averaged by the weights with which their sketches add up to the newcomer's (`matching`,
the default: it was best wherever it was measured, see docs/personalize.md); or the average model of
the nearest cluster of clients, which are clients that their sketches cannot tell apart.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithm 2. The averages, the clusters and the limit are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, NoClients
from fedcohort.options import unknown
from fedcohort.personalize import limits
from fedcohort.personalize.limits import Limit
from fedcohort.personalize.models import average
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, Search
from fedcohort.rounds import ClientId
from fedcohort.sketch.distances import Stack, distance_matrix, gram, squares_to
from fedcohort.sketch.errors import distance_with_error
from fedcohort.sketch.race import RaceSketch

Floats = NDArray[np.float64]
RIDGE = 0.3  # share of a mixture's own energy that is left in
MIN_CURVATURE = 1e-9  # relative to the largest
SUM_WEIGHT = 1e4  # weight of "the weights sum to one", relative to the largest curvature
MAX_CLUSTERED = 2000  # clients; all their distances are computed
SAMPLED_PAIRS = 200
CUT = 0.5  # of a standard error, which is an upper bound and usually a loose one
Strategy = Literal["nearest", "k-nearest", "match", "cluster"]
DEFAULT_K = {"nearest": 1, "k-nearest": 5, "match": 20, "cluster": 1}
CALIBRATED = 200  # clients that the limit is calibrated on


def by_distance(squares: ArrayLike, errors: ArrayLike) -> Floats:
    """Weigh neighbors by 1 / (squared distance + its standard error)^2.

    A twin outweighs all others; neighbors that cannot be told apart have equal weights.

    Parameters
    ----------
    squares : array (k,)
        Squared distances without bias; negative ones count as zero.
    errors : array (k,)
        Their standard errors.

    Examples
    --------
    >>> by_distance([0.0, 1.0, 1.0], [1.0, 1.0, 1.0]).round(3).tolist()
    [0.667, 0.167, 0.167]
    """
    scale = np.maximum(squares, 0) + np.asarray(errors, float)
    scale = np.maximum(scale, 1e-12 * max(float(scale.max()), 1e-300))
    raw = (scale.min() / scale) ** 2
    weights: Floats = raw / raw.sum()
    return weights


def matching(gram: ArrayLike, squares: ArrayLike, energy: ArrayLike) -> Floats:
    """Find the mixture of clients whose sketch is nearest to the newcomer's.

    Minimizes the squared distance between the newcomer's sketch and sum_i w_i q_i over weights
    w >= 0 that sum to one. A share RIDGE of the mixture's own energy, sum_i w_i^2 e_i, is left in,
    so that no single noisy sketch is trusted too much.

    Parameters
    ----------
    gram : array (k, k)
        Debiased inner products of the clients' sketches, summed over rows.
    squares : array (k,)
        Debiased squared distances of the newcomer to the clients.
    energy : array (k,)
        Of the clients' sketches.

    Examples
    --------
    >>> clients, newcomer = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0.25, 0.75])
    >>> squares = ((clients - newcomer) ** 2).sum(axis=1)
    >>> matching(clients @ clients.T, squares, np.zeros(3)).round(3).tolist()
    [0.25, 0.75, 0.0]
    """
    from scipy.optimize import nnls

    own, far = np.array(gram, float), np.asarray(squares, float)
    slope = (far - np.diag(own)) / 2  # see mixture_square
    own += RIDGE * np.diag(np.asarray(energy, float))
    values, axes = np.linalg.eigh(own)
    # debiasing can leave directions without curvature, or with a negative one
    values = np.maximum(values, MIN_CURVATURE * max(float(values[-1]), 1e-300))
    root = np.sqrt(values)[:, None] * axes.T  # root' root = own
    target = -(axes.T @ slope) / np.sqrt(values)
    heavy = SUM_WEIGHT * float(np.sqrt(values[-1]))  # the weights sum to one
    table = np.vstack([root, np.full(len(far), heavy)])
    weights: Floats = nnls(table, np.append(target, heavy))[0]
    weights /= weights.sum()
    return weights


def mixture_square(gram: ArrayLike, squares: ArrayLike, weights: ArrayLike) -> float:
    """Squared distance, without bias, between a mixture of clients and the newcomer.

    With weights that sum to one, |sum_i w_i q_i - x|^2 = w'Gw + sum_i w_i (|q_i - x|^2 - G_ii).

    Examples
    --------
    >>> clients = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> mixture_square(clients @ clients.T, [1.0, 1.0], [0.5, 0.5])
    0.5
    """
    products, share = np.asarray(gram, float), np.asarray(weights, float)
    gaps = np.asarray(squares, float) - np.diag(products)
    return float(share @ products @ share + share @ gaps)


def clusters(sketches: Sequence[RaceSketch], cut: float | None = None) -> NDArray[np.int64]:
    """Group clients by average linkage of their debiased squared distances.

    Parameters
    ----------
    sketches : sequence of RaceSketch
    cut : float, optional
        Groups are joined while their average squared distance is below it. By default half the
        median standard error of such a distance: groups whose difference noise and sampling
        explain are joined, and under much noise all clients become one group.

    Returns
    -------
    int array
        The group of each client, from 0.

    Examples
    --------
    >>> empty = RaceSketch.srp(dim=2, rows=50, bits=3)
    >>> def sketch(center, seed):
    ...     made = empty.empty_like()
    ...     made.add(np.random.default_rng(seed).normal(center, 0.2, (200, 2)))
    ...     return made
    >>> clusters([sketch(c, i) for i, c in enumerate([(1, 0), (0, 1), (1, 0), (0, 1)])]).tolist()
    [0, 1, 0, 1]
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(sketches) > MAX_CLUSTERED:
        raise ConfigError(
            f"clusters: {len(sketches)} clients are more than {MAX_CLUSTERED}; "
            "use the strategy 'match' or 'k-nearest'"
        )
    if len(sketches) < 2:
        return np.zeros(len(sketches), np.int64)
    squares = np.maximum(distance_matrix(sketches, "mmd") * sketches[0].rows, 0)
    tree = linkage(squareform(squares, checks=False), "average")
    height = CUT * typical_error(sketches) if cut is None else cut
    groups = fcluster(tree, height, "distance")
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    names: NDArray[np.int64] = np.argsort(np.argsort(first))[inverse]  # in order of appearance
    return names


def typical_error(sketches: Sequence[RaceSketch]) -> float:
    """Median standard error of the squared distance between two of the clients."""
    pairs = zip(sketches, [*sketches[1:], sketches[0]], strict=True)
    errors = [distance_with_error(a, b, "mmd").error for a, b in islice(pairs, SAMPLED_PAIRS)]
    return float(np.median(errors)) * sketches[0].rows


@dataclass(frozen=True)
class Advice:
    """What a newcomer should start from.

    Parameters
    ----------
    strategy : str
    neighbors : tuple of Neighbor
        The nearest clients, the nearest first.
    weights : dict
        Weights of the clients whose models are averaged. Empty: no client is near enough, so the
        newcomer should start from the global model.
    distance, squared : float
        From the newcomer to that average of clients: debiased, as in `Neighbor`.
    max_distance : float
        The limit for this newcomer; infinite if there is none, 0 if no client can be near.
    """

    strategy: str
    neighbors: tuple[Neighbor, ...]
    weights: dict[ClientId, float]
    distance: float
    squared: float
    max_distance: float

    @property
    def near(self) -> bool:
        """Whether a client is near enough."""
        return bool(self.weights)


class _Groups(NamedTuple):
    """Clients with models: one of their sketches, all of them stacked, and the groups' weights."""

    names: list[ClientId]
    sketch: RaceSketch
    stack: Stack
    energy: Floats  # of each client
    shares: Floats  # (groups, clients)
    products: Floats  # (clients, clients)


class ColdStart:
    """Finds models for newcomers in a registry.

    Parameters
    ----------
    registry : Registry
    max_distance : float, "auto" or None
        Beyond it the advice is the global model. "auto": the limit that `limits.store_limit`
        stored, else one from the distances among at most 200 warm clients. None: no limit.
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
            self._limit = limits.NO_LIMIT
        elif max_distance != "auto":
            self._limit = limits.distance_limit(float(max_distance))

    @property
    def limit(self) -> Limit:
        """The largest distance that counts as near."""
        if self._limit is None:
            self._limit = limits.stored_limit(self.registry)
        if self._limit is None:
            self._limit = limits.calibrated(self.search, most=CALIBRATED)
        return self._limit

    def nearest(self, sketch: RaceSketch, k: int = 1) -> list[Neighbor]:
        """Return the k nearest clients with their distances, whatever the limit."""
        return self.search.nearest(sketch, k)

    def advise(
        self,
        sketch: RaceSketch,
        strategy: Strategy = "match",
        k: int | None = None,
        *,
        neighbors: Sequence[Neighbor] | None = None,
    ) -> Advice:
        """Return whose model, or which average of models, to start from.

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
            What `search.nearest` returned for this sketch, to save a second search.
        """
        if strategy not in get_args(Strategy):
            raise unknown("strategy", strategy, get_args(Strategy))
        count = k or DEFAULT_K[strategy]
        if neighbors is None:
            neighbors = self.search.nearest(sketch, count, with_model=True)
        found = neighbors[:count]
        if not found:
            raise NoClients(f"no client with a model is registered in {self.registry.path}")
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
        sketches = self.search.sketches([near.client for near in found])
        products = gram(sketches, debias=True) * sketches[0].rows
        squares = [near.squared for near in found]
        if strategy == "match":
            share = matching(products, squares, Stack(sketches).error_variance())
        else:
            share = by_distance(squares, [near.error for near in found])
        weights = dict(zip((near.client for near in found), share.tolist(), strict=True))
        return {c: w for c, w in weights.items() if w > 0}, mixture_square(products, squares, share)

    def _nearest_group(self, sketch: RaceSketch) -> tuple[dict[ClientId, float], float]:
        groups = self._groups
        groups.sketch.check_alike(sketch)
        squares = squares_to(groups.stack, groups.energy, sketch)
        found = [mixture_square(groups.products, squares, share) for share in groups.shares]
        best = int(np.argmin(found))
        share = groups.shares[best]
        members = np.flatnonzero(share).tolist()
        return {groups.names[i]: float(share[i]) for i in members}, found[best]

    @cached_property
    def _groups(self) -> _Groups:
        """The clients with models, grouped by `clusters`."""
        if len(self.registry) > MAX_CLUSTERED:
            raise ConfigError(
                f"cluster: {len(self.registry)} clients are more than {MAX_CLUSTERED}; "
                "use the strategy 'match' or 'k-nearest'"
            )
        numbers = self.registry.db.rows("SELECT number FROM clients ORDER BY number")
        found = self.search.fetch([number for (number,) in numbers], with_model=True)
        names, sketches = [client for client, _ in found], [sketch for _, sketch in found]
        groups = clusters(sketches)
        sizes = np.array([sketch.n for sketch in sketches], float)
        shares = np.where(groups == np.arange(groups.max() + 1)[:, None], sizes, 0.0)
        shares /= shares.sum(axis=1, keepdims=True)
        stack, products = Stack(sketches), gram(sketches, debias=True) * sketches[0].rows
        return _Groups(names, sketches[0], stack, stack.error_variance(), shares, products)

    def model(self, advice: Advice) -> dict[str, NDArray[Any]]:
        """Load the advised model: the average of the neighbors' models, or the global model."""
        if not advice.near:
            return self.registry.global_model()
        return average({c: (w, self.registry.model(c)) for c, w in advice.weights.items()})
