"""Active federated learning: sampling by the last reported loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import Policy, pick, register, sizes, unreported
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class ActiveFLState:
    """How often in a row each client finished without reporting a loss."""

    failures: dict[ClientId, int] = field(default_factory=dict)


@register("active-fl", when="losses arrive with the updates and no extra query is allowed")
class ActiveFL(Policy):
    """Algorithm 1 of Goetz et al. [1]_.

    A client's value is sqrt(n) times the loss it reported when it last trained. One that never
    finished has the value plus infinity, so that everybody is tried (the paper starts from one
    round in which all report). Of the available clients, the alpha1 share with the lowest values
    gets probability zero, the others exp(alpha2 * value). (1 - alpha3) of the cohort is drawn from
    that, the rest uniformly from the remaining clients.

    Parameters
    ----------
    alpha1 : float, default=0.75
        Share of the clients whose probability is set to zero.
    alpha2 : float, default=0.01
        Softness of the softmax.
    alpha3 : float, default=0.1
        Share of the cohort that is drawn uniformly.

    Notes
    -----
    The defaults are the paper's. The share of zeroed clients is capped so that enough remain to
    fill the softmax part of the cohort.

    Added here: each time a client finishes and does not report a loss, its value is halved until
    it reports again; without an earlier report the median value of all others is halved. So never
    reporting does not pay. A client that drops out keeps its value; the session lets it sit out.
    A loss that is merely false is believed.

    References
    ----------
    .. [1] Goetz, Malik, Bui, Moon, Liu, Kumar (2019), Active Federated Learning.

    Examples
    --------
    >>> signals = Signals()
    >>> _ = signals.record("loss", {"a": 0.1, "b": 9.0}, stamp=0)
    >>> _ = signals.record("num_examples", {"a": 100, "b": 100}, stamp=0)
    >>> round = Round(number=1, available=("a", "b"), cohort_size=1)
    >>> ActiveFL(alpha1=0.5, alpha3=0).select(round, signals, np.random.default_rng(0)).clients
    ('b',)
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss"}))

    def __init__(self, alpha1: float = 0.75, alpha2: float = 0.01, alpha3: float = 0.1) -> None:
        for name, value in (("alpha1", alpha1), ("alpha3", alpha3)):
            if not 0 <= value <= 1:
                raise ValueError(f"ActiveFL: {name}={value} must lie in [0, 1]")
        if not alpha2 > 0:
            raise ValueError(f"ActiveFL: alpha2={alpha2} must be positive")
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3
        self.state = ActiveFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw the softmax part, then the uniform part."""
        values = self._values(round, signals)
        by_value = round.size - int(np.floor(self.alpha3 * round.size))
        first = pick(round.available, by_value, rng, self._logits(values, by_value))
        taken = set(first)
        rest = [client for client in round.available if client not in taken]
        chosen = first + pick(rest, round.size - len(first), rng)
        known = dict(zip(round.available, values.tolist(), strict=True))
        return Selection(chosen, scores={c: known[c] for c in chosen if np.isfinite(known[c])})

    def _values(self, round: Round, signals: Signals) -> NDArray[np.float64]:
        values = np.full(len(round.available), np.inf)
        positions, losses = signals.read("loss", round.available)
        values[positions] = np.sqrt(sizes(signals, round.available)[positions]) * losses
        failures = self.state.failures
        if failures:
            median = float(np.median(values[positions])) if len(positions) else 0.0
            for i, client in enumerate(round.available):
                if client in failures:
                    value = values[i] if np.isfinite(values[i]) else median
                    values[i] = value - abs(value) * (1 - 0.5 ** failures[client])
        return values

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count who finished and did not report a loss."""
        missing = unreported(round, outcome, signals, "loss")
        for client in set(outcome.finished).difference(missing):
            self.state.failures.pop(client, None)
        for client in missing:
            self.state.failures[client] = self.state.failures.get(client, 0) + 1

    def _logits(self, values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """Zero out the lowest values; clients without a value come before all others."""
        zeroed = min(int(np.floor(self.alpha1 * len(values))), len(values) - size)
        known = np.isfinite(values)
        logits = self.alpha2 * np.where(known, values, 0.0)
        # Infinite logits would make ties; 1e3 above all others has the same effect.
        top = logits[known].max() if known.any() else 0.0
        logits[~known] = top + 1e3
        logits[np.argsort(values, kind="stable")[:zeroed]] = -np.inf
        return logits
