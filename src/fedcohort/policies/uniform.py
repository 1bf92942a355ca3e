"""Uniform random selection, as in FedAvg."""

from __future__ import annotations

from numpy.random import Generator

from fedcohort.policies.base import Policy, pick, register
from fedcohort.rounds import Round, Selection
from fedcohort.signals.table import Signals


@register("uniform", when="the baseline; needs nothing and treats all clients alike")
class Uniform(Policy):
    """Every available client is equally likely, without replacement.

    The selection of FedAvg [1]_ and the baseline of everything else.

    Examples
    --------
    >>> import numpy as np
    >>> round = Round(number=0, available=("a", "b", "c"), cohort_size=2)
    >>> Uniform().select(round, Signals(), np.random.default_rng(0)).clients
    ('b', 'c')

    References
    ----------
    .. [1] McMahan et al. (2017), Communication-Efficient Learning of Deep Networks from
       Decentralized Data, AISTATS.
    """

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw the cohort."""
        return Selection(pick(round.available, round.size, rng))
