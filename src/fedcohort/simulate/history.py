"""What a simulation leaves behind: a record a round and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId


@dataclass(frozen=True)
class RoundRecord:
    """One round of one seed, as it is written to disk.

    Bytes are those of this round; seconds is the simulated time at its end; accuracy and loss are
    None in rounds without evaluation; skipped says that a gate let no model move.
    """

    seed: int
    round: int
    accuracy: float | None
    loss: float | None
    selected: tuple[ClientId, ...]
    finished: tuple[ClientId, ...]
    bytes_up: int
    bytes_down: int
    seconds: float
    skipped: bool = False


@dataclass
class History:
    """All rounds of one seed."""

    seed: int
    rounds: list[RoundRecord] = field(default_factory=list)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Test accuracy by round, NaN where it was not measured."""
        return np.array([np.nan if r.accuracy is None else r.accuracy for r in self.rounds])

    @property
    def selections(self) -> list[tuple[ClientId, ...]]:
        """The cohort of every round."""
        return [r.selected for r in self.rounds]


def record_from(values: Mapping[str, Any]) -> RoundRecord:
    """Make a record of what was written to disk."""
    cohort = {key: tuple(values[key]) for key in ("selected", "finished")}
    return RoundRecord(**{**values, **cohort})
