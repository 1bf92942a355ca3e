"""Bounds on participation, around any policy: no client takes much more or less than its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import Policy, values_for
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_ROUNDING = 1e-9  # places above the cap that rounding can cause


@dataclass
class BoundedState:
    """Places taken, and places due under uniform selection, by client."""

    taken: dict[ClientId, int] = field(default_factory=dict)
    due: dict[ClientId, float] = field(default_factory=dict)


class Bounded(Policy):
    """Another policy's cohorts, with every client's participation within bounds.

    A client's fair share is cohort size / available clients, summed over the rounds in which it
    was available. A client that has taken more than `cap` times its fair share cannot be selected;
    one that is a whole place behind `floor` times its fair share is selected first. So a client
    that lies to a policy gains at most a factor of `cap`, and one that a policy never selects is
    heard from time to time.

    Parameters
    ----------
    policy : Policy
        Selects among the clients that are within bounds.
    floor : float, default=0.25
        Least participation, relative to the fair share; 0 for no lower bound.
    cap : float, default=2.0
        Largest participation, relative to the fair share, at least 1.

    Notes
    -----
    After T rounds with N clients always available and cohorts of m, a client has taken at most
    cap * T * m / N + 1 places: the first one is free. If too few clients are within bounds to fill
    a cohort, those that exceeded their bounds by the least are allowed. The benchmark
    benchmarks/forgery.py measures what liars gain with and without bounds, and what bounds cost.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcohort.session import Session
    >>> class First(Policy):
    ...     def select(self, round, signals, rng):
    ...         return Selection(round.available[: round.size])
    >>> session = Session(Bounded(First(), floor=0.0, cap=2.0), cohort_size=1, seed=0)
    >>> def cohort():
    ...     chosen = session.begin("abcd", lambda signal, clients: {}).clients
    ...     session.finish({}, chosen)
    ...     return chosen[0]
    >>> "".join(cohort() for _ in range(8))
    'abababab'
    """

    def __init__(self, policy: Policy, floor: float = 0.25, cap: float = 2.0) -> None:
        if not isinstance(policy, Policy):
            raise ValueError(f"Bounded: policy={policy!r} must be a policy")
        if not 0 <= floor <= 1 <= cap:
            raise ValueError(f"Bounded: floor={floor} and cap={cap} must be 0 <= floor <= 1 <= cap")
        self.policy, self.floor, self.cap = policy, floor, cap
        self.needs, self.signal_options = policy.needs, policy.signal_options
        self.state = BoundedState()

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask whom the inner policy asks among the clients within bounds."""
        if not self.needs.query:
            return ()
        inner = self._open(round, *self._counts(round), without=np.empty(0, np.int64))
        return self.policy.candidates(inner, signals, rng)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Take the clients that are behind, then let the inner policy fill the cohort."""
        taken, due = self._counts(round)
        late = self._behind(round, taken, due)
        behind = tuple(round.available[i] for i in late.tolist())
        inner = self._open(round, taken, due, without=late)
        if not inner.size:
            return Selection(behind)
        chosen = self.policy.select(inner, signals, rng)
        if not behind:
            return chosen
        return Selection(behind + chosen.clients, None, chosen.scores)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count places, and let the inner policy learn."""
        state, fair = self.state, round.size / len(round.available)
        due = values_for(state.due, round.available) + fair
        state.due.update(zip(round.available, due.tolist(), strict=True))
        for client in outcome.selected:
            state.taken[client] = state.taken.get(client, 0) + 1
        self.policy.observe(round, outcome, signals)

    def _counts(self, round: Round) -> tuple[Array, Array]:
        """Return the places that each available client has taken, and those due."""
        return values_for(self.state.taken, round.available), values_for(
            self.state.due, round.available
        )

    def _behind(self, round: Round, taken: Array, due: Array) -> Indices:
        """Return the positions of clients a place behind the floor, the furthest behind first."""
        if not self.floor:
            return np.empty(0, np.int64)
        lacking = self.floor * due - taken
        late = np.flatnonzero(lacking >= 1)
        return late[np.argsort(-lacking[late], kind="stable")][: round.size]

    def _open(self, round: Round, taken: Array, due: Array, *, without: Indices) -> Round:
        """Return the round as the inner policy sees it: the clients within bounds."""
        size, excess = round.size - without.size, taken - self.cap * due
        excess[without] = np.inf
        within = excess <= _ROUNDING
        if np.count_nonzero(within) < size:
            within[np.argsort(excess, kind="stable")[:size]] = True
        return replace(
            round, available=tuple(compress(round.available, within.tolist())), cohort_size=size
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the inner policy's state."""
        return {**super().state_dict(), "inner": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.policy.load_state_dict(state["inner"])
        super().load_state_dict({k: v for k, v in state.items() if k != "inner"})
