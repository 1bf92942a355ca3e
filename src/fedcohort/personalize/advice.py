"""A newcomer with unlabeled data: which model it should start from, or "no client is near enough".

``match`` averages the models of the nearest clients by the weights with which their sketches add up
to the newcomer's; it was the best strategy wherever it was measured (docs/personalize.md).
``nearest`` is the nearest client's model, and ``plain`` that by the distance of the paper's
algorithm 2 (Liu et al., paper 0), which is not debiased. The averages and the limit are ours.

How far is too far comes from the warm clients: each in turn is a newcomer among the others. A
newcomer is near if its squared distance is at most the 95% quantile of theirs, or at most its own
standard error: a distance that sampling and noise explain is no reason to abstain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, NoClients
from fedcohort.options import unknown
from fedcohort.personalize.models import average
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, nearest, nearest_of_each
from fedcohort.rounds import ClientId, stream
from fedcohort.sketch.distances import Stack, gram
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import too_few

Floats = NDArray[np.float64]
Strategy = Literal["match", "nearest", "plain"]
CONSIDERED = 20  # clients that "match" may average
RIDGE = 0.3  # share of a mixture's own error variance that is left in
MIN_CURVATURE = 1e-9  # relative to the largest
SUM_WEIGHT = 1e4  # weight of "the weights sum to one", relative to the largest curvature
QUANTILE = 0.95
MAX_CALIBRATED = 200


def best_mixture(
    gram: ArrayLike, squares: ArrayLike, error_variances: ArrayLike
) -> tuple[Floats, float]:
    """Find the mixture of clients whose sketch is nearest to the newcomer's, and its square.

    Minimizes w'Gw + sum_i w_i (d_i - G_ii) over weights w >= 0 that sum to one, where `gram` G has
    the debiased inner products of the clients' sketches, and `squares` d the debiased squared
    distances to the newcomer. A share RIDGE of the mixture's error variance, sum_i w_i^2 e_i, is
    left in, so that no single noisy sketch is trusted too much.

    Examples
    --------
    >>> clients, newcomer = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0.25, 0.75])
    >>> squares = ((clients - newcomer) ** 2).sum(axis=1)
    >>> weights, _ = best_mixture(clients @ clients.T, squares, np.zeros(3))
    >>> weights.round(3).tolist()
    [0.25, 0.75, 0.0]
    """
    from scipy.optimize import nnls

    inner = np.asarray(gram, float)
    gaps = np.asarray(squares, float) - np.diag(inner)
    products = inner + RIDGE * np.diag(np.asarray(error_variances, float))
    values, axes = np.linalg.eigh(products)
    # debiasing can leave directions without curvature, or with a negative one
    values = np.maximum(values, MIN_CURVATURE * max(float(values[-1]), 1e-300))
    root = np.sqrt(values)[:, None] * axes.T  # root' root = products
    target = -(axes.T @ (gaps / 2)) / np.sqrt(values)
    heavy = SUM_WEIGHT * float(np.sqrt(values[-1]))  # the weights sum to one
    table = np.vstack([root, np.full(len(gaps), heavy)])
    weights: Floats = nnls(table, np.append(target, heavy))[0]
    weights /= weights.sum()
    return weights, float(weights @ inner @ weights + weights @ gaps)


def distance_limit(registry: Registry, most: int = MAX_CALIBRATED, seed: int = 0) -> float:
    """Return the squared distance up to which a newcomer is near; infinite without two clients.

    It is the 95% quantile of those from `most` random clients to the nearest other with a model.
    """
    clients = [str(row[0]) for row in registry.db.rows("SELECT id FROM clients ORDER BY number")]
    if len(clients) > most:
        drawn = stream(seed, "leave-one-out").choice(len(clients), most, replace=False)
        clients = [clients[i] for i in sorted(drawn.tolist())]
    pairs = [(client, registry.sketch(client)) for client in clients]
    pairs = [(client, sketch) for client, sketch in pairs if not too_few([sketch])[0]]
    if not pairs:
        return inf
    names, sketches = zip(*pairs, strict=True)
    others = nearest_of_each(registry, sketches, without=names, with_model=True)
    squares = [near[0].squared for near in others if near]
    return float(np.quantile(squares, QUANTILE)) if squares else inf


@dataclass(frozen=True)
class Advice:
    """What a newcomer should start from: models averaged with `weights`, or the global model.

    `neighbors` are the nearest clients with a model, or, if no client has one, the nearest;
    `distance` and `squared` are those from the newcomer to the average, debiased as in `Neighbor`.
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
        Beyond it the advice is the global model. "auto": see above; None: no limit.

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
    ...         for i, center in enumerate([[1, 0], [1, 0], [0, 1], [0, 1]]):
    ...             registry.add(f"client {i}", sketch(center, i), {"w": [float(i)]})
    ...         start = ColdStart(registry)
    ...         start.model(start.advise(sketch([0, 1], 7), "nearest"))
    {'w': array([3.])}
    """

    def __init__(
        self, registry: Registry, *, max_distance: float | Literal["auto"] | None = "auto"
    ) -> None:
        if max_distance not in ("auto", None) and not float(max_distance) >= 0:
            raise ConfigError(f"max_distance={max_distance} must be at least 0, 'auto' or None")
        self.registry, self.max_distance = registry, max_distance

    @cached_property
    def limit(self) -> float:
        """The largest squared distance that counts as near."""
        if self.max_distance == "auto":
            return distance_limit(self.registry)
        return inf if self.max_distance is None else float(self.max_distance) ** 2

    def advise(
        self,
        sketch: RaceSketch,
        strategy: Strategy = "match",
        k: int | None = None,
        *,
        without: ClientId | None = None,
    ) -> Advice:
        """Return which average of models to start from.

        `k` is how many clients to consider, by default 20 for "match" and else 1; `without` names a
        client to leave out, such as the one that asks.
        """
        if strategy not in get_args(Strategy):
            raise unknown("strategy", strategy, get_args(Strategy))
        count = k or (CONSIDERED if strategy == "match" else 1)
        options: dict[str, Any] = {"plain": strategy == "plain", "without": without}
        near = nearest(self.registry, sketch, count, with_model=True, **options)
        if near:
            weights, square = self._blend(near, strategy)
        else:
            near, weights = nearest(self.registry, sketch, count, **options), {}
            if not near:
                raise NoClients(f"{self.registry.path}: no client to compare with")
            square = near[0].squared
        auto = self.max_distance == "auto"
        allowed = max(self.limit, near[0].error) if auto else self.limit
        return Advice(
            strategy,
            tuple(near),
            weights if square <= allowed else {},
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
        share, square = best_mixture(products, squares, Stack(sketches).error_variance())
        weights = dict(zip((one.client for one in near), share.tolist(), strict=True))
        return {c: w for c, w in weights.items() if w > 0}, square

    def model(self, advice: Advice) -> dict[str, NDArray[Any]]:
        """Load the advised model: the average of the neighbors' models, or the global model."""
        if not advice.near:
            return self.registry.global_model()
        return average({c: (w, self.registry.model(c)) for c, w in advice.weights.items()})
