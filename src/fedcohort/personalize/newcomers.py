"""A newcomer with unlabeled data: which clients are nearest, and from which model to start.

Every client is compared with the newcomer, exactly, and ranked by D2 + z s: D2 is the debiased
squared distance, s the part of its standard error that is due to the client's own sampling and
noise, and z the normal quantile that all of N numbers stay below with probability 95%. The smallest
of many unbiased D2 likely belongs to a small client that was lucky; z s is how lucky it can be.

``match`` averages the models of the nearest clients by the weights with which their sketches add up
to the newcomer's. ``nearest`` is the nearest client's model, and ``plain`` that by the distance of
the paper's algorithm 2 (Liu et al., paper 0), not debiased. The averages and the limit are ours.

A newcomer is near if its squared distance is at most the 95% quantile of those of the warm clients,
each a newcomer among the others, or at most its own standard error: a distance that sampling and
noise explain is no reason to abstain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, FedcohortError, IncompatibleSketches, NoClients
from fedcohort.options import Count, typed
from fedcohort.personalize.models import average
from fedcohort.personalize.registry import NO_MODEL, Registry, check_size
from fedcohort.rounds import ClientId, check_id, stream
from fedcohort.sketch.distances import Stack, distance, error_variance, gram
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.sketch.uncertainty import possible_luck, squared_error, too_few

Floats = NDArray[np.float64]
Strategy = Literal["match", "nearest", "plain"]
CELLS = 1 << 22  # counts compared at a time
SPARE = 16  # more than asked for: one may be left out, and a few damaged
CONSIDERED = 20  # clients that "match" may average
RIDGE = 0.3  # share of a mixture's own error variance that is left in
MIN_CURVATURE = 1e-9  # relative to the largest
SUM_WEIGHT = 1e4  # weight of "the weights sum to one", relative to the largest curvature
QUANTILE = 0.95
MAX_CALIBRATED = 200


class Neighbor(NamedTuple):
    """A client near a newcomer.

    `squared` is the debiased squared Frobenius distance of the sketches, which may be negative, and
    `error` its standard error, from sampling and noise; `distance` is its root, or 0.
    """

    client: ClientId
    distance: float
    squared: float
    error: float


def nearest(
    registry: Registry,
    sketch: RaceSketch,
    k: int = 1,
    *,
    plain: bool = False,
    with_model: bool = False,
    without: ClientId | None = None,
) -> list[Neighbor]:
    """Return the k nearest clients, the nearest first.

    `plain` ranks by the paper's distance, which is not debiased. `with_model` leaves out clients
    without a model or a reference to one, and `without` one client, such as the one that asks.
    """
    return nearest_of_each(
        registry, [sketch], k, without=[without], plain=plain, with_model=with_model
    )[0]


def nearest_of_each(
    registry: Registry,
    sketches: Sequence[RaceSketch],
    k: int = 1,
    *,
    without: Sequence[ClientId | None],
    plain: bool = False,
    with_model: bool = False,
) -> list[list[Neighbor]]:
    """Return the nearest clients of each of several newcomers, as `nearest`, in one pass."""
    typed(Count, k, "nearest: k")
    spec = registry.spec
    if spec is None:
        raise NoClients(f"no client is registered in {registry.path}")
    for sketch in sketches:
        if sketch.spec != spec:
            raise IncompatibleSketches(f"the newcomer: {difference(spec, sketch.spec)}")
        check_size("the newcomer", sketch)
    ranked = _scan(registry, sketches, k + SPARE, plain, with_model)
    return [
        [_neighbor(sketch, *one) for one in islice(_read(registry, numbers, client), k)]
        for sketch, numbers, client in zip(sketches, ranked, without, strict=True)
    ]


def _scan(
    registry: Registry, sketches: Sequence[RaceSketch], wanted: int, plain: bool, with_model: bool
) -> list[list[int]]:
    """Return the numbers of the best clients for each sketch, the best first."""
    newcomers = np.array([sketch.normalized().ravel() for sketch in sketches])
    rows, buckets = sketches[0].counts.shape
    scores, numbers = np.empty((len(newcomers), 0)), np.empty((len(newcomers), 0), np.int64)
    luck: tuple[float, float] | None = None
    for block, n, noise, counts in _blocks(registry, rows * buckets, with_model):
        squares = np.einsum("ij,ij->i", counts, counts) / n**2
        new = squares - 2 * (newcomers @ counts.T) / n  # plus the newcomer's square, as for all
        if not plain:
            luck = luck or possible_luck(counts.reshape(-1, rows, buckets), len(registry))
            new += luck[0] / n + luck[1] * noise / n**2
            new -= error_variance(squares, n, noise, rows, buckets)
        scores = np.concatenate([scores, new], axis=1)
        numbers = np.concatenate([numbers, np.broadcast_to(block, new.shape)], axis=1)
        if scores.shape[1] > wanted:
            best = np.argpartition(scores, wanted - 1, axis=1)[:, :wanted]
            scores = np.take_along_axis(scores, best, axis=1)
            numbers = np.take_along_axis(numbers, best, axis=1)
    order = np.lexsort((numbers, scores))  # by score, then by number
    ranked: list[list[int]] = np.take_along_axis(numbers, order, axis=1).tolist()
    return ranked


def _blocks(
    registry: Registry, cells: int, with_model: bool
) -> Iterator[tuple[NDArray[np.int64], Floats, Floats, Floats]]:
    """Yield numbers, sizes, noise and counts of clients; damaged rows are left out."""
    having = "AND number NOT IN (SELECT number FROM clients WHERE " + NO_MODEL + ")"
    sql = (
        "SELECT number, n, noise, length(counts), counts FROM counts WHERE number > ? AND "
        "typeof(n) = 'real' AND typeof(noise) = 'real' AND typeof(counts) = 'blob' "
        f"{having * with_model} ORDER BY number LIMIT ?"
    )
    for page in registry.db.pages(sql, max(1, min(4096, CELLS // cells))):
        numbers, n, noise, sizes = map(np.array, zip(*(row[:4] for row in page), strict=True))
        whole = np.isfinite(n) & np.isfinite(noise) & (n >= 2)
        for width in (1, 2, 4, 8):
            of_width = np.flatnonzero(whole & (sizes == width * cells))
            if len(of_width):
                content = b"".join([page[i][4] for i in of_width.tolist()])
                counts = np.frombuffer(content, f"<i{width}").reshape(-1, cells)
                yield numbers[of_width], n[of_width], noise[of_width], counts.astype(float)


def _read(
    registry: Registry, numbers: Sequence[int], without: ClientId | None
) -> Iterator[tuple[ClientId, RaceSketch]]:
    """Yield ids and sketches in the given order; warn about damaged ones and leave them out."""
    spec, sql = registry.spec or {}, "SELECT id, sketch FROM clients WHERE number = ?"
    for client, content in (row for number in numbers for row in registry.db.rows(sql, number)):
        if client == without:
            continue
        try:
            sketch = RaceSketch.from_bytes(content)
            if sketch.spec != spec:
                raise IncompatibleSketches(difference(spec, sketch.spec))
            check_size("its sketch", sketch)
            yield check_id(client), sketch
        except (FedcohortError, TypeError) as error:
            warnings.warn(
                f"{registry.path}: client {client!r} is skipped, its sketch is damaged "
                f"({error}); register it again",
                RuntimeWarning,
                stacklevel=4,
            )


def _neighbor(sketch: RaceSketch, client: ClientId, other: RaceSketch) -> Neighbor:
    square = distance(sketch, other, "mmd") * sketch.rows
    return Neighbor(client, max(square, 0.0) ** 0.5, square, squared_error(sketch, other))


def best_mixture(
    gram: ArrayLike, squares: ArrayLike, error_variances: ArrayLike
) -> tuple[Floats, float]:
    """Find the mixture of clients whose sketch is nearest to the newcomer's, and its square.

    Minimizes w'Gw + sum_i w_i (d_i - G_ii) over weights w >= 0 that sum to one, where `gram` G has
    the debiased inner products of the clients' sketches, and `squares` d the debiased squared
    distances to the newcomer. A share RIDGE of the mixture's error variance, sum_i w_i^2 e_i, is
    left in, so that no single noisy sketch is trusted too much.
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
        Beyond it the advice is the global model. "auto" is the 95% quantile of the distances from
        random warm clients to the nearest other with a model; None: no limit.

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
        """The largest squared distance that counts as near; infinite if nothing limits it."""
        if self.max_distance != "auto":
            return inf if self.max_distance is None else float(self.max_distance) ** 2
        rows = self.registry.db.rows("SELECT id FROM clients ORDER BY number")
        clients = [str(client) for (client,) in rows]
        if len(clients) > MAX_CALIBRATED:
            rng = stream(0, "leave-one-out")
            drawn = rng.choice(len(clients), MAX_CALIBRATED, replace=False)
            clients = [clients[i] for i in sorted(drawn.tolist())]
        warm = {client: self.registry.sketch(client) for client in clients}
        warm = {client: sketch for client, sketch in warm.items() if not too_few([sketch])[0]}
        if not warm:
            return inf
        sketches, own = list(warm.values()), list(warm)
        others = nearest_of_each(self.registry, sketches, without=own, with_model=True)
        squares = [near[0].squared for near in others if near]
        return float(np.quantile(squares, QUANTILE)) if squares else inf

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
        typed(Strategy, strategy, "strategy")
        count = k or (CONSIDERED if strategy == "match" else 1)
        options: dict[str, Any] = {"plain": strategy == "plain", "without": without}
        near = nearest(self.registry, sketch, count, with_model=True, **options)
        weights, square = self._blend(near, strategy) if near else ({}, inf)
        if not near:
            near = nearest(self.registry, sketch, count, **options)
            if not near:
                raise NoClients(f"{self.registry.path}: no client to compare with")
            square = near[0].squared
        explained = near[0].error if self.max_distance == "auto" else 0.0
        allowed = max(self.limit, explained)
        if square > allowed:
            weights = {}
        lengths = max(square, 0.0) ** 0.5, square, max(allowed, 0.0) ** 0.5
        return Advice(strategy, tuple(near), weights, *lengths)

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
