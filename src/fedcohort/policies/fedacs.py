"""FedACS: a dueling bandit that finds the clients of least skew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics import bandits
from fedcohort.policies.base import (
    Policy,
    check_at_least,
    register,
    sizes,
    unreported,
    values_for,
    vectors,
)
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option, update_distance
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_MOST_PER_DUEL = 100  # the exact pool is slow where counts exceed about 1e8
_GROUPS = 20_000  # different (wins, losses) up to which the exact pool takes well below a second


@dataclass
class FedACSState:
    """Duels won and lost, for the clients that had any."""

    wins: dict[ClientId, float] = field(default_factory=dict)
    losses: dict[ClientId, float] = field(default_factory=dict)


@register("fedacs", when="some clients are much more skewed than others and should train less")
class FedACS(Policy):
    """Algorithms 1 and 2 of Wang et al. [1]_.

    A client's reward is minus the distance of its update from the mean update of the cohort. In
    each round the participants duel each other: of a pair with unequal rewards the higher wins.
    The cohort is drawn uniformly from a pool, filled one by one with the client whose fresh draw
    from Beta(wins + 1, losses + 1) is largest.

    Parameters
    ----------
    pool_share : float, default=0.4
        Size of the pool as a share of the available clients, lambda. Smaller values prefer little
        skew more strongly; 1 is uniform selection. The pool is never smaller than the cohort.
    rate : float, default=1.0
        How much one duel counts, eta; at most 100, where one duel nearly decides.
    weighted : bool, default=False
        Take the mean update weighted by size, as unequal sizes need.
    scale_by_size : bool, default=False
        Multiply distances by the root of the client's size, as unequal sizes need (the
        derivation has the size M inside the bound).
    last_layer : bool, default=False
        Look at the last layer only.
    insight_step : bool, default=False
        Take distances between full-batch gradients instead of updates, as the theory assumes and
        the released code does. It costs each client one more pass over its data and one more
        upload of the model's size.
    gradient_sketch : int, default=0
        Above 0, take distances between random projections of the full-batch gradients to this
        many numbers, 4 bytes each, which clients send beside the update.
    insight : bool, default=False
        Without training: clients send a vector of the user's own (signal `insight`) once, and all
        available duel by their distance from its mean.
    seed : int, default=0
        Of the projections; the same for all clients.

    Notes
    -----
    Updates cost nothing more, but say less about skew the longer a run lasts: a client with few
    classes learns them, and its updates become small. Gradients do not have this flaw, and 100
    numbers of them rank clients nearly as well as all. In the paper's own setting, gradients decide
    whether FedACS ends above random cohorts (docs/reproductions.md). Where no client is balanced,
    as with two classes each, they do not help (docs/benchmark.md). And a client can forge what it
    sends beside its update, but not the distance of the update itself.

    Duels are held among those whose distances arrived. A client that finished without one loses a
    duel against each of them, so that it does not pay; one that dropped out does not duel.

    The pool has the exact law of Algorithm 1, fresh draws for every pick, unless the clients have
    more than 20,000 different pairs of wins and losses; then one draw per client decides, see
    `thompson_pool_one_draw`.

    References
    ----------
    .. [1] Wang, Zhu, Wang, Han (2021), FedACS: Federated Skewness Analytics in Heterogeneous
       Decentralized Data Environments, IWQoS.

    Examples
    --------
    >>> policy = FedACS(pool_share=0.5)
    >>> policy.state = FedACSState(wins={"a": 90.0, "b": 80.0}, losses={"c": 90.0, "d": 80.0})
    >>> round = Round(number=9, available=("a", "b", "c", "d"), cohort_size=2)
    >>> sorted(policy.select(round, Signals(), np.random.default_rng(0)).clients)
    ['a', 'b']
    >>> policy.ranks(("a", "b", "c", "d"), np.random.default_rng(0)).mean.round(1).tolist()
    [1.5, 1.5, 3.5, 3.5]
    """

    def __init__(
        self,
        pool_share: float = 0.4,
        rate: float = 1.0,
        weighted: bool = False,
        scale_by_size: bool = False,
        last_layer: bool = False,
        insight_step: bool = False,
        gradient_sketch: int = 0,
        insight: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 < pool_share <= 1:
            raise ValueError(f"FedACS: pool_share={pool_share} must lie in (0, 1]")
        if not 0 < rate <= _MOST_PER_DUEL:
            raise ValueError(f"FedACS: rate={rate} must lie in (0, {_MOST_PER_DUEL}]")
        check_at_least("FedACS", 0, gradient_sketch=gradient_sketch)
        if gradient_sketch and (insight_step or last_layer or insight):
            other = "insight_step" if insight_step else "last_layer" if last_layer else "insight"
            raise ValueError(f"FedACS: gradient_sketch={gradient_sketch} excludes {other}=True")
        self.pool_share, self.rate, self.insight = pool_share, rate, insight
        self.weighted, self.scale_by_size = weighted, scale_by_size
        self.signal = "gradient_sketch" if gradient_sketch else "update_distance"
        options: dict[str, Option]
        if insight:
            self.needs = Needs(profile=frozenset({"insight"}))
        elif gradient_sketch:
            sized = frozenset({"num_examples"} if weighted or scale_by_size else ())
            self.needs = Needs(profile=sized, reply=frozenset({"gradient_sketch"}))
            options = {"k": gradient_sketch, "kind": "sparse", "seed": seed}
            self.signal_options = {"gradient_sketch": options}
        else:
            self.needs = Needs(reply=frozenset({"update_distance"}))
            options = {"weighted": weighted, "scale_by_size": scale_by_size}
            options |= {"last_layer": last_layer, "insight_step": insight_step}
            self.signal_options = {"update_distance": options}
        self.state = FedACSState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Fill the pool (Algorithm 1), then draw the cohort from it."""
        wins, losses = self._standing(round.available, signals)
        wanted = int(np.floor(self.pool_share * len(round.available) + 0.5))
        size = min(max(wanted, round.size), len(round.available))
        dueled = np.count_nonzero(wins + losses)
        groups = np.unique(wins + 1j * losses).size if dueled > _GROUPS else dueled
        fill = bandits.thompson_pool if groups <= _GROUPS else bandits.thompson_pool_one_draw
        pool = fill(wins, losses, size, rng)
        places = rng.choice(len(pool), round.size, replace=False)
        at = [pool[i] for i in places.tolist()]
        mean = (wins + 1) / (wins + losses + 2)
        chosen = tuple(round.available[i] for i in at)
        return Selection(chosen, scores={round.available[i]: float(mean[i]) for i in at})

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Let those whose distance arrived this round duel (Algorithm 2)."""
        if self.insight:
            return
        silent = unreported(round, outcome, signals, self.signal)
        excluded = set(silent)
        clients = tuple(c for c in outcome.finished if c not in excluded)
        for client in silent:
            lost = self.state.losses.get(client, 0.0) + self.rate * len(clients)
            self.state.losses[client] = lost
        if len(clients) < 2:
            return
        rewards = -self._distances(clients, signals)
        zeros = np.zeros(len(clients))
        won, lost = bandits.duel(zeros, zeros, np.arange(len(clients)), rewards, self.rate)
        for client, win, loss in zip(clients, won.tolist(), lost.tolist(), strict=True):
            self.state.wins[client] = self.state.wins.get(client, 0.0) + win
            self.state.losses[client] = self.state.losses.get(client, 0.0) + loss

    def _distances(self, clients: Sequence[ClientId], signals: Signals) -> Array:
        """Return how far each client is from the mean of them all."""
        if self.signal == "update_distance":
            return np.asarray(signals.values(self.signal, clients), np.float64)
        _, rows = vectors(signals, self.signal, clients)
        counts = np.maximum(sizes(signals, clients), 1.0)  # some say that they have no examples
        chosen = {"weighted": self.weighted, "scale_by_size": self.scale_by_size}
        return update_distance(rows, counts, **chosen)

    def ranks(
        self, clients: Sequence[ClientId], rng: Generator, *, level: float = 0.95, draws: int = 1000
    ) -> bandits.RankPosterior:
        """Posterior mean and interval of each client's rank by skew; 1 is the least skewed.

        The analytics view of the bandit: what all duels so far say about the clients.
        """
        wins, losses = self._counts(clients)
        return bandits.rank_posterior(wins, losses, rng, level=level, draws=draws)

    def _standing(self, clients: Sequence[ClientId], signals: Signals) -> tuple[Array, Array]:
        if not self.insight:
            return self._counts(clients)
        positions, rows = vectors(signals, "insight", clients)
        zeros = np.zeros(len(clients))
        if not len(positions):
            return zeros, zeros
        rewards = -np.linalg.norm(rows - rows.mean(axis=0), axis=1)
        return bandits.duel(zeros, zeros, positions, rewards, self.rate)

    def _counts(self, clients: Sequence[ClientId]) -> tuple[Array, Array]:
        return values_for(self.state.wins, clients), values_for(self.state.losses, clients)
