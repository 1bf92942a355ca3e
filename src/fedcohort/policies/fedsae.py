"""FedSAE: a softmax over the last losses."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import draw
from fedcohort.options import NonNegative
from fedcohort.policies.base import register, scored
from fedcohort.policies.readings import LastLossPolicy, LastLossState
from fedcohort.rounds import Round, Selection
from fedcohort.signals.table import Signals


@register("fedsae", when="a baseline that prefers high losses, without extra queries")
class FedSAE(LastLossPolicy):
    """The active selection of Li et al., with which paper 4 compares.

    A client's value is sqrt(n) times the mean loss that it reported when it last trained, and the
    largest one known before. Clients are drawn one by one in proportion to exp(beta * value).

    Parameters
    ----------
    beta : float, default=0.01
        Sharpness of the softmax.

    Notes
    -----
    Source: a public copy of the authors' code, yasar-rehman/FedSAE; only the paper's abstract could
    be had.
    Checked: values and draw by hand.
    Reference: Li et al. (2021), FedSAE: A Self-Adaptive Federated Learning Framework, IJCNN.

    Only the selection, not the work that each client is given. In the code, losses are those of the
    new global model, at first from everybody; here they come with the updates. Once clients have
    trained, the code divides by sqrt(n), which contradicts its start and is not followed. A client
    that finishes without reporting a loss has its value halved each time.
    """

    def __init__(self, beta: NonNegative = 0.01) -> None:
        self.beta = beta
        self.state = LastLossState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        values = self.values(round, signals)
        known = np.isfinite(values)
        values[~known] = values[known].max(initial=0.0)
        at = draw(self.beta * values, round.size, rng)
        return scored(round.available, at, values[at])
