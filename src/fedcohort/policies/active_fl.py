"""Active FL and FedSAE: sampling by the last reported loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.options import NonNegative, Positive, Share
from fedcohort.policies.base import Array, Policy, count_up, halve, pick, register, values_for
from fedcohort.policies.readings import by_report, sizes
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class ActiveFLState:
    """How often in a row each client finished without reporting a loss."""

    failures: dict[ClientId, int] = field(default_factory=dict)


@register("active-fl", when="losses arrive with the updates and no extra query is allowed")
class ActiveFL(Policy):
    """Algorithm 1 of Goetz et al.

    A client's value is sqrt(n) times the loss it reported when it last trained, plus infinity until
    then (the paper starts from one round in which all report). The alpha1 share of the clients with
    the lowest values gets probability zero, the others exp(alpha2 * value). (1 - alpha3) of the
    cohort is drawn from that, the rest uniformly.

    Parameters
    ----------
    alpha1 : float, default=0.75
        Share of the clients whose probability is set to zero.
    alpha2 : float, default=0.01
        Softness of the softmax.
    alpha3 : float, default=0.1
        Share of the cohort that is drawn uniformly, on average over rounds.

    Notes
    -----
    Source: paper; authors' code could not be had.
    Checked: values, law and shares by hand and by frequencies.
    Reference: Goetz, Malik, Bui, Moon, Liu, Kumar (2019), Active Federated Learning.

    Added here: a client that finishes without reporting a loss has its value halved each time (the
    median of all others if it never reported).

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sizes, losses = {"a": 100, "b": 100}, {"a": 0.1, "b": 9.0}
    >>> policy = ActiveFL(alpha1=0.5, alpha3=0)
    >>> select(policy, "ab", 1, loss=losses, num_examples=sizes).clients
    ('b',)
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss"}))

    def __init__(self, alpha1: Share = 0.75, alpha2: Positive = 0.01, alpha3: Share = 0.1) -> None:
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3
        self.state = ActiveFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw the softmax part, then the uniform part."""
        values = self._values(round, signals)
        by_value = round.size - int(np.floor(self.alpha3 * round.size + rng.random()))
        first = pick(round.available, by_value, rng, self._logits(values, by_value))
        taken = set(first)
        rest = [client for client in round.available if client not in taken]
        chosen = first + pick(rest, round.size - len(first), rng)
        value_of = dict(zip(round.available, values.tolist(), strict=True))
        scores = {c: value_of[c] for c in chosen if np.isfinite(value_of[c])}
        return Selection(chosen, scores=scores)

    def _values(self, round: Round, signals: Signals) -> Array:
        values = np.full(len(round.available), np.inf)
        positions, losses = signals.read("loss", round.available)
        values[positions] = np.sqrt(sizes(signals, round.available)[positions]) * losses
        failures = values_for(self.state.failures, round.available)
        if (late := failures > 0).any():
            median = float(np.median(values[positions])) if len(positions) else 0.0
            known = np.where(np.isfinite(values[late]), values[late], median)
            values[late] = known - np.abs(known) * (1 - 0.5 ** failures[late])
        return values

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count who finished and did not report a loss."""
        reported, missing = by_report(round, outcome, signals, "loss")
        for client in reported:
            self.state.failures.pop(client, None)
        count_up(self.state.failures, missing)

    def _logits(self, values: Array, size: int) -> Array:
        """Zero out the lowest values; clients without a value come before all others."""
        zeroed = min(int(np.floor(self.alpha1 * len(values))), len(values) - size)
        reported = np.isfinite(values)
        logits = self.alpha2 * np.where(reported, values, 0.0)
        # Infinite logits would make ties; 1e3 above all others has the same effect.
        logits[~reported] = (logits[reported].max() if reported.any() else 0.0) + 1e3
        logits[np.argsort(values, kind="stable")[:zeroed]] = -np.inf
        return logits


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
    Checked: values and draw by hand.
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
