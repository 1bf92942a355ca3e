"""Which clients are available, which drop out, and how long clients take."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId, check_id, stream


class Availability(Protocol):
    """Says which clients can take part in a round."""

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Return the available ones among `clients`."""


class Always:
    """All clients, in every round."""

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Return all clients."""
        return clients


class UniformSubset:
    """A fixed number of clients per round, drawn uniformly (paper 0's L active clients).

    Examples
    --------
    >>> available = UniformSubset(2).available(0, ("a", "b", "c"), np.random.default_rng(0))
    >>> len(available)
    2
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"UniformSubset: count={count} must be at least 1")
        self.count = count

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Draw without replacement; all if there are fewer than `count`."""
        count = min(self.count, len(clients))
        return [clients[i] for i in rng.choice(len(clients), count, replace=False)]


class Bernoulli:
    """Each client independently, with one probability for all clients or one per client.

    A round in which no client is available is drawn again, up to 1000 times.
    """

    def __init__(self, probability: float | Mapping[ClientId, float]) -> None:
        values = probability.values() if isinstance(probability, Mapping) else [probability]
        for value in values:
            if not 0 <= value <= 1:
                raise ConfigError(f"Bernoulli: probability={value} must lie in [0, 1]")
        self.probability = probability

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Draw each client independently."""
        chances = _chances(self.probability, clients)
        for _ in range(1000):
            present = np.flatnonzero(rng.random(len(clients)) < chances)
            if len(present):
                return [clients[i] for i in present]
        raise ConfigError(
            "Bernoulli: no client was available in 1000 draws; increase the probability"
        )


class Trace:
    """Available clients by round, from a recorded trace.

    Parameters
    ----------
    rounds : mapping of int to clients
        A round that is not listed repeats the last listed round before it.
    cycle : bool, default=False
        Start over after the last listed round.
    """

    def __init__(self, rounds: Mapping[int, Sequence[ClientId]], cycle: bool = False) -> None:
        if not rounds or min(rounds) != 0:
            raise ConfigError("Trace: the trace must start with round 0")
        for number, clients in rounds.items():
            if not clients:
                raise ConfigError(f"Trace: no client is available in round {number}")
        self.rounds = {number: set(rounds[number]) for number in sorted(rounds)}
        self.cycle = cycle

    @classmethod
    def read(cls, path: str | os.PathLike[str], cycle: bool = False) -> Trace:
        """Read JSON lines ``{"round": 0, "clients": ["a"]}`` or CSV rows ``round,client``."""
        file = Path(path)
        if not file.exists():
            raise ConfigError(f"{path}: no such trace file")
        rounds: dict[int, list[ClientId]] = {}
        try:
            if file.suffix == ".csv":
                with file.open(newline="", encoding="utf-8") as lines:
                    for row in csv.DictReader(lines):
                        rounds.setdefault(int(row["round"]), []).append(row["client"])
            else:
                for line in file.read_text(encoding="utf-8").splitlines():
                    entry = json.loads(line)
                    rounds[int(entry["round"])] = [check_id(c) for c in entry["clients"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}: not a trace of rounds and clients ({error})") from None
        return cls(rounds, cycle)

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Look up the round; clients that are not in the federation are ignored."""
        last = max(self.rounds)
        wanted = round_number % (last + 1) if self.cycle else round_number
        present = self.rounds[max(n for n in self.rounds if n <= wanted)]
        return [c for c in clients if c in present]


def dropouts(
    clients: Sequence[ClientId], probability: float | Mapping[ClientId, float], rng: Generator
) -> tuple[list[ClientId], list[ClientId]]:
    """Return the clients that finish and those that drop out, each in the given order."""
    lost = rng.random(len(clients)) < _chances(probability, clients)
    finished = [c for c, gone in zip(clients, lost, strict=True) if not gone]
    return finished, [c for c, gone in zip(clients, lost, strict=True) if gone]


@dataclass(frozen=True)
class Durations:
    """How fast each client computes and communicates.

    Parameters
    ----------
    samples_per_second, bytes_per_second : mapping
        By client.
    """

    samples_per_second: Mapping[ClientId, float]
    bytes_per_second: Mapping[ClientId, float]

    @classmethod
    def draw(
        cls,
        clients: Sequence[ClientId],
        seed: int,
        *,
        speed: float = 1000.0,
        bandwidth: float = 1e6,
        sigma: float = 0.5,
    ) -> Durations:
        """Draw both log-normally around their medians; with sigma=0 all clients are alike."""
        rng = stream(seed, "durations")
        factors = np.exp(sigma * rng.standard_normal((2, len(clients))))
        return cls(
            dict(zip(clients, (speed * factors[0]).tolist(), strict=True)),
            dict(zip(clients, (bandwidth * factors[1]).tolist(), strict=True)),
        )

    def seconds(self, client: ClientId, samples: int, bytes_moved: int) -> float:
        """Return the time to process samples (epochs counted) and to move bytes."""
        compute = samples / self.samples_per_second[client]
        return compute + bytes_moved / self.bytes_per_second[client]


def _chances(
    probability: float | Mapping[ClientId, float], clients: Sequence[ClientId]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not isinstance(probability, Mapping):
        return np.full(len(clients), float(probability))
    missing = [c for c in clients if c not in probability]
    if missing:
        raise ConfigError(f"no probability given for client {missing[0]!r}")
    return np.array([probability[c] for c in clients], np.float64)


AVAILABILITIES: dict[str, Callable[..., Any]] = {
    "always": Always,
    "uniform-subset": UniformSubset,
    "bernoulli": Bernoulli,
    "trace": Trace.read,
}
