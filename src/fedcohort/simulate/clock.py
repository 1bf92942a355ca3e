"""Simulated devices and time: who is there, how fast they are, and how long a round waits."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.options import (
    Configurable,
    Count,
    NonNegative,
    Positive,
    Range,
    Share,
    check_fields,
    parse_value,
    typed,
)
from fedcohort.rounds import ClientId, check_id, stream

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

# Milliseconds that phones take for a ResNet: the 5th, 15th, ... 95th percentile of the 997 phones
# that FLHetBench released (Zhang et al., CVPR 2024; training_latency.json of its code).
PHONE_MILLISECONDS = (60, 80, 96, 125, 148, 194, 235, 309, 406, 559)
# Kilobytes per second of a model that goes down and up (harmonic means): the same percentiles of
# the 19 phones that FLASH measured (Yang et al., WWW 2021; speed_distri.json of its code).
PHONE_KILOBYTES = (1164, 2682, 3053, 3462, 3739, 3923, 4266, 5565, 6699, 8006)
MAX_DRAWS = 1000  # of a round in which nobody is there

Ids: TypeAlias = Sequence[ClientId]


class Availability:
    """Which clients can take part in a round: all of them. Derive from it to say less."""

    def available(self, number: int, clients: Ids, rng: Generator) -> Ids:
        """Return the available ones among `clients`; the first round is 0."""
        return clients


class UniformSubset(Availability, Configurable):
    """A fixed number of clients per round, drawn uniformly (paper 0's L active clients)."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def available(self, number: int, clients: Ids, rng: Generator) -> Ids:
        count = min(self.count, len(clients))
        return [clients[i] for i in rng.choice(len(clients), count, replace=False)]


class Bernoulli(Availability, Configurable):
    """Each client independently; a round in which nobody is there is drawn again."""

    def __init__(self, probability: Share) -> None:
        self.probability = probability

    def chances(self, number: int, clients: Ids) -> NDArray[np.float64]:
        """Return each client's probability to be there in a round."""
        return np.full(len(clients), self.probability)

    def available(self, number: int, clients: Ids, rng: Generator) -> Ids:
        chances = self.chances(number, clients)
        for _ in range(MAX_DRAWS):
            present = np.flatnonzero(rng.random(len(clients)) < chances)
            if len(present):
                return [clients[int(i)] for i in present]
        raise ConfigError(
            f"{self!r}: no client was available in {MAX_DRAWS} draws; increase the probability"
        )


class Diurnal(Bernoulli):
    """Phones that are there at night rather than by day, some of them often and others hardly ever.

    Each client is like one of the measured phones (see `PHONES`), and its probability follows the
    hour of the day (see `HOURS`), from midnight on. `share` is the mean share of the clients that
    are there; the default is about what was measured.
    """

    def __init__(
        self, rounds_per_day: Count = 24, share: Annotated[float, Range(0, 1, above=True)] = 0.1
    ) -> None:
        self.rounds_per_day, self.share = rounds_per_day, share

    def chances(self, number: int, clients: Ids) -> NDArray[np.float64]:
        hour = 24 * (number % self.rounds_per_day) // self.rounds_per_day
        habits = np.array([_habit(client) for client in clients])
        factor = HOURS[hour] / np.mean(HOURS) * self.share / np.mean(PHONES)
        return np.asarray(np.minimum(habits * factor, 1.0))


@cache
def _habit(client: ClientId) -> float:
    """Return how often the phone is there that a client is like."""
    return float(stream(0, "diurnal", client).choice(PHONES))


class Trace(Availability):
    """Available clients by round, from 1; a round that is not listed repeats the last before it."""

    def __init__(self, rounds: Mapping[int, Ids]) -> None:
        if not rounds or min(rounds) != 1:
            raise ConfigError("Trace: the trace must start with round 1")
        if empty := [number for number, clients in rounds.items() if not clients]:
            raise ConfigError(f"Trace: no client is available in round {empty[0]}")
        self.rounds = {number: set(rounds[number]) for number in sorted(rounds)}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a CSV file with the columns round and client."""
        rounds: dict[int, list[ClientId]] = {}
        for where, row in _rows(path, ("round", "client")):
            number = typed(Count, parse_value(row["round"]), f"{where}: round")
            client = check_id(row["client"], f"{where}: client")
            rounds.setdefault(number, []).append(client)
        return cls(rounds)

    def available(self, number: int, clients: Ids, rng: Generator) -> Ids:
        """Look up the round; clients that are not in the federation are ignored."""
        present = self.rounds[max(n for n in self.rounds if n <= number + 1)]
        return [c for c in clients if c in present]


AVAILABILITIES: dict[str, Callable[..., Any]] = {
    "always": Availability,
    "uniform-subset": UniformSubset,
    "bernoulli": Bernoulli,
    "diurnal": Diurnal,
    "trace": Trace.read,
}


def _rows(
    path: str | os.PathLike[str], *choices: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield where each row of a CSV file stands, and its values; it has one choice of columns."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines, restval="")
            if not any(set(columns) <= set(rows.fieldnames or ()) for columns in choices):
                needed = " or ".join(",".join(columns) for columns in choices)
                raise ConfigError(f"{path}: its first line must have the columns {needed}")
            for row in rows:
                yield f"{path}, line {rows.line_num}", row
    except ConfigError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as CSV ({reason})") from None


@dataclass(frozen=True)
class Durations:
    """How fast each client computes and communicates.

    Examples
    --------
    >>> speeds = Durations({"ann": 100.0}, {"ann": 1000.0})
    >>> speeds.seconds("ann", samples=50, bytes_moved=2000)
    2.5
    """

    samples_per_second: Mapping[ClientId, float]
    bytes_per_second: Mapping[ClientId, float]
    per_round: Mapping[ClientId, float] = field(default_factory=dict)  # where only that is known

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
        factors = np.exp(sigma * stream(seed, "durations").standard_normal((2, len(clients))))
        speeds, rates = (speed * factors[0]).tolist(), (bandwidth * factors[1]).tolist()
        return cls(dict(zip(clients, speeds, strict=True)), dict(zip(clients, rates, strict=True)))

    @classmethod
    def phones(cls, clients: Sequence[ClientId], seed: int, *, speed: float = 1000.0) -> Durations:
        """Draw from measured phones; the median phone takes `speed` samples per second.

        The fastest tenth computes 9 times as fast as the slowest, and transfers 7 times as fast.
        """
        rng, median = stream(seed, "phones"), float(np.median(PHONE_MILLISECONDS))
        times = rng.choice(PHONE_MILLISECONDS, len(clients)).tolist()
        rates = rng.choice(PHONE_KILOBYTES, len(clients)).tolist()
        speeds = {c: speed * median / time for c, time in zip(clients, times, strict=True)}
        return cls(speeds, {c: 1024.0 * rate for c, rate in zip(clients, rates, strict=True)})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Durations:
        """Read a CSV file with the columns client, samples_per_second and bytes_per_second.

        Or client and seconds of a round, as a Flower run measures them (``durations.csv``).
        """
        speeds, whole = ("samples_per_second", "bytes_per_second"), ("seconds",)
        columns: dict[str, dict[ClientId, float]] = {name: {} for name in (*speeds, *whole)}
        for where, row in _rows(path, ("client", *speeds), ("client", *whole)):
            client = check_id(row["client"], f"{where}: client")
            for name in speeds if speeds[0] in row else whole:
                if client in columns[name]:
                    raise ConfigError(f"{where}: client {client!r} appears twice")
                value = parse_value(row[name])
                columns[name][client] = typed(Positive, value, f"{where}: {name}")
        return cls(*columns.values())

    def seconds(self, client: ClientId, samples: int, bytes_moved: int) -> float:
        """Return the time to process samples (epochs counted) and to move bytes."""
        if client in self.per_round:
            return self.per_round[client]
        if client not in self.samples_per_second:
            raise ConfigError(f"durations: client {client!r} has none")
        compute = samples / self.samples_per_second[client]
        return compute + bytes_moved / self.bytes_per_second[client]


@dataclass(frozen=True)
class Arrivals:
    """How a round ended; clients are in the order of selection."""

    used: tuple[ClientId, ...]  # whose updates the round uses
    cut: tuple[ClientId, ...]  # who finishes too late for it
    seconds: float
    slowest: ClientId  # for whom it waited
    extended: bool  # whether nobody met the deadline, so that it went on until the first update
    working: float  # seconds of all clients, at work
    waiting: float  # seconds of those who were done, until the end


@dataclass(frozen=True)
class Pace:
    """How long a round waits (by default for everybody), and what happens to later updates.

    Parameters
    ----------
    over_select : float
        Clients asked per client wanted (Bonawitz et al., 2019, ask 1.3): the round ends when as
        many as wanted have answered.
    deadline : float or str, optional
        Seconds after which the round ends with those that have answered, or a quantile of the
        durations measured so far, such as "80%". If nobody meets it, the round waits for the first.
    late : {"drop", "next"}
        Clients that are too late stop ("drop"), or go on, and their update enters the round in
        which it arrives ("next"). Until then they are not asked again.
    staleness : float
        A late update counts (1 + rounds late)^-staleness times, as in FedBuff (Nguyen et al.,
        2022) with 1/2, the default.
    deviation : float
        How much it counts instead that a late update is unlike the others, beta: the weight is
        (1 - beta) times that, plus beta (1 - exp(-D / D_max)), D being the squared distance from
        the mean of the updates in time. REFL (Abdelmoniem et al., 2023) takes 0.35, staleness 1.

    Examples
    --------
    >>> closed = Pace(over_select=1.5).close(2, {"ann": 5.0, "bob": 1.0, "cem": 3.0})
    >>> closed.used, closed.cut, closed.seconds
    (('bob', 'cem'), ('ann',), 3.0)
    """

    over_select: Annotated[float, Range(1)] = 1.0
    deadline: float | str | None = None
    late: Literal["drop", "next"] = "drop"
    staleness: NonNegative = 0.5
    deviation: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "Pace")
        if isinstance(self.deadline, str):
            match = re.fullmatch(r"(\d{1,3}(\.\d+)?)%", self.deadline)
            fits = match is not None and 0 < float(match[1]) <= 100
        else:
            fits = self.deadline is None or self.deadline > 0
        if not fits:
            rule = "seconds above 0, a quantile such as '80%', or None"
            raise ConfigError(f"Pace: deadline={self.deadline!r} must be {rule}")

    @property
    def waits_for_all(self) -> bool:
        """Whether a round waits for everybody that was asked."""
        return self.over_select == 1 and self.deadline is None

    def asked(self, wanted: int) -> int:
        """Return how many clients to ask for `wanted` updates."""
        return math.ceil(round(wanted * self.over_select, 9))

    def limit(self, measured: Iterable[float]) -> float:
        """Return the deadline in seconds, infinite while a quantile has nothing to go by."""
        if not isinstance(self.deadline, str):
            return math.inf if self.deadline is None else self.deadline
        durations, share = list(measured), float(self.deadline.removesuffix("%"))
        return float(np.percentile(durations, share)) if durations else math.inf

    def close(
        self,
        wanted: int,
        seconds: Mapping[ClientId, float],
        lost: Collection[ClientId] = (),
        limit: float = math.inf,
    ) -> Arrivals:
        """Return whose updates a round uses, and when it ends, in the simulator as in Flower.

        It ends after `wanted` updates or at the `limit`. `seconds` says how long each selected
        client takes; its order decides ties. The server waits for those `lost`, who never answer.
        """
        answering = [c for c in seconds if c not in lost]
        by_arrival = sorted(answering, key=seconds.__getitem__)
        in_time = [c for c in by_arrival if seconds[c] <= limit][:wanted]
        extended = bool(by_arrival) and not in_time
        used = set(in_time or by_arrival[:1])
        last = max((seconds[c] for c in used), default=0.0)
        if extended or len(in_time) == wanted:
            end = last
        else:
            end = min(limit, max(seconds.values()))
        waited = [c for c in seconds if c in used] if end == last and used else seconds
        stays = self.late == "next"
        cut = tuple(c for c in answering if c not in used)
        going_on = {*used, *cut} if stays else used
        return Arrivals(
            tuple(c for c in answering if c in used),
            cut,
            end,
            max(waited, key=seconds.__getitem__),
            extended,
            sum(s if c in going_on else min(s, end) for c, s in seconds.items()),
            sum(end - seconds[c] for c in used),
        )

    def stale_weights(
        self, fresh: Sequence[float], late: Sequence[tuple[float, int]], far: Sequence[float] = ()
    ) -> list[float]:
        """Return the weights of a round's own updates, their sum kept, and then of its late ones.

        A late update has the weight that it would have had in time, and how many rounds late it is.
        `far` are the late ones' squared distances from the mean of the others, if any is known.
        """
        stale = [weight * (1.0 + rounds) ** -self.staleness for weight, rounds in late]
        if max(far, default=0.0) > 0:
            unlike = -np.expm1(-np.array(far) / max(far)) * [weight for weight, _ in late]
            stale = ((1 - self.deviation) * np.array(stale) + self.deviation * unlike).tolist()
        total = sum(fresh) if fresh else sum(weight for weight, _ in late)
        scale = total / (sum(fresh) + sum(stale))
        return [weight * scale for weight in (*fresh, *stale)]
