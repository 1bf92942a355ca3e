"""DELTA: unbiased sampling of clients whose updates differ from the mean."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import Policy, inverse_inclusion, register, sizes
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_LARGEST_DISTANCE = 10.0  # times the median; larger ones are clipped


@register("delta", when="the aggregate must stay unbiased, and updates may be compared")
class DELTA(Policy):
    """The practical variant of Wang et al. [1]_, with the diversity term.

    The paper's optimal probability of a client is proportional to
    ``sqrt(alpha_1 zeta^2 + alpha_2 sigma^2)``: zeta is the distance of its gradient from the mean
    gradient, sigma the spread of its batch gradients. Here zeta is the distance of its last update
    from the mean update of that cohort, which costs nothing; a client without one counts like the
    mean of the others. Weights are the client's share of the data over its probability to be
    selected, so the expected aggregate is that of all available clients.

    Parameters
    ----------
    exploration : float, default=0.1
        Share of the probability that is spread uniformly, which bounds the weights.

    Notes
    -----
    The local term alpha_2 sigma^2 is left out: clients do not report the spread of their batch
    gradients. With equal batches and similar losses it is nearly the same for all clients. The
    paper draws with replacement; here inclusion probabilities are exactly proportional (up to 1)
    without replacement, by systematic sampling in random order. Distances above 10 times the
    median are clipped, so that an outlier cannot force its way into every cohort.

    References
    ----------
    .. [1] Wang, Guo, Lin, Tang (2023), DELTA: Diverse Client Sampling for Fasting Federated
       Learning, NeurIPS.

    Examples
    --------
    >>> signals = Signals()
    >>> _ = signals.record("update_distance", {"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0}, stamp=0)
    >>> round = Round(number=1, available=("a", "b", "c", "d"), cohort_size=2)
    >>> policy = DELTA(exploration=0.0)
    >>> selection = policy.select(round, signals, np.random.default_rng(0))
    >>> selection.clients[0], round.size, selection.weights     # "a": always; the others: 1/3
    ('a', 2, (0.25, 0.75))
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"update_distance"}))

    def __init__(self, exploration: float = 0.1) -> None:
        if not 0 <= exploration <= 1:
            raise ValueError(f"DELTA: exploration={exploration} must lie in [0, 1]")
        self.exploration = exploration

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw by the distances of the last updates."""
        inclusion = proportional_inclusion(self._probabilities(round, signals), round.size)
        chosen = systematic(inclusion, rng)
        clients = tuple(round.available[i] for i in chosen.tolist())
        share = sizes(signals, round.available)
        share = share / share.sum() if share.any() else np.full(share.size, 1 / share.size)
        weights = inverse_inclusion(share[chosen], inclusion[chosen])
        if not sum(weights) > 0:
            return Selection(clients)
        scores = dict(zip(clients, inclusion[chosen].tolist(), strict=True))
        return Selection(clients, weights, scores)

    def _probabilities(self, round: Round, signals: Signals) -> Array:
        positions, known = signals.read("update_distance", round.available)
        count = len(round.available)
        if not len(positions) or not known.any():
            return np.full(count, 1 / count)
        known = np.minimum(known, _LARGEST_DISTANCE * max(float(np.median(known)), 1e-300))
        distances = np.full(count, float(known.mean()))
        distances[positions] = known
        total = distances.sum()
        spread = distances / total if total > 0 else np.full(count, 1 / count)
        return (1 - self.exploration) * spread + self.exploration / count


def proportional_inclusion(probabilities: Array, size: int) -> Array:
    """Return inclusion probabilities that sum to `size`, proportional except for those cut at 1.

    Examples
    --------
    >>> proportional_inclusion(np.array([0.5, 0.25, 0.25]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    inclusion = np.zeros(probabilities.size)
    left = np.ones(probabilities.size, bool)
    while True:
        total = probabilities[left].sum()
        places = size - int((~left).sum())
        share = probabilities[left] / total if total > 0 else np.full(left.sum(), 1 / left.sum())
        inclusion[left] = places * share
        over = left & (inclusion >= 1 - 1e-12)
        if not over.any():
            return inclusion
        inclusion[over] = 1.0
        left &= ~over
        if not left.any():
            return inclusion


def systematic(inclusion: Array, rng: Generator) -> NDArray[np.int64]:
    """Draw a set of fixed size with these inclusion probabilities, which sum to a whole number."""
    always = np.flatnonzero(inclusion >= 1)
    others = rng.permutation(np.flatnonzero(inclusion < 1))
    places = round(float(inclusion[others].sum()))
    if not places:
        return always
    ends = np.cumsum(inclusion[others])
    ends *= places / ends[-1]
    marks = rng.random() + np.arange(places)
    hits = np.minimum(np.searchsorted(ends, marks, side="right"), others.size - 1)
    return np.concatenate([always, others[hits]])
