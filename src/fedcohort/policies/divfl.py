"""DivFL: clients whose gradients represent everybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import sample_positions
from fedcohort.policies.base import Array, Policy, pick, register, take
from fedcohort.policies.readings import shares, vector_needs, vector_options, vectors
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.table import Signals

_MAX_CLIENTS = 2_000  # that are compared


@register("divfl", when="everybody can send a sketch of its gradient in every round")
class DivFL(Policy):
    """Diverse client selection by facility location, of Balakrishnan et al.

    The cohort minimizes, greedily, the summed distance of each client's gradient, as a random
    projection, to the nearest picked one.

    Parameters
    ----------
    signal : str, default="gradient_sketch"
        Asked of all clients each round. "update_sketch" is each client's last update, which arrives
        anyway (the paper's variant without extra cost). "race_sketch" needs no model.
    weights : {"coverage"}, optional
        "coverage" counts clients by their share of the data in the cost, and weights a picked
        client by the share of those nearest to it. None counts all alike, as the authors' code.

    Notes
    -----
    Source: authors' code melodi-lab/divfl.
    Checked: greedy choices by enumeration.
    Reference: Balakrishnan et al. (2022), Diverse Client Selection, ICLR.

    Of more than 2,000 clients, 2,000 are drawn and represent all. Clients without a sketch get
    places in proportion to their number.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> gradients = {"a": [0.0], "b": [0.2], "c": [0.1], "d": [9.0]}
    >>> sorted(select(DivFL(), "abcd", 2, gradient_sketch=gradients).clients)
    ['b', 'd']
    """

    def __init__(
        self, signal: str = "gradient_sketch", weights: Literal["coverage"] | None = None
    ) -> None:
        self.needs = vector_needs("DivFL", signal, *(["num_examples"] if weights else []))
        self.signal, self.signal_options, self.weights = signal, vector_options(signal), weights

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        return take(round.available, sample_positions(len(round.available), _MAX_CLIENTS, rng))

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        from sklearn.metrics.pairwise import euclidean_distances

        stamps = signals.rounds(self.signal, round.available)
        asked = bool(self.needs.query)
        answered = np.flatnonzero(stamps >= (round.number if asked else 0))
        strangers = np.flatnonzero(stamps < 0) if not asked else np.empty(0, np.int64)
        part = answered[sample_positions(answered.size, _MAX_CLIENTS, rng)]
        clients = take(round.available, part)
        positions, rows = vectors(signals, self.signal, clients)
        if not positions.size:
            return Selection(())
        places = int(np.floor(round.size * strangers.size / len(round.available) + 0.5))
        size = min(round.size - places, positions.size)
        clients = take(clients, positions)
        distances = euclidean_distances(rows - rows.mean(axis=0))  # so similar rows lose no digits
        share = shares(signals, clients) if self.weights else np.ones(len(rows))
        taken = lazy_greedy(distances, size, share)
        new = take(round.available, strangers) if places else ()
        chosen = tuple(clients[i] for i in taken) + pick(new, places, rng)
        if not self.weights or places:
            return Selection(chosen)
        nearest = np.argmin(distances[:, taken], axis=1)
        return Selection(chosen, tuple(np.bincount(nearest, share, len(taken)).tolist()))


def lazy_greedy(distances: Array, size: int, shares: Array | float = 1.0) -> list[int]:
    """Pick candidates (columns), each with the largest decrease of the clients' mean distance.

    A gain computed earlier is an upper bound of the gain now, so most candidates are evaluated once
    (Minoux 1978). The picks are those of plain greedy.
    """
    table, nearest = np.ascontiguousarray(distances.T), distances.max(axis=1)
    gains = np.array([(shares * np.maximum(nearest - row, 0)).sum() for row in table])
    computed = np.zeros(len(table), np.int64)  # how many were picked when a gain was computed
    chosen: list[int] = []
    while len(chosen) < size:
        best = int(gains.argmax())
        if computed[best] < len(chosen):
            gains[best] = (shares * np.maximum(nearest - table[best], 0)).sum()
            computed[best] = len(chosen)
        else:
            chosen.append(best)
            gains[best] = -np.inf
            nearest = np.minimum(nearest, table[best])
    return chosen
