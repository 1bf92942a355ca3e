"""DELTA: unbiased sampling of clients whose updates differ from the mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import proportional_inclusion, systematic
from fedcohort.options import NonNegative
from fedcohort.policies.base import Array, Policy, register, scored, values_for
from fedcohort.policies.readings import by_report, shares, sizes
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import MAX_SIZE_RATIO

_MAX_DISTANCE = 10.0  # times the median of the cohort; larger ones are clipped
_MIN_PROBABILITY = 0.01  # relative to uniform: nobody is lost forever


@dataclass
class DELTAState:
    """Each client's probability, relative to uniform; 1 for those that never trained."""

    probability: dict[ClientId, float] = field(default_factory=dict)


@register("delta", when="the aggregate must stay unbiased, and updates may be compared")
class DELTA(Policy):
    """The practical variant of Wang et al.

    Probabilities are uniform at first. After each round the members of the cohort divide what they
    hold together anew, in proportion to their share of the data times the distance of their update
    from the mean update. Weights are shares of the data over the probability to be selected, so the
    expected aggregate is that of all available clients.

    Parameters
    ----------
    local_variance : float, default=0.0
        Above 0, the distance becomes sqrt(distance^2 + local_variance * spread^2), spread being
        that of the gradients of a client's batches, and distances are between full gradients:
        alpha_2 / alpha_1 of the paper. Simulations only.

    Notes
    -----
    Source: authors' code L3030/DELTA_FL (`reweight_prac`, beta 1), and the text submitted to ICLR.
    Checked: probabilities by hand, inclusion by frequencies.
    Reference: Wang et al. (2023), DELTA: Diverse Client Sampling, NeurIPS.

    Chosen here: cohorts are drawn systematically in random order, so that inclusion probabilities
    are exactly proportional (up to 1); the code draws one by one and weights by n / (N p). A
    probability is at least a hundredth of the uniform one, a distance at most 10 times the median.
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"update_distance"}))

    def __init__(self, local_variance: NonNegative = 0.0) -> None:
        self.local_variance = local_variance
        if local_variance:
            self.needs = replace(self.needs, reply=self.needs.reply | {"gradient_spread"})
            self.signal_options = {"update_distance": {"insight_step": True}}
        self.state = DELTAState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        probability = values_for(self.state.probability, round.available, 1.0)
        inclusion = proportional_inclusion(probability, round.size)
        chosen = systematic(inclusion, rng)
        weights = inverse_inclusion(shares(signals, round.available)[chosen], inclusion[chosen])
        return scored(round.available, chosen, inclusion[chosen], weights if any(weights) else None)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        cohort, _ = by_report(round, outcome, signals, "update_distance")
        if not cohort:
            return
        distance = _clipped(signals.values("update_distance", cohort))
        if self.local_variance:
            positions, spread = signals.read("gradient_spread", cohort)
            squares = np.zeros(len(cohort))
            squares[positions] = _clipped(spread) ** 2
            distance = np.sqrt(distance**2 + self.local_variance * squares)
        importance = sizes(signals, cohort) * distance
        if not importance.sum() > 0:
            return
        before = values_for(self.state.probability, cohort, 1.0)
        after = np.maximum(importance / importance.sum() * before.sum(), _MIN_PROBABILITY)
        self.state.probability.update(zip(cohort, after.tolist(), strict=True))


def _clipped(values: Array) -> Array:
    if not len(values):
        return values
    return np.minimum(values, _MAX_DISTANCE * max(float(np.median(values)), 1e-300))


def inverse_inclusion(share: Array, inclusion: Array) -> tuple[float, ...]:
    """Return the Horvitz-Thompson weights p_i / pi_i: the expected aggregate is sum p_i x_i.

    A weight is at most `MAX_SIZE_RATIO` times the mean weight 1 / size, so that one client that was
    picked against all odds cannot multiply the model.
    """
    most = MAX_SIZE_RATIO / max(len(share), 1)
    return tuple(np.minimum(share / inclusion, most).tolist())
