"""REFL: clients that will soon be away come first, and nobody comes again at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.random import Generator

from fedcohort.options import Range
from fedcohort.policies.base import Policy, count_up, register, scored, values_for
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.table import Signals


@dataclass
class REFLState:
    """Since when those of the last round are there, and how often clients left after how long."""

    since: dict[ClientId, int] = field(default_factory=dict)
    rounds: dict[ClientId, int] = field(default_factory=dict)
    departures: dict[ClientId, int] = field(default_factory=dict)
    last: dict[ClientId, int] = field(default_factory=dict)


@register("refl", when="devices come and go, and rare ones must be heard while they are there")
class REFL(Policy):
    """The selection of Abdelmoniem et al., resource-efficient federated learning.

    The clients least likely to be available in the next round come first. A client that was picked
    is not picked again for `rest` rounds, unless too few others are there.

    Parameters
    ----------
    rest : int, default=5
        Rounds from one pick of a client to its next.

    Notes
    -----
    Source: authors' code ahmedcs/REFL.
    Checked: order and rests by hand.
    Reference: Abdelmoniem et al. (2023), REFL: Resource-Efficient Federated Learning, EuroSys.

    The code reads from a trace whether a client is away in the next window. Here that is learned: a
    client leaves with probability (departures + 1) / (rounds seen + 2). REFL's late updates are
    ``Pace(late="next", staleness=1, deviation=0.35)``.

    Examples
    --------
    >>> policy = REFL()
    >>> for number, here in enumerate(["ab", "a", "ab", "a", "ab"]):
    ...     round = Round(number=number, available=tuple(here), cohort_size=1)
    ...     selection = policy.select(round, Signals(), np.random.default_rng(0))
    >>> selection.clients
    ('b',)
    """

    def __init__(self, rest: Annotated[int, Range(0, 10**9)] = 5) -> None:
        self.rest = rest
        self.state = REFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        self._notice(round)
        state, clients = self.state, round.available
        seen = values_for(state.rounds, clients) + round.number - values_for(state.since, clients)
        leaving = (values_for(state.departures, clients) + 1) / (seen + 2)
        waited = round.number - values_for(state.last, clients, -np.inf)
        order = np.lexsort((rng.random(leaving.size), -leaving, waited < self.rest))[: round.size]
        return scored(clients, order, leaving[order])

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        self.state.last.update(dict.fromkeys(outcome.selected, round.number))

    def _notice(self, round: Round) -> None:
        """Count who left since the last round, and note who came."""
        state = self.state
        gone = sorted(state.since.keys() - set(round.available))
        count_up(state.departures, gone)
        for client in gone:
            stayed = round.number - state.since.pop(client)
            state.rounds[client] = state.rounds.get(client, 0) + stayed
        state.since = dict.fromkeys(round.available, round.number) | state.since
