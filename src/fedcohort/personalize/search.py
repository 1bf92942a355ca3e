"""The nearest clients of a registry: every client is compared with the newcomer, exactly.

Clients are ranked by D2 + z s: D2 is the debiased squared distance (see `sketch.distances`), s the
part of its standard error that is due to the client's own sampling and noise, and z the normal
quantile that all of N numbers stay below with probability 95%. The smallest of many unbiased D2
likely belongs to a small client that was lucky; z s is how lucky the luckiest of N can be. The
paper's plain distance (algorithm 2) has no correction and prefers large clients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import (
    ConfigError,
    FedcohortError,
    IncompatibleSketches,
    NoClients,
)
from fedcohort.personalize.registry import NO_MODEL, Registry, check_size
from fedcohort.rounds import ClientId, check_id
from fedcohort.sketch.distances import Stack, error_variance
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.sketch.uncertainty import possible_luck, squared_errors

CELLS = 1 << 22  # counts compared at a time
SPARE = 16  # more than asked for: one may be left out, and a few damaged
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    options = {"plain": plain, "with_model": with_model}
    return nearest_of_each(registry, [sketch], k, without=[without], **options)[0]


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
    if k < 1:
        raise ConfigError(f"nearest: k={k} must be at least 1")
    spec = registry.spec
    if spec is None:
        raise NoClients(f"no client is registered in {registry.path}")
    for sketch in sketches:
        if sketch.spec != spec:
            raise IncompatibleSketches(f"the newcomer: {difference(spec, sketch.spec)}")
        check_size("the newcomer", sketch)
    ranked = _scan(registry, sketches, k + SPARE, plain, with_model)
    return [
        _neighbors(sketch, list(islice(_read(registry, numbers, client), k)))
        for sketch, numbers, client in zip(sketches, ranked, without, strict=True)
    ]


def _scan(
    registry: Registry, sketches: Sequence[RaceSketch], wanted: int, plain: bool, with_model: bool
) -> list[list[int]]:
    """Return the numbers of the best clients for each sketch, the best first."""
    newcomers = np.array([sketch.normalized().ravel() for sketch in sketches])
    rows, buckets = sketches[0].counts.shape
    scores = np.empty((len(newcomers), 0))
    numbers = np.empty((len(newcomers), 0), np.int64)
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
            kept = np.argpartition(scores, wanted - 1, axis=1)[:, :wanted]
            scores = np.take_along_axis(scores, kept, axis=1)
            numbers = np.take_along_axis(numbers, kept, axis=1)
    order = np.lexsort((numbers, scores))  # by score, then by number
    ranked: list[list[int]] = np.take_along_axis(numbers, order, axis=1).tolist()
    return ranked


def _blocks(
    registry: Registry, cells: int, with_model: bool
) -> Iterator[tuple[Ints, Floats, Floats, Floats]]:
    """Yield numbers, sizes, noise and counts of clients; damaged rows are left out."""
    having = "AND number NOT IN (SELECT number FROM clients WHERE " + NO_MODEL + ")"
    sql = (
        "SELECT number, n, noise, length(counts), counts FROM counts WHERE number > ? AND "
        "typeof(n) = 'real' AND typeof(noise) = 'real' AND typeof(counts) = 'blob' "
        f"{having * with_model} ORDER BY number LIMIT ?"
    )
    for page in registry.db.pages(sql, max(1, min(4096, CELLS // cells))):
        columns = [np.array(column) for column in zip(*(row[:4] for row in page), strict=True)]
        numbers, n, noise, sizes = columns
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


def _neighbors(sketch: RaceSketch, near: Sequence[tuple[ClientId, RaceSketch]]) -> list[Neighbor]:
    if not near:
        return []
    clients, others = zip(*near, strict=True)
    stack = Stack(others)
    excess = stack.error_variance() + Stack([sketch]).error_variance()
    squares = stack.squares_to(sketch.normalized()) - excess
    pairs = zip(clients, squares.tolist(), squared_errors(sketch, others).tolist(), strict=True)
    return [Neighbor(client, max(sq, 0.0) ** 0.5, sq, error) for client, sq, error in pairs]
