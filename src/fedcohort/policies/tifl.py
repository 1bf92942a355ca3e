"""TiFL: cohorts of clients of one speed, from the tier that needs training most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.options import Count
from fedcohort.policies.base import Policy, pick, register, take
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class TiFLState:
    """Credits and chances of the tiers, the last tier, and mean losses when chances were set."""

    credits: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    tier: int = -1
    before: list[float] = field(default_factory=list)


@register("tifl", when="clients differ much in speed, and a round should wait for nobody")
class TiFL(Policy):
    """The adaptive tier selection of Chai et al.

    Clients are sorted by their durations and divided into tiers of equal size. Each round a tier is
    drawn, and the cohort uniformly in it. Every `interval` rounds, if the tier drawn last has not
    become better since, chances are set anew: of n tiers with credits, that with the k-th lowest
    accuracy gets (n - k + 1) / (n (n + 1) / 2). A tier pays one credit per round.

    Parameters
    ----------
    tiers : int, default=5
        Number of tiers; fewer where a tier would be smaller than the cohort.
    interval : int, default=20
        Rounds between two looks at the accuracies.
    rounds : int, default=200
        Rounds of the run; each tier gets its share of them, rounded up, as credits.

    Notes
    -----
    Source: paper's abstract and two reimplementations (bacox/fltk, FLGo); no authors' code.
    Checked: tiers, chances and credits by hand.
    Reference: Chai et al. (2020), TiFL: A Tier-based Federated Learning System, HPDC.

    The reimplementations set chances anew at every look. Chosen here: the accuracy of a tier is
    minus the mean loss that its members last reported; clients never timed come first.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> seconds = {"a": 9.0, "b": 1.0, "c": 8.0, "d": 2.0}
    >>> set(select(TiFL(tiers=2), "abcd", 2, duration=seconds).clients) in ({*"ac"}, {*"bd"})
    True
    """

    needs = Needs(reply=frozenset({"loss", "duration"}))

    def __init__(self, tiers: Count = 5, interval: Count = 20, rounds: Count = 200) -> None:
        self.tiers, self.interval, self.rounds = tiers, interval, rounds
        self.state = TiFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Time everybody once; then draw a tier, and the cohort in it."""
        positions, seconds = signals.read("duration", round.available)
        untimed = np.setdiff1d(np.arange(len(round.available)), positions)
        if untimed.size:
            self.state.tier = -1
            first = pick(take(round.available, untimed), round.size, rng)
            others = take(round.available, positions)
            return Selection(first + pick(others, round.size - len(first), rng))
        count = max(min(self.tiers, seconds.size // round.size), 1)
        tiers = np.array_split(np.argsort(seconds, kind="stable"), count)  # the fastest first
        losses = [signals.read("loss", take(round.available, tier))[1] for tier in tiers]
        self._settle(round, [float(loss.mean()) if len(loss) else 0.0 for loss in losses])
        state = self.state
        chances = np.array(state.chances) * (np.array(state.credits) > 0)
        state.tier = int(rng.choice(len(tiers), p=chances / chances.sum()))
        state.credits[state.tier] -= 1
        members = take(round.available, tiers[state.tier])
        return Selection(pick(members, round.size, rng))

    def _settle(self, round: Round, losses: list[float]) -> None:
        """Renew credits that are spent, and chances where the last tier has not become better."""
        state, count = self.state, len(losses)
        if len(state.chances) != count:
            state.chances, state.before, state.tier = [1 / count] * count, losses, -1
            state.credits = []
        if not any(state.credits):
            state.credits = [-(-self.rounds // count)] * count
        if round.number % self.interval == 0 and round.number:
            if state.tier >= 0 and losses[state.tier] >= state.before[state.tier]:
                state.chances = tier_chances(losses, state.credits)
            state.before = losses
        if not any(p and c for p, c in zip(state.chances, state.credits, strict=True)):
            state.chances = tier_chances(losses, state.credits)


def tier_chances(losses: list[float], credits: list[int]) -> list[float]:
    """Return each tier's chance: the worst with credits gets n parts, the next n - 1, and so on."""
    able = [t for t in range(len(losses)) if credits[t] > 0]
    worst_first = sorted(able, key=lambda t: -losses[t])
    parts, chances = len(able) * (len(able) + 1) / 2, [0.0] * len(losses)
    for place, tier in enumerate(worst_first):
        chances[tier] = (len(able) - place) / parts
    return chances
