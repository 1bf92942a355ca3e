"""Power-of-choice: the highest losses among d candidates drawn by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.exceptions import ConfigError
from fedcohort.options import Count
from fedcohort.policies.base import Policy, equal_weights, pick, register, scored, take
from fedcohort.policies.readings import sizes
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class PowerOfChoiceState:
    """The candidates of the round, in the order in which they were drawn."""

    drawn: list[ClientId] = field(default_factory=list)


@register("power-of-choice", when="losses are cheap to ask for; hard clients deserve more rounds")
class PowerOfChoice(Policy):
    """The variant pow-d of Cho, Wang and Joshi.

    Each round d candidates are drawn one after the other in proportion to their number of examples;
    they report the loss of the current model over their data, and those with the highest losses are
    the cohort. Models are averaged equally, because sizes have counted in the draw.

    Parameters
    ----------
    d : int, optional
        Candidates per round, above the cohort size; twice the cohort by default.

    Notes
    -----
    Source: paper's abstract, FedCor's released code and FLGo, which agree; no authors' code.
    Checked: draw and choice by hand and by frequencies.
    Reference: Cho, Wang, Joshi (2020), Power-of-Choice Selection Strategies.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> select(PowerOfChoice(d=3), "abc", 2, loss={"a": 0.1, "b": 2.0, "c": 0.7}).clients
    ('b', 'c')
    """

    needs = Needs(profile=frozenset({"num_examples"}), query=frozenset({"loss"}))

    def __init__(self, d: Count | None = None) -> None:
        self.d = d
        self.state = PowerOfChoiceState()

    def check_cohort(self, size: int) -> None:
        if self.d is not None and self.d <= size:
            raise ConfigError(
                f"PowerOfChoice: d={self.d} must be above cohort_size={size}; else chance decides"
            )

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Draw d clients in proportion to their sizes (step 1 of pow-d)."""
        self.check_cohort(round.cohort_size)
        d = 2 * round.cohort_size if self.d is None else self.d
        with np.errstate(divide="ignore"):  # an empty client is never drawn
            logits = np.log(sizes(signals, round.available))
        drawn = pick(round.available, d, rng, logits)
        self.state.drawn = list(drawn)
        return drawn

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Pick the highest losses reported this round (steps 2 and 3)."""
        fresh = np.flatnonzero(signals.rounds("loss", round.available) == round.number)
        answered = dict.fromkeys(take(round.available, fresh))
        asked = [c for c in self.state.drawn or answered if c in answered]
        losses = signals.values("loss", asked)
        order = np.argsort(-losses, kind="stable")[: round.size]
        return scored(asked, order, losses[order], equal_weights(round, order.size))
