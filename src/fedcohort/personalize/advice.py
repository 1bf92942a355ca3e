"""A newcomer with unlabeled data: which model it should start from, or "no client is near enough".

``match`` averages the models of the nearest clients by the weights with which their sketches add up
to the newcomer's; it was the best strategy wherever it was measured (docs/personalize.md).
``nearest`` is the nearest client's model, and ``plain`` that of the paper's algorithm 2, whose
distance is not debiased. ``global`` is the global model, whatever the distances.

How far is too far comes from the warm clients: each in turn is treated as a newcomer and looks for
its nearest among the others. A newcomer is near if its squared distance is at most the 95% quantile
of theirs (one in twenty newcomers like the others is sent away), or at most its own standard error:
a distance that sampling and noise explain is no reason to abstain.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithm 2. The averages and the limit are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.options import unknown
from fedcohort.personalize.models import average
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, nearest, nearest_of_each
from fedcohort.rounds import ClientId, stream
from fedcohort.sketch.distances import Stack, gram
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import too_few

Floats = NDArray[np.float64]
Strategy = Literal["match", "nearest", "plain", "global"]
CONSIDERED = 20  # clients that "match" may average
RIDGE = 0.3  # share of a mixture's own error variance that is left in
MIN_CURVATURE = 1e-9  # relative to the largest
SUM_WEIGHT = 1e4  # weight of "the weights sum to one", relative to the largest curvature
QUANTILE = 0.95
MAX_CALIBRATED = 1000  # clients that a stored limit is calibrated on


def matching(gram: ArrayLike, squares: ArrayLike, error_variances: ArrayLike) -> Floats:
    """Find the mixture of clients whose sketch is nearest to the newcomer's.

    Minimizes the squared distance between the newcomer's sketch and sum_i w_i q_i over weights
    w >= 0 that sum to one. A share RIDGE of the mixture's error variance, sum_i w_i^2 e_i, is left
    in, so that no single noisy sketch is trusted too much.

    `gram` (k, k) has the debiased inner products of the clients' sketches, `squares` (k,) the
    debiased squared distances to the newcomer, `error_variances` (k,) what sampling and noise add.

    Examples
    --------
    >>> clients, newcomer = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0.25, 0.75])
    >>> squares = ((clients - newcomer) ** 2).sum(axis=1)
    >>> matching(clients @ clients.T, squares, np.zeros(3)).round(3).tolist()
    [0.25, 0.75, 0.0]
    """
    from scipy.optimize import nnls

    products, far = np.array(gram, float), np.asarray(squares, float)
    slope = (far - np.diag(products)) / 2  # see mixture_square
    products += RIDGE * np.diag(np.asarray(error_variances, float))
    values, axes = np.linalg.eigh(products)
    # debiasing can leave directions without curvature, or with a negative one
    values = np.maximum(values, MIN_CURVATURE * max(float(values[-1]), 1e-300))
    root = np.sqrt(values)[:, None] * axes.T  # root' root = products
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


@dataclass(frozen=True)
class Limit:
    """The largest distance that counts as near.

    A squared distance of at most `squared` is near, and one of at most `errors` of its own standard
    errors.

    Examples
    --------
    >>> limit = Limit(squared=2.0, errors=1.0)
    >>> limit.squared_for(error=0.1), limit.squared_for(error=3.0)
    (2.0, 3.0)
    """

    squared: float
    errors: float = 0.0

    def squared_for(self, error: float) -> float:
        """Return the limit for a newcomer whose squared distance has this standard error."""
        return max(self.squared, self.errors * error) if self.errors else self.squared


def gains_limit(squares: ArrayLike, gains: ArrayLike) -> Limit:
    """Return the limit that would have served the warm clients best.

    `squares` are the squared distances of warm clients to what they were recommended, `gains` how
    much better that was than the global model, on each client's own data.

    Examples
    --------
    >>> gains_limit([1.0, 2.0, 4.0], [0.3, 0.1, -0.2]), gains_limit([1.0, 2.0], [-0.3, -0.1])
    (Limit(squared=3.0, errors=0.0), Limit(squared=-inf, errors=0.0))
    """
    far, gain = np.asarray(squares, float), np.asarray(gains, float)
    if far.shape != gain.shape or not far.size or not np.isfinite(gain).all():
        raise ConfigError("gains_limit: give one finite gain per squared distance")
    order = np.argsort(far, kind="stable")
    kept = int(np.argmax(np.concatenate([[0.0], np.cumsum(gain[order])])))
    if kept == 0:
        return Limit(-inf)
    if kept == len(order):
        return Limit(float(far[order[-1]]))  # nothing is known beyond it
    return Limit(float(far[order[kept - 1]] + far[order[kept]]) / 2)


def leave_one_out(
    registry: Registry, most: int = MAX_CALIBRATED, seed: int = 0
) -> dict[ClientId, Neighbor]:
    """Return the nearest other client with a model of each warm client, or of `most` of them."""
    clients = [str(row[0]) for row in registry.db.rows("SELECT id FROM clients ORDER BY number")]
    if len(clients) > most:
        drawn = stream(seed, "leave-one-out").choice(len(clients), most, replace=False)
        clients = [clients[i] for i in sorted(drawn.tolist())]
    pairs = [(client, registry.sketch(client)) for client in clients]
    pairs = [(client, sketch) for client, sketch in pairs if not too_few([sketch])[0]]
    if not pairs:
        return {}
    names, sketches = zip(*pairs, strict=True)
    others = nearest_of_each(registry, sketches, without=names, with_model=True)
    return {client: near[0] for client, near in zip(names, others, strict=True) if near}


def calibrated(
    registry: Registry, gains: Mapping[ClientId, float] | None = None, most: int = MAX_CALIBRATED
) -> Limit:
    """Return the limit for newcomers; there is none with fewer than two warm clients.

    Parameters
    ----------
    registry : Registry
    gains : mapping, optional
        For clients of `leave_one_out`: how much more accurate than the global model the nearest
        other's model is on the client's data. Without it, distances alone decide.
    most : int
        If there are more clients, this many are sampled.
    """
    near = leave_one_out(registry, most)
    if gains is not None:
        measured = [client for client in near if client in gains]
        if not measured:
            raise ConfigError("calibrated: no gain belongs to a client of leave_one_out")
        return gains_limit([near[c].squared for c in measured], [gains[c] for c in measured])
    if not near:
        return Limit(inf)
    return Limit(float(np.quantile([one.squared for one in near.values()], QUANTILE)), errors=1.0)


def store_limit(registry: Registry, limit: Limit) -> None:
    """Store the limit that max_distance="auto" stands for."""
    registry.set_fact("limit", {"squared": repr(limit.squared), "errors": limit.errors})


def stored_limit(registry: Registry) -> Limit | None:
    """Return the stored limit."""
    stored = registry.fact("limit")
    if stored is None:
        return None
    try:
        limit = Limit(float(stored["squared"]), float(stored["errors"]))
        if isnan(limit.squared) or not 0 <= limit.errors < inf:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise DataError(
            f"{registry.path}: {stored!r:.80} is not a distance limit; "
            "store it again with `fedcohort registry calibrate`"
        ) from None
    return limit


@dataclass(frozen=True)
class Advice:
    """What a newcomer should start from.

    Models are averaged with `weights`; without any, start from the global model. `neighbors` are
    the nearest clients with a model, or, if no client has one, the nearest. `distance` and
    `squared` are those from the newcomer to that average, debiased as in `Neighbor`, and
    `max_distance` is the limit for this newcomer.
    """

    strategy: str
    neighbors: tuple[Neighbor, ...]
    weights: dict[ClientId, float]
    distance: float
    squared: float
    max_distance: float

    @property
    def near(self) -> bool:
        """Whether a client with a model is near enough."""
        return bool(self.weights)


class ColdStart:
    """Finds models for newcomers in a registry.

    Parameters
    ----------
    registry : Registry
    max_distance : float, "auto" or None
        Beyond it the advice is the global model. "auto": the limit that `store_limit` stored, else
        one from the distances among at most 200 warm clients. None: no limit.

    Examples
    --------
    >>> import tempfile
    >>> empty = RaceSketch.srp(dim=2, rows=50, bits=3)
    >>> def sketch(center, seed):
    ...     one = empty.empty_like()
    ...     one.add(np.random.default_rng(seed).normal(center, 0.2, (200, 2)))
    ...     return one
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Registry.create(f"{folder}/warm") as registry:
    ...         for i in range(6):
    ...             center = [1, 0] if i < 3 else [0, 1]
    ...             registry.add(f"client {i}", sketch(center, i), {"w": [float(i)]})
    ...         start = ColdStart(registry)
    ...         near = start.advise(sketch([0, 1], 7), "nearest")
    ...         far = start.advise(sketch([-1, 0], 8))
    ...         near.weights, far.weights, start.model(near)
    ({'client 5': 1.0}, {}, {'w': array([5.])})
    """

    def __init__(
        self, registry: Registry, *, max_distance: float | Literal["auto"] | None = "auto"
    ) -> None:
        self.registry = registry
        self._limit: Limit | None = None  # read or calibrated when it is first needed
        if max_distance is None:
            self._limit = Limit(inf)
        elif max_distance != "auto":
            if not float(max_distance) >= 0:
                raise ConfigError(f"max_distance={max_distance} must be at least 0, 'auto' or None")
            self._limit = Limit(float(max_distance) ** 2)

    @property
    def limit(self) -> Limit:
        """The largest distance that counts as near."""
        if self._limit is None:
            self._limit = stored_limit(self.registry) or calibrated(self.registry, most=200)
        return self._limit

    def nearest(self, sketch: RaceSketch, k: int = 1) -> list[Neighbor]:
        """Return the k nearest clients with their distances, whatever the limit."""
        return nearest(self.registry, sketch, k)

    def advise(
        self,
        sketch: RaceSketch,
        strategy: Strategy = "match",
        k: int | None = None,
        *,
        without: ClientId | None = None,
    ) -> Advice:
        """Return whose model, or which average of models, to start from.

        Parameters
        ----------
        sketch : RaceSketch
            Of the newcomer's data.
        strategy : {"match", "nearest", "plain", "global"}
            See the top of this module.
        k : int, optional
            How many clients to consider, and to return: by default 20 for "match", else 1.
        without : str, optional
            A client to leave out, such as the one that asks.
        """
        if strategy not in get_args(Strategy):
            raise unknown("strategy", strategy, get_args(Strategy))
        count = k or (CONSIDERED if strategy == "match" else 1)
        ranking: Literal["plain", "debiased"] = "plain" if strategy == "plain" else "debiased"
        options: dict[str, Any] = {"ranking": ranking, "without": without}
        near = nearest(self.registry, sketch, count, with_model=True, **options)
        if near:
            weights, square = self._blend(near, strategy)
        else:
            near, weights = nearest(self.registry, sketch, count, **options), {}
            if not near:
                raise NoClients(f"{self.registry.path}: there is no client to compare with")
            square = near[0].squared
        allowed = self.limit.squared_for(near[0].error)
        return Advice(
            strategy,
            tuple(near),
            weights if square <= allowed and strategy != "global" else {},
            max(square, 0.0) ** 0.5,
            square,
            max(allowed, 0.0) ** 0.5,
        )

    def _blend(
        self, near: Sequence[Neighbor], strategy: Strategy
    ) -> tuple[dict[ClientId, float], float]:
        """Return the weights of clients, and the squared distance to their mixture."""
        if strategy != "match" or len(near) == 1:
            return {near[0].client: 1.0}, near[0].squared
        sketches = [self.registry.sketch(one.client) for one in near]
        products = gram(sketches) * sketches[0].rows
        squares = [one.squared for one in near]
        share = matching(products, squares, Stack(sketches).error_variance())
        weights = dict(zip((one.client for one in near), share.tolist(), strict=True))
        return {c: w for c, w in weights.items() if w > 0}, mixture_square(products, squares, share)

    def model(self, advice: Advice) -> dict[str, NDArray[Any]]:
        """Load the advised model: the average of the neighbors' models, or the global model."""
        if not advice.near:
            return self.registry.global_model()
        return average({c: (w, self.registry.model(c)) for c, w in advice.weights.items()})
