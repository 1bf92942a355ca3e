"""The history of a simulation: one record per round and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId, check_id


@dataclass(frozen=True)
class RoundRecord:
    """One round of one seed, as it is written to disk."""

    seed: int
    round: int  # from 0
    accuracy: float | None  # of the global model on the test set after the round, if evaluated
    loss: float | None
    selected: tuple[ClientId, ...]
    finished: tuple[ClientId, ...]  # whose update arrived
    bytes_up: int
    bytes_down: int
    seconds: float  # simulated time of this round
    elapsed: float  # and of all rounds so far
    skipped: bool = False  # whether the gate withheld all uploads
    withheld: tuple[ClientId, ...] = ()  # whose upload the gate withheld
    cut: tuple[ClientId, ...] = ()  # who was too slow for the round
    late: tuple[ClientId, ...] = ()  # clients of earlier rounds whose updates it used
    slowest: ClientId | None = None  # for whom the round waited
    working: float = 0.0  # seconds of all clients, at work
    waiting: float = 0.0  # and waiting for the end of the round
    train_accuracy: float | None = None  # on the training set, if asked for


COHORTS = ("selected", "finished", "withheld", "cut", "late")


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
    def stalled(self) -> int:
        """How many evaluations have passed since the best accuracy was first reached."""
        measured = self.accuracy[~np.isnan(self.accuracy)]
        return len(measured) - 1 - int(measured.argmax()) if len(measured) else 0

    @property
    def selections(self) -> list[tuple[ClientId, ...]]:
        """The cohort of every round."""
        return [r.selected for r in self.rounds]

    def records(self) -> list[dict[str, Any]]:
        """Return one flat record per round; rounds count from 1, and cohorts are lists."""
        return [
            {
                **asdict(r),
                "round": r.round + 1,
                **{name: list(getattr(r, name)) for name in COHORTS},
            }
            for r in self.rounds
        ]


def record_from(values: Any) -> RoundRecord:
    """Make a record from what was read from disk; ValueError or TypeError if it is not one."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{str(values)[:80]} is not an object")
    cohort = {key: _clients(values.get(key, [])) for key in COHORTS}
    more = ("failed", "scores", "available")  # of a Flower run, for people
    record = RoundRecord(**{k: v for k, v in values.items() if k not in more} | cohort)
    for name in ("seed", "round", "bytes_up", "bytes_down"):
        whole_number(getattr(record, name))
    measured = ("accuracy", "loss", "train_accuracy")
    for name in (*measured, "seconds", "elapsed", "working", "waiting"):
        value = getattr(record, name)
        if type(value) is int:
            whole_number(value)
        elif not (isinstance(value, float) or (value is None and name in measured)):
            raise ValueError(f"{name}={str(value)[:80]} is not a float")
    if record.slowest is not None:
        check_id(record.slowest)
    if record.round < 0 or not isinstance(record.skipped, bool):
        raise ValueError(f"round={record.round}, skipped={str(record.skipped)[:80]}")
    return record


def _clients(values: Any) -> tuple[ClientId, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{str(values)[:80]} is not a list of clients")
    return tuple(check_id(client) for client in values)


def whole_number(value: Any) -> int:
    """Return an integer of at most 63 bits; ValueError for anything else."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{str(value)[:80]} is not a whole number")
    return value
