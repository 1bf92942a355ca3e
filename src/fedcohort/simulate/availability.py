"""Which clients are available in a round, and which drop out."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.options import Configurable, Count, Range
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


class UniformSubset(Configurable):
    """A fixed number of clients per round, drawn uniformly (paper 0's L active clients).

    Examples
    --------
    >>> available = UniformSubset(2).available(0, ("a", "b", "c"), np.random.default_rng(0))
    >>> len(available)
    2
    """

    def __init__(self, count: Count) -> None:
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
        return _drawn(clients, _chances(self.probability, clients), rng, "Bernoulli")


# The share of phones that are idle, charging and on Wi-Fi, by hour of the day, and the percentiles
# 2.5, 7.5, ... 97.5 of that share between phones: 710 phones of FLASH (Yang et al., WWW 2021),
# computed from the traces that FLHetBench (Zhang et al., CVPR 2024) released.
HOURS = (
    0.107, 0.118, 0.130, 0.136, 0.137, 0.135, 0.124, 0.112, 0.102, 0.091, 0.079, 0.071,
    0.071, 0.068, 0.069, 0.073, 0.080, 0.084, 0.094, 0.080, 0.072, 0.077, 0.090, 0.100,
)  # fmt: skip
PHONES = (
    0.0002, 0.0010, 0.0035, 0.0076, 0.0115, 0.0161, 0.0239, 0.0348, 0.0419, 0.0516,
    0.065, 0.078, 0.094, 0.106, 0.123, 0.147, 0.184, 0.224, 0.291, 0.405,
)  # fmt: skip


class Diurnal(Configurable):
    """Phones that are there at night rather than by day, some of them often and others hardly ever.

    Each client is like one of the measured phones (see `PHONES`), and its probability follows the
    hour of the day (see `HOURS`). A round in which nobody is there is drawn again, up to 1000
    times.

    Parameters
    ----------
    rounds_per_day : int, default=24
        The first round begins at midnight.
    share : float, default=0.1
        Mean share of the clients that are there; about what was measured.
    """

    def __init__(
        self,
        rounds_per_day: Count = 24,
        share: Annotated[float, Range(0, 1, above=True)] = 0.1,
    ) -> None:
        self.rounds_per_day, self.share = rounds_per_day, share
        self._habits: dict[ClientId, float] = {}

    def chances(self, round_number: int, clients: Sequence[ClientId]) -> NDArray[np.float64]:
        """Return each client's probability to be there in a round."""
        hour = 24 * (round_number % self.rounds_per_day) // self.rounds_per_day
        for client in clients:
            if client not in self._habits:
                self._habits[client] = float(stream(0, "diurnal", client).choice(PHONES))
        habits = np.array([self._habits[c] for c in clients])
        factor = HOURS[hour] / np.mean(HOURS) * self.share / np.mean(PHONES)
        chances: NDArray[np.float64] = np.minimum(habits * factor, 1.0)
        return chances

    def available(
        self, round_number: int, clients: tuple[ClientId, ...], rng: Generator
    ) -> Sequence[ClientId]:
        """Draw each client independently."""
        return _drawn(clients, self.chances(round_number, clients), rng, "Diurnal")


def _drawn(
    clients: Sequence[ClientId],
    chances: NDArray[np.float64],
    rng: Generator,
    who: str,
) -> list[ClientId]:
    for _ in range(1000):
        present = np.flatnonzero(rng.random(len(clients)) < chances)
        if len(present):
            return [clients[int(i)] for i in present]
    raise ConfigError(f"{who}: no client was available in 1000 draws; increase the probability")


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


def _chances(
    probability: float | Mapping[ClientId, float], clients: Sequence[ClientId]
) -> NDArray[np.float64]:
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
    "diurnal": Diurnal,
    "trace": Trace.read,
}
