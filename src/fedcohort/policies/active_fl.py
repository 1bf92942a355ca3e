"""Active FL: sampling by the last reported loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.random import Generator

from fedcohort.options import Positive, Share
from fedcohort.policies.base import Array, pick, register
from fedcohort.policies.readings import LastLossPolicy, LastLossState
from fedcohort.rounds import Round, Selection
from fedcohort.signals.table import Signals


@register("active-fl", when="losses arrive with the updates and no extra query is allowed")
class ActiveFL(LastLossPolicy):
    """Algorithm 1 of Goetz et al.

    A client's value is sqrt(n) times the last loss it reported, plus infinity before the first. The
    alpha1 share of the clients with the lowest values gets probability zero, the others one in
    proportion to ``exp(alpha2 value)``. (1 - alpha3) of the cohort is drawn from that, the rest
    uniformly.

    Parameters
    ----------
    alpha1 : float, default=0.75
        Share of the clients whose probability is set to zero.
    alpha2 : float, default=0.01
        Softness of the softmax.
    alpha3 : float, default=0.1
        Share of the cohort that is drawn uniformly, on average over rounds.
    everybody : bool, default=False
        Ask each client for its loss when it is first seen, so that all losses are known at the
        start. Otherwise a loss comes only with an update, and the untried are selected first.

    Notes
    -----
    Source: FedCor's released code and three reimplementations; neither the paper's text nor its
    authors' code could be had.
    Checked: values, law and shares by hand and by frequencies.
    Reference: Goetz, Malik, Bui, Moon, Liu, Kumar (2019), Active Federated Learning.

    The code rounds (1 - alpha3) of the cohort down; one reimplementation drops 1 - alpha1. Added
    here: a client that finishes without reporting a loss has its value halved each time.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sizes, losses = {"a": 100, "b": 100}, {"a": 0.1, "b": 9.0}
    >>> policy = ActiveFL(alpha1=0.5, alpha3=0)
    >>> select(policy, "ab", 1, loss=losses, num_examples=sizes).clients
    ('b',)
    """

    def __init__(
        self,
        alpha1: Share = 0.75,
        alpha2: Positive = 0.01,
        alpha3: Share = 0.1,
        everybody: bool = False,
    ) -> None:
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3
        if everybody:
            self.needs = replace(self.needs, profile=self.needs.profile | {"loss"})
        self.state = LastLossState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        values = self.values(round, signals)
        by_value = round.size - int(np.floor(self.alpha3 * round.size + rng.random()))
        first = pick(round.available, by_value, rng, self._logits(values, by_value))
        taken = set(first)
        rest = [client for client in round.available if client not in taken]
        chosen = first + pick(rest, round.size - len(first), rng)
        value_of = dict(zip(round.available, values.tolist(), strict=True))
        scores = {c: value_of[c] for c in chosen if np.isfinite(value_of[c])}
        return Selection(chosen, scores=scores)

    def _logits(self, values: Array, size: int) -> Array:
        """Zero out the lowest values; clients without a value come before all others."""
        zeroed = min(int(np.floor(self.alpha1 * len(values))), len(values) - size)
        reported = np.isfinite(values)
        logits = self.alpha2 * np.where(reported, values, 0.0)
        # Infinite logits would make ties; 1e3 above all others has the same effect.
        logits[~reported] = (logits[reported].max() if reported.any() else 0.0) + 1e3
        logits[np.argsort(values, kind="stable")[:zeroed]] = -np.inf
        return logits
