"""Uniform random selection, as in FedAvg."""

from __future__ import annotations

from dataclasses import dataclass, field

from numpy.random import Generator

from fedcohort.options import Count
from fedcohort.policies.base import Policy, pick, register
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.table import Signals


@dataclass
class UniformState:
    """The cohort that is kept, and the round in which it was drawn."""

    cohort: list[ClientId] = field(default_factory=list)
    drawn: int = -1


@register("uniform", when="the baseline; needs nothing and treats all clients alike")
class Uniform(Policy):
    """Every available client is equally likely: the selection of FedAvg.

    Parameters
    ----------
    interval : int, default=1
        Keep a cohort for this many rounds, as the random selection that Sketch-to-Select is
        compared with. A member that is away is replaced by a random client.

    Notes
    -----
    Source: paper.
    Checked: frequencies, and kept cohorts by hand.
    Reference: McMahan et al. (2017), Communication-Efficient Learning, AISTATS.
    """

    def __init__(self, interval: Count = 1) -> None:
        self.interval = interval
        if interval > 1:
            self.state = UniformState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        state = self.state
        if state is None:
            return Selection(pick(round.available, round.size, rng))
        if state.drawn < 0 or round.number - state.drawn >= self.interval:
            state.cohort, state.drawn = [], round.number
        available = set(round.available)
        kept = tuple(c for c in state.cohort if c in available)[: round.size]
        others = sorted(available.difference(kept))
        cohort = kept + pick(others, round.size - len(kept), rng)
        state.cohort = list(cohort)
        return Selection(cohort)
