"""The interface of a selection policy, the registry of policies, and helpers that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import ClassVar, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics.sampling import draw
from fedcohort.options import Configurable
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Policy(Configurable, ABC):
    """Picks each round's cohort from the signals it declared it needs.

    It does no I/O and owns no generator. All it remembers is in `state`, one dataclass of numbers,
    strings, arrays and dicts or lists of those, so that a session can save and restore it.
    """

    name: ClassVar[str] = ""
    when: ClassVar[str] = ""
    needs: Needs = Needs()  # signals, by when they are collected
    signal_options: Mapping[str, Mapping[str, Option]] = {}  # how they are made, by name
    profile_first: bool = False  # ask all for their profile before the first round

    def check_cohort(self, size: int) -> None:
        """Raise ConfigError if the options do not fit cohorts of this size; fine by default."""

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Return whom to ask for the query signals, if there are any; nobody by default."""
        return ()

    @abstractmethod
    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Pick up to ``round.size`` clients of ``round.available``.

        A cohort that falls short is topped up uniformly by the session.
        """

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Learn from what came back; nothing by default."""


POLICIES: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(name: str, when: str) -> Callable[[P], P]:
    """Class decorator: enter a policy into `POLICIES`; `when` says when to use it, in a line."""

    def enter(policy: P) -> P:
        policy.name, policy.when = name, when
        POLICIES[name] = policy
        return policy

    return enter


def pick(
    clients: Sequence[ClientId], size: int, rng: Generator, logits: Array | None = None
) -> tuple[ClientId, ...]:
    """Draw `size` different clients, uniformly or one by one in proportion to exp(logits)."""
    if logits is not None:
        return take(clients, draw(logits, size, rng))
    return take(clients, rng.choice(len(clients), min(size, len(clients)), replace=False))


def take(clients: Sequence[ClientId], positions: Indices) -> tuple[ClientId, ...]:
    """Return the clients at these positions."""
    return tuple(clients[i] for i in positions.tolist())


def scored(
    clients: Sequence[ClientId],
    positions: Indices | list[int],
    scores: Array,
    weights: tuple[float, ...] | None = None,
) -> Selection:
    """Return the selection of the clients at these positions, which have these scores."""
    chosen = take(clients, np.asarray(positions, np.int64))
    return Selection(chosen, weights, dict(zip(chosen, scores.tolist(), strict=True)))


def values_for(
    values: Mapping[ClientId, float], clients: Sequence[ClientId], otherwise: float = 0.0
) -> Array:
    """Return each client's entry of `values`, or `otherwise`; fast for a million clients."""
    if not values:
        return np.full(len(clients), otherwise)
    return np.fromiter(map(values.get, clients, repeat(otherwise)), np.float64, len(clients))


def count_up(counts: dict[ClientId, int], clients: Iterable[ClientId]) -> None:
    """Add one to each client's count."""
    for client in clients:
        counts[client] = counts.get(client, 0) + 1


def equal_weights(round: Round, size: int) -> tuple[float, ...] | None:
    """Return equal weights for clients drawn by size, which would else count twice."""
    return None if round.averaging == "equal" or not size else (1 / size,) * size
