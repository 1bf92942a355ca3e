"""Bounds on participation, around any policy: no client takes much more or less than its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Annotated, Any

import numpy as np
from numpy.random import Generator

from fedcohort.options import Range, Share, typed
from fedcohort.policies.base import Array, Indices, Policy, count_up, take, values_for
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.table import Signals

_ROUNDING = 1e-9  # places above the cap that rounding can cause


@dataclass
class BoundedState:
    """Places taken and due under uniform selection, by client; places that newcomers may take."""

    taken: dict[ClientId, int] = field(default_factory=dict)
    due: dict[ClientId, float] = field(default_factory=dict)
    newcomers: float = 0.0
    founders: list[ClientId] = field(default_factory=list)  # of the first round: no newcomers


class Bounded(Policy):
    """Another policy's cohorts, with every client's participation within bounds.

    A client's fair share is cohort size / available clients, summed over the rounds in which it was
    available. Above `cap` times it, a client cannot be selected; a whole place behind `floor` times
    it, a client is selected first. Newcomers to whom not even one place is due under the cap
    together take at most `cap` times their fair share, so that a new name each round gains nothing;
    the rule rests while they are the majority.

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
    Source: ours.
    Checked: shares exactly, against greedy, starving and renamed clients.

    The first place is free. If too few clients are within bounds to fill a cohort, those that
    exceed theirs by the least are allowed. The bound holds for names that cannot be chosen freely:
    registered names, or keys.
    """

    def __init__(
        self, policy: Policy, floor: Share = 0.25, cap: Annotated[float, Range(1)] = 2.0
    ) -> None:
        typed(Policy, policy, "Bounded: policy")
        self.policy, self.floor, self.cap = policy, floor, cap
        self.needs, self.signal_options = policy.needs, policy.signal_options
        self.profile_first = policy.profile_first
        self.state = BoundedState()

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        inner = self._open(round, *self._counts(round), without=np.empty(0, np.int64))
        return self.policy.candidates(inner, signals, rng)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Take the clients that are behind, then let the inner policy fill the cohort."""
        taken, due = self._counts(round)
        lacking = self.floor * due - taken
        late = np.flatnonzero(lacking >= 1)
        late = late[np.argsort(-lacking[late], kind="stable")][: round.size]
        behind = take(round.available, late)
        inner = self._open(round, taken, due, without=late)
        chosen = self.policy.select(inner, signals, rng) if inner.size else Selection(())
        return replace(chosen, clients=behind + chosen.clients, weights=None) if behind else chosen

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count places, and let the inner policy learn."""
        state, fair = self.state, round.size / len(round.available)
        due = values_for(state.due, round.available)
        if not state.due:
            state.founders = list(round.available)
        new = self._are_new(round.available, due)
        names = {c for c, is_new in zip(round.available, new.tolist(), strict=True) if is_new}
        income = self.cap * fair * len(names)
        state.newcomers -= len(names.intersection(outcome.selected))
        state.newcomers = min(state.newcomers + income, max(income, 1.0))
        state.due.update(zip(round.available, (due + fair).tolist(), strict=True))
        count_up(state.taken, outcome.selected)
        self.policy.observe(round, outcome, signals)

    def _counts(self, round: Round) -> tuple[Array, Array]:
        state, clients = self.state, round.available
        return values_for(state.taken, clients), values_for(state.due, clients)

    def _are_new(self, clients: Sequence[ClientId], due: Array) -> Any:
        founders = set(self.state.founders if self.state.due else clients)
        joined = np.array([client not in founders for client in clients])
        return joined & (self.cap * due < 1 - _ROUNDING)

    def _open(self, round: Round, taken: Array, due: Array, *, without: Indices) -> Round:
        """Return the round as the inner policy sees it: the clients within bounds."""
        size, excess = round.size - without.size, taken - self.cap * due
        new = np.flatnonzero(self._are_new(round.available, due))
        if 2 * new.size <= len(round.available):  # those who waited longest may take what is due
            longest = new[np.argsort(-due[new], kind="stable")]
            excess[longest[max(int(self.state.newcomers), 0) :]] = 1.0
        excess[without] = np.inf
        within = excess <= _ROUNDING
        if np.count_nonzero(within) < size:
            within[np.argsort(excess, kind="stable")[:size]] = True
        return replace(
            round, available=tuple(compress(round.available, within.tolist())), cohort_size=size
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["inner"])
        super().load_state_dict({k: v for k, v in state.items() if k != "inner"})
