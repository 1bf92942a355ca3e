"""Rounds: what travels between a session, its policy and its engine, and what became of it.

What travels is frozen: a policy cannot change the round it is asked about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError

ClientId: TypeAlias = str
Averaging = Literal["equal", "size"]  # of models


def check_id(client: object, whose: str = "client id") -> ClientId:
    """Return a client id; ConfigError unless it is a non-empty string that UTF-8 can encode."""
    if not isinstance(client, str):
        raise ConfigError(f"{whose} {client!r:.80} is not a string")
    if not client:
        raise ConfigError(f"{whose} is empty; every client needs a name")
    try:
        client.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{whose} {client!r:.80} cannot be encoded as UTF-8") from None
    return client


@dataclass(frozen=True)
class Round:
    """One communication round, as a policy sees it."""

    number: int  # 0 for the first
    available: tuple[ClientId, ...]  # sorted, each once
    cohort_size: int
    averaging: Averaging | None = None  # None: the engine does not say

    @property
    def size(self) -> int:
        """How many can be picked: the cohort size, or all if fewer are available."""
        return min(self.cohort_size, len(self.available))


@dataclass(frozen=True)
class Selection:
    """Whom to train with."""

    clients: tuple[ClientId, ...]  # in the order of choice
    weights: tuple[float, ...] | None = None  # of aggregation; None leaves them to the engine
    scores: Mapping[ClientId, float] | None = None  # explain the choice, for logs and plots

    def weights_of(self, finished: Sequence[ClientId]) -> list[float] | None:
        """Return the weights of those that finished, with the sum that the policy meant.

        Without this, each client that drops out would shrink the step.

        Examples
        --------
        >>> Selection(("a", "b", "c"), weights=(0.5, 0.25, 0.25)).weights_of(["a", "b"])
        [0.6666666666666666, 0.3333333333333333]
        """
        if self.weights is None:
            return None
        weight_of = dict(zip(self.clients, self.weights, strict=True))
        arrived = [weight_of[client] for client in finished]
        total = sum(arrived)
        if len(arrived) == len(self.clients) or not total > 0:
            return arrived
        return [weight * (sum(self.weights) / total) for weight in arrived]


@dataclass(frozen=True)
class Outcome:
    """Who was asked to train, and what became of them.

    `finished` came back with an update, a gate held back `withheld`, and `cut` were too slow for
    the round, which did not wait for them.
    """

    selected: tuple[ClientId, ...]
    finished: tuple[ClientId, ...]
    withheld: tuple[ClientId, ...] = ()
    cut: tuple[ClientId, ...] = ()

    @property
    def dropped(self) -> tuple[ClientId, ...]:
        """The selected that should have finished and did not."""
        done = {*self.finished, *self.withheld, *self.cut}
        return tuple(client for client in self.selected if client not in done)


@dataclass(frozen=True)
class RoundRecord:
    """What became of one round of one seed, as it is written to disk."""

    seed: int
    round: int  # from 1
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


@dataclass
class History:
    """The records of all rounds of one seed."""

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
        """Return one flat record per round, cohorts as lists."""
        rows = map(asdict, self.rounds)
        return [{k: list(v) if isinstance(v, tuple) else v for k, v in r.items()} for r in rows]


def is_over(histories: Sequence[History], rounds: int, patience: int | None) -> bool:
    """Whether all rounds are there, or no seed's accuracy has risen for `patience` evaluations."""
    return all(len(h.rounds) >= rounds for h in histories) or (
        patience is not None and all(h.stalled >= patience for h in histories)
    )


def stream(seed: int, *path: int | str) -> np.random.Generator:
    """Return the random generator that belongs to a place in the run.

    A counter-based generator (Philox) keyed by a hash of the seed and the path: no state has to be
    saved, two paths never share numbers, and every machine draws the same.

    Examples
    --------
    >>> stream(0, "select", 3).integers(1000, size=4).tolist()
    [39, 65, 926, 509]
    """
    return generator(_hashed(seed, path).digest())


def stream_keys(seed: int, *path: int | str, ends: Iterable[int | str]) -> list[bytes]:
    """Return the keys of ``stream(seed, *path, end)`` for many ends, for `generator`."""
    common, keys = _hashed(seed, path), []
    for end in ends:
        whole = common.copy()
        whole.update(_part(end))
        keys.append(whole.digest())
    return keys


def generator(key: bytes) -> np.random.Generator:
    """Return the generator with a key of 16 bytes."""
    # NumPy takes any ISeedSequence; its stubs name SeedSequence alone.
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]


def _hashed(seed: int, path: Sequence[int | str]) -> hashlib.blake2b:
    return hashlib.blake2b(b"".join(map(_part, (int(seed), *path))), digest_size=16)


def _part(part: int | str) -> bytes:
    """Encode type, length and text of one part of a path, so that no two paths agree."""
    text = str(part).encode("utf-8", "surrogatepass")
    return b"%s%d:%s" % (b"s" if isinstance(part, str) else b"i", len(text), text)


class _Key(ISeedSequence):
    """A Philox key as it is; given as `key=`, NumPy would first gather entropy it does not use."""

    def __init__(self, digest: bytes) -> None:
        self.words = np.frombuffer(digest, "<u8")

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> NDArray[Any]:
        """Return the key."""
        return self.words
