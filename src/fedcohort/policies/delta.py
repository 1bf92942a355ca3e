"""DELTA: unbiased sampling of clients whose updates differ from the mean."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import Policy, check_at_least, inverse_inclusion, register, sizes
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_LARGEST_DISTANCE = 10.0  # times the median; larger ones are clipped


@register("delta", when="the aggregate must stay unbiased, and updates may be compared")
class DELTA(Policy):
    """The practical variant of Wang et al. [1]_.

    The paper's optimal probability of a client is proportional to
    ``sqrt(alpha_1 zeta^2 + alpha_2 sigma^2)``: zeta is the distance of its gradient from the mean
    gradient, sigma the spread of its batch gradients. By default alpha_2 is 0, and zeta is the
    distance of its last update from the mean update of that cohort, which costs nothing. A client
    without a reading counts like the mean of the others. Weights are the client's share of the
    data over its probability to be selected, so the expected aggregate is that of all available
    clients.

    Parameters
    ----------
    exploration : float, default=0.1
        Share of the probability that is spread uniformly, which bounds the weights.
    local_variance : float, default=0.0
        alpha_2 / alpha_1. Above 0, those who trained also report the spread of the gradients of
        their batches, and zeta is taken from full-batch gradients, because both must have the same
        unit. That is one more pass over the data per batch and works in simulations only.

    Notes
    -----
    Read: the abstract, the authors' released code (L3030/DELTA_FL), which weights clients by the
    norm of their gradient's difference and has no sigma, and a public reimplementation, whose
    probabilities are those above with alpha_1 and alpha_2 as options and sigma as the root mean
    square distance of batch gradients to their mean. Chosen here: the paper draws with
    replacement, we draw without, with inclusion probabilities that are exactly proportional (up to
    1), by systematic sampling in random order. Readings above 10 times their median are clipped,
    so that an outlier cannot force its way into every cohort.

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

    def __init__(self, exploration: float = 0.1, local_variance: float = 0.0) -> None:
        if not 0 <= exploration <= 1:
            raise ValueError(f"DELTA: exploration={exploration} must lie in [0, 1]")
        check_at_least("DELTA", 0, local_variance=local_variance)
        self.exploration, self.local_variance = exploration, local_variance
        if local_variance:
            reply = frozenset({"update_distance", "gradient_spread"})
            self.needs = Needs(profile=frozenset({"num_examples"}), reply=reply)
            self.signal_options = {"update_distance": {"insight_step": True}}

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw by the last readings."""
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
        count = len(round.available)
        importance = _readings("update_distance", round, signals)
        if self.local_variance:
            spread = _readings("gradient_spread", round, signals)
            importance = np.sqrt(importance**2 + self.local_variance * spread**2)
        total = importance.sum()
        shares = importance / total if total > 0 else np.full(count, 1 / count)
        return (1 - self.exploration) * shares + self.exploration / count


def _readings(name: str, round: Round, signals: Signals) -> Array:
    """Return one clipped reading per available client, the mean of the known where there is none.

    All zeros if none is known.
    """
    positions, known = signals.read(name, round.available)
    if not len(positions):
        return np.zeros(len(round.available))
    known = np.minimum(known, _LARGEST_DISTANCE * max(float(np.median(known)), 1e-300))
    found = np.full(len(round.available), float(known.mean()))
    found[positions] = known
    return found


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
