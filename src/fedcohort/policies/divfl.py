"""DivFL: clients whose gradients represent everybody's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics import facility
from fedcohort.policies.base import (
    Policy,
    check_at_least,
    pick,
    register,
    sample_positions,
    sizes,
    vector_needs,
    vectors,
)
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Option
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_BLOCK = 1 << 15  # distances handled at a time: they stay in the processor's cache


@register("divfl", when="everybody can send a sketch of its gradient in every round")
class DivFL(Policy):
    """Diverse client selection by facility location, of Balakrishnan et al. [1]_.

    The cohort minimizes, greedily, the summed distance of each client's gradient to the nearest
    picked one. Gradients travel as random projections, which keep distances.

    Parameters
    ----------
    signal : str, default="gradient_sketch"
        Asked of all clients each round. "update_sketch" uses each client's last update, which
        arrives anyway (the paper's variant without extra cost). "race_sketch" needs no model.
    method : {"lazy", "stochastic"}
        Exact greedy, or greedy steps that evaluate a random part of the candidates.
    epsilon : float, default=0.1
        Share of the guarantee that the stochastic method may lose.
    candidates : int, optional
        With more clients than this, this many are drawn uniformly and represent all clients. None
        always uses all clients.
    weights : {None, "coverage"}
        "coverage" weights a picked client by the data share of the clients that are nearest to it.
    k, kind, seed
        Of the projection.

    Notes
    -----
    Clients without a sketch get places in proportion to their number, drawn uniformly.

    References
    ----------
    .. [1] Balakrishnan et al. (2022), Diverse Client Selection for Federated Learning via
       Submodular Maximization, ICLR.

    Examples
    --------
    >>> signals = Signals()
    >>> gradients = {"a": [0.0], "b": [0.2], "c": [0.1], "d": [9.0]}
    >>> _ = signals.record("gradient_sketch", gradients, stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> policy = DivFL(weights="coverage")
    >>> selection = policy.select(round, signals, np.random.default_rng(0))
    >>> selection.clients, selection.weights
    (('b', 'd'), (0.75, 0.25))
    """

    def __init__(
        self,
        signal: str = "gradient_sketch",
        method: str = "lazy",
        epsilon: float = 0.1,
        candidates: int | None = 2000,
        weights: str | None = None,
        k: int = 50,
        kind: str = "sparse",
        seed: int = 0,
    ) -> None:
        if method not in ("lazy", "stochastic"):
            raise ValueError(f"DivFL: method={method!r} must be 'lazy' or 'stochastic'")
        if not 0 < epsilon < 1:
            raise ValueError(f"DivFL: epsilon={epsilon} must lie in (0, 1)")
        check_at_least("DivFL", 1, candidates=candidates, k=k)
        if weights not in (None, "coverage"):
            raise ValueError(f"DivFL: weights={weights!r} must be None or 'coverage'")
        self.needs = vector_needs("DivFL", signal, "num_examples")
        self.signal, self.method, self.epsilon = signal, method, epsilon
        self.limit, self.weights = candidates, weights
        if signal not in self.needs.profile:
            options: dict[str, Option] = {"k": k, "kind": kind, "seed": seed}
            self.signal_options = {signal: options}
        elif signal == "race_sketch":
            self.signal_options = {signal: {"rows": 10, "bits": 6, "seed": seed}}

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask all clients, or a sample if there are many."""
        if not self.needs.query:
            return ()
        asked = sample_positions(len(round.available), self.limit, rng)
        return tuple(round.available[i] for i in asked.tolist())

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Pick by facility location among those with a sketch."""
        stamps = signals.rounds(self.signal, round.available)
        asked = bool(self.needs.query)
        known = np.flatnonzero(stamps >= (round.number if asked else 0))
        strangers = np.flatnonzero(stamps < 0) if not asked else np.empty(0, np.int64)
        part = known[sample_positions(known.size, self.limit, rng)]
        clients = tuple(round.available[i] for i in part.tolist())
        positions, rows = vectors(signals, self.signal, clients)
        if not positions.size:
            return Selection(())
        clients = tuple(clients[i] for i in positions.tolist())
        places = int(np.floor(round.size * strangers.size / len(round.available) + 0.5))
        taken, covered = self._facilities(rows, clients, round.size - places, signals, rng)
        chosen = tuple(clients[i] for i in taken)
        scores = dict(zip(chosen, covered, strict=True))
        weights = covered if self.weights and not places else None
        new = [round.available[i] for i in strangers.tolist()] if places else []
        return Selection(chosen + pick(new, places, rng), weights, scores)

    def _facilities(
        self,
        rows: Array,
        clients: tuple[ClientId, ...],
        size: int,
        signals: Signals,
        rng: Generator,
    ) -> tuple[list[int], tuple[float, ...]]:
        """Return the picks, and the share of the data that is nearest to each of them."""
        share = sizes(signals, clients)
        share = share / share.sum() if share.any() else np.full(share.size, 1 / share.size)
        distances, size = _distances(rows).T, min(size, len(clients))  # symmetric: saves a copy
        if self.method == "lazy":
            taken = facility.lazy_greedy(distances, size, share)
        else:
            taken = facility.stochastic_greedy(
                distances, size, rng, epsilon=self.epsilon, weights=share
            )
        if not taken:
            return [], ()
        nearest = np.argmin(distances[:, taken], axis=1)
        return taken, tuple(np.bincount(nearest, share, len(taken)).tolist())


def _distances(rows: Array) -> Array:
    """Return Euclidean distances; rows are centered first, so similar rows lose no digits."""
    rows = rows - rows.mean(axis=0)
    squares = np.einsum("ij,ij->i", rows, rows)
    result = np.asarray(rows @ rows.T)
    step = max(1, _BLOCK // len(rows))
    for start in range(0, len(rows), step):
        part = result[start : start + step]  # in place: at 2,000 clients a copy would cost 32 MB
        part *= -2
        part += squares[start : start + step, None]
        part += squares
        np.sqrt(np.maximum(part, 0.0, out=part), out=part)
    np.fill_diagonal(result, 0.0)
    return result
