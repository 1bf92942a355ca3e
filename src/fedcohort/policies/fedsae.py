"""FedSAE's client selection: a softmax over losses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.options import NonNegative
from fedcohort.policies.base import Policy, halve, pick, register, values_for
from fedcohort.policies.readings import by_report, sizes
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class FedSAEState:
    """The value of each client that finished at least once."""

    value: dict[ClientId, float] = field(default_factory=dict)


@register("fedsae", when="a baseline that prefers high losses, without extra queries")
class FedSAE(Policy):
    """The active selection of Li et al., with which paper 4 compares.

    A client's value is sqrt(n) times the mean loss that it reported when it last trained. Clients
    are drawn one by one in proportion to exp(beta * value). A client that never finished has the
    largest value known.

    Parameters
    ----------
    beta : float, default=0.01
        Sharpness of the softmax.

    Notes
    -----
    Source: a public copy of the code, yasar-rehman/FedSAE; the paper's text could not be had.
    Checked: values and law by hand and by frequencies.
    Reference: Li et al. (2021), FedSAE: A Self-Adaptive Federated Learning Framework, IJCNN.

    Only the selection; FedSAE also predicts how much work each client can finish. In the code,
    losses are those of the new global model, at first from everybody; here they come with the
    updates. After training the code divides by sqrt(n), which contradicts its start and is not
    followed. A client that finishes and reports no loss has its value halved.
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss"}))

    def __init__(self, beta: NonNegative = 0.01) -> None:
        self.beta = beta
        self.state = FedSAEState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw in proportion to exp(beta * value)."""
        value = self.state.value
        largest = max(value.values(), default=0.0)
        values = values_for(value, round.available, largest)
        chosen = pick(round.available, round.size, rng, self.beta * values)
        return Selection(chosen, scores={c: value[c] for c in chosen if c in value})

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Take the losses that arrived; halve the values of those who sent none."""
        reported, missing = by_report(round, outcome, signals, "loss")
        if reported:
            size = dict(zip(round.available, sizes(signals, round.available), strict=True))
            losses = signals.values("loss", reported).astype(np.float64)
            values = (float(np.sqrt(size[c]) * x) for c, x in zip(reported, losses, strict=True))
            self.state.value.update(zip(reported, values, strict=True))
        halve(self.state.value, missing)
