"""FedACS: a dueling bandit that finds the clients of least skew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.random import Generator

from fedcohort.options import PositiveShare, Range
from fedcohort.policies.base import Array, Policy, register, scored, take, values_for
from fedcohort.policies.readings import PROJECTION, by_report, vectors
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option, update_distance
from fedcohort.signals.table import Signals

if TYPE_CHECKING:
    from fedcohort.numerics.bandits import RankPosterior

_GROUPS = 20_000  # different (wins, losses) up to which the exact pool takes well below a second
_LENGTH = 100  # numbers of a gradient sketch


@dataclass
class FedACSState:
    """Duels won and lost, for the clients that had any."""

    wins: dict[ClientId, float] = field(default_factory=dict)
    losses: dict[ClientId, float] = field(default_factory=dict)


@register("fedacs", when="some clients are much more skewed than others and should train less")
class FedACS(Policy):
    """Algorithms 1 and 2 of Wang et al.

    The participants of a round duel each other: of each pair, the one wins whose update is nearer
    the mean update of the cohort. The cohort is drawn uniformly from a pool, filled one by one with
    the client whose fresh draw from Beta(wins + 1, losses + 1) is largest.

    Parameters
    ----------
    pool_share : float, default=0.4
        Size of the pool as a share of the available clients, lambda, but at least the cohort's.
        Smaller values prefer little skew more strongly; 1 is uniform selection.
    rate : float, default=1.0
        How much one duel counts, eta; at most 100, where one duel nearly decides.
    reward : {"updates", "gradients", "gradient-sketch", "insight"}
        What distances are taken between: updates, which cost nothing; full-batch gradients, as the
        theory assumes and the released code does, at the price of one more pass and upload each;
        projections of those to 100 numbers; or, without any training, vectors of the user's own
        (signal `insight`, sent once), by which all available clients duel.
    memory : float, default=1.0
        Factor by which earlier duels count less after each round; below 1, FedACS notices that
        clients' data changed. The paper forgets nothing.

    Notes
    -----
    Source: paper, and the authors' released code for "gradients".
    Checked: duels by hand, the pool's law by quadrature and frequencies, ranks exactly.
    Reference: Wang et al. (2021), FedACS: Federated Skewness Analytics, IWQoS.

    A client that finished without a distance loses a duel against each of the others; one that
    dropped out does not duel. With more than 20,000 different standings, the pool is filled by one
    draw per client.
    """

    def __init__(
        self,
        pool_share: PositiveShare = 0.4,
        rate: Annotated[float, Range(0, 100, above=True)] = 1.0,
        reward: Literal["updates", "gradients", "gradient-sketch", "insight"] = "updates",
        memory: PositiveShare = 1.0,
    ) -> None:
        self.pool_share, self.rate, self.reward, self.memory = pool_share, rate, reward, memory
        self.signal = "gradient_sketch" if reward == "gradient-sketch" else "update_distance"
        if reward == "insight":
            self.needs = Needs(profile=frozenset({"insight"}))
        else:
            self.needs = Needs(reply=frozenset({self.signal}))
            options: Mapping[str, Option] = {"insight_step": reward == "gradients"}
            if reward == "gradient-sketch":
                options = {**PROJECTION, "k": _LENGTH}
            self.signal_options = {self.signal: options}
        self.state = FedACSState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Fill the pool (Algorithm 1), then draw the cohort from it."""
        from fedcohort.numerics.bandits import thompson_pool, thompson_pool_one_draw

        if self.reward == "insight":  # standings are those of one round of duels among all here
            positions, rows = vectors(signals, "insight", round.available)
            if len(positions):
                self.state = FedACSState()
                self._duel(take(round.available, positions), update_distance(rows))
        wins, losses = self._standing(round.available)
        wanted = int(np.floor(self.pool_share * len(round.available) + 0.5))
        size = min(max(wanted, round.size), len(round.available))
        dueled = np.count_nonzero(wins + losses)
        groups = np.unique(wins + 1j * losses).size if dueled > _GROUPS else dueled
        fill = thompson_pool if groups <= _GROUPS else thompson_pool_one_draw
        pool = fill(wins, losses, size, rng)
        at = pool[rng.choice(len(pool), round.size, replace=False)]
        return scored(round.available, at, ((wins + 1) / (wins + losses + 2))[at])

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Let those whose distance arrived this round duel (Algorithm 2)."""
        if self.reward == "insight":
            return
        state = self.state
        if self.memory < 1:
            for table in (state.wins, state.losses):
                table.update({c: count * self.memory for c, count in table.items()})
        clients, silent = by_report(round, outcome, signals, self.signal)
        for client in silent:
            state.losses[client] = state.losses.get(client, 0.0) + self.rate * len(clients)
        if len(clients) < 2:
            return
        _, rows = vectors(signals, self.signal, clients)
        self._duel(
            clients, rows[:, 0] if self.signal == "update_distance" else update_distance(rows)
        )

    def ranks(self, clients: Sequence[ClientId], rng: Generator) -> RankPosterior:
        """Posterior mean and 95 % interval of each client's rank by skew; 1 is the least."""
        from fedcohort.numerics.bandits import rank_posterior

        return rank_posterior(*self._standing(clients), rng)

    def _duel(self, clients: tuple[ClientId, ...], distances: Array) -> None:
        from fedcohort.numerics.bandits import duel

        won, lost = duel(*self._standing(clients), -distances, self.rate)
        self.state.wins.update(zip(clients, won.tolist(), strict=True))
        self.state.losses.update(zip(clients, lost.tolist(), strict=True))

    def _standing(self, clients: Sequence[ClientId]) -> tuple[Array, Array]:
        return values_for(self.state.wins, clients), values_for(self.state.losses, clients)
