"""Simulated time: how long clients take, when a round ends, and whose updates it uses.

`Durations` says how fast each client computes and communicates. `Pace` says how long a round waits:
for everybody, for the first of more clients than needed, or until a deadline. `Pace.close` decides
from the arrivals alone, so that the simulator and a real server come to the same result.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId, check_id, stream
from fedcohort.storage import write_atomically

# Milliseconds that phones take for a ResNet: the 5th, 15th, ... 95th percentile of the 997 phones
# that FLHetBench released (Zhang et al., CVPR 2024; training_latency.json of its code).
PHONE_MILLISECONDS = (60, 80, 96, 125, 148, 194, 235, 309, 406, 559)
# Kilobytes per second of a model that goes down and up (harmonic means): the same percentiles of
# the 19 phones that FLASH measured (Yang et al., WWW 2021; speed_distri.json of its code).
PHONE_KILOBYTES = (1164, 2682, 3053, 3462, 3739, 3923, 4266, 5565, 6699, 8006)
COLUMNS = ("client", "samples_per_second", "bytes_per_second")


@dataclass(frozen=True)
class Durations:
    """How fast each client computes and communicates.

    Parameters
    ----------
    samples_per_second, bytes_per_second : mapping
        By client.

    Examples
    --------
    >>> speeds = Durations({"ann": 100.0}, {"ann": 1000.0})
    >>> speeds.seconds("ann", samples=50, bytes_moved=2000)
    2.5
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
        factors = np.exp(sigma * stream(seed, "durations").standard_normal((2, len(clients))))
        return cls._of(clients, speed * factors[0], bandwidth * factors[1])

    @classmethod
    def phones(cls, clients: Sequence[ClientId], seed: int, *, speed: float = 1000.0) -> Durations:
        """Draw from measured phones; the median phone takes `speed` samples per second.

        The fastest tenth computes 9 times as fast as the slowest, and transfers 7 times as fast.
        """
        rng = stream(seed, "phones")
        times, rates = (
            rng.choice(np.array(table, float), len(clients))
            for table in (PHONE_MILLISECONDS, PHONE_KILOBYTES)
        )
        return cls._of(clients, speed * np.median(PHONE_MILLISECONDS) / times, 1024 * rates)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Durations:
        """Read a CSV file with the columns client, samples_per_second and bytes_per_second."""
        file = Path(path)
        if not file.exists():
            raise ConfigError(f"{path}: no such file of durations")
        clients, speeds = [], []
        with file.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            missing = set(COLUMNS).difference(rows.fieldnames or ())
            if missing:
                raise ConfigError(
                    f"{path}: no column {min(missing)!r}; needed: {', '.join(COLUMNS)}"
                )
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                clients.append(check_id(row["client"], f"{where}: client"))
                speeds.append([_rate(row, name, where) for name in COLUMNS[1:]])
        if len(set(clients)) < len(clients):
            raise ConfigError(f"{path}: a client appears twice")
        return cls._of(clients, *np.array(speeds, float).reshape(-1, 2).T)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV file that `read` reads."""
        text = io.StringIO()
        speeds = self.samples_per_second.items()
        csv.writer(text).writerows(
            [COLUMNS, *((c, s, self.bytes_per_second[c]) for c, s in speeds)]
        )
        write_atomically(path, text.getvalue().encode())

    @classmethod
    def _of(
        cls, clients: Sequence[ClientId], speeds: NDArray[Any], rates: NDArray[Any]
    ) -> Durations:
        samples, moved = (dict(zip(clients, v.tolist(), strict=True)) for v in (speeds, rates))
        return cls(samples, moved)

    def seconds(self, client: ClientId, samples: int, bytes_moved: int) -> float:
        """Return the time to process samples (epochs counted) and to move bytes."""
        if client not in self.samples_per_second:
            raise ConfigError(f"durations: client {client!r} has none")
        compute = samples / self.samples_per_second[client]
        return compute + bytes_moved / self.bytes_per_second[client]


def _rate(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{where}: {name}={row[name]!r} must be a number above 0")
    return value


@dataclass(frozen=True)
class Arrivals:
    """How a round ended.

    Attributes
    ----------
    used, cut : tuple of str
        Whose updates the round uses, and who finishes too late for it; in the order of selection.
    seconds : float
        When the round ended.
    slowest : str
        For whom it waited.
    extended : bool
        Whether nobody met the deadline, so that the round went on until the first update.
    working, waiting : float
        Seconds that clients computed and communicated in this round, and that those who were done
        waited for its end.
    """

    used: tuple[ClientId, ...]
    cut: tuple[ClientId, ...]
    seconds: float
    slowest: ClientId
    extended: bool
    working: float
    waiting: float


@dataclass(frozen=True)
class Pace:
    """How long a round waits, and what happens to updates that arrive later.

    By default it waits for everybody.

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

    Examples
    --------
    >>> pace = Pace(over_select=1.5)
    >>> pace.asked(2)
    3
    >>> closed = pace.close(2, {"ann": 5.0, "bob": 1.0, "cem": 3.0})
    >>> closed.used, closed.cut, closed.seconds
    (('bob', 'cem'), ('ann',), 3.0)
    """

    over_select: float = 1.0
    deadline: float | str | None = None
    late: Literal["drop", "next"] = "drop"
    staleness: float = 0.5

    def __post_init__(self) -> None:
        self._check("over_select", 1 <= self.over_select < math.inf, "at least 1")
        self._check("late", self.late in ("drop", "next"), "'drop' or 'next'")
        self._check("staleness", 0 <= self.staleness < math.inf, "at least 0")
        rule = "seconds above 0, a quantile such as '80%', or None"
        self._check("deadline", self._parsed() is not None, rule)

    def _check(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"Pace: {field}={getattr(self, field)!r} must be {rule}")

    def _parsed(self) -> tuple[float, bool] | None:
        """Return the deadline and whether it is a quantile; None if it is neither."""
        if self.deadline is None:
            return math.inf, False
        quantile = isinstance(self.deadline, str)
        try:
            value = float(str(self.deadline).removesuffix("%"))
        except ValueError:
            return None
        if quantile:
            fits = str(self.deadline).endswith("%") and 0 < value <= 100
        else:
            fits = 0 < value < math.inf
        return (value, quantile) if fits else None

    @property
    def waits_for_all(self) -> bool:
        """Whether a round waits for everybody that was asked."""
        return self.over_select == 1 and self.deadline is None

    def asked(self, wanted: int) -> int:
        """Return how many clients to ask for `wanted` updates."""
        return math.ceil(round(wanted * self.over_select, 9))

    def limit(self, measured: Iterable[float]) -> float:
        """Return the deadline in seconds, infinite while a quantile has nothing to go by."""
        value, quantile = self._parsed() or (math.inf, False)
        if not quantile:
            return value
        durations = list(measured)
        return float(np.percentile(durations, value)) if durations else math.inf

    def close(
        self,
        wanted: int,
        seconds: Mapping[ClientId, float],
        lost: Collection[ClientId] = (),
        limit: float = math.inf,
    ) -> Arrivals:
        """Return whose updates a round uses, and when it ends.

        Parameters
        ----------
        wanted : int
            Updates after which the round ends.
        seconds : mapping
            How long each selected client takes, in the order of selection, which decides ties.
        lost : collection of str
            Selected clients that never answer. The server cannot know that: it waits for them.
        limit : float
            The deadline in seconds, from `limit`.
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
        self, fresh: Sequence[float], late: Sequence[tuple[float, int]]
    ) -> list[float]:
        """Return the weights of a round's own updates and then of its late ones.

        Parameters
        ----------
        fresh : sequence of float
            Weights of the updates in time; their sum is kept.
        late : sequence of (float, int)
            The weight that each late update would have in time, and how many rounds late it is.

        Examples
        --------
        >>> Pace(staleness=1.0).stale_weights([0.5, 0.5], [(0.5, 1)])
        [0.4, 0.4, 0.2]
        """
        stale = [weight * (1.0 + rounds) ** -self.staleness for weight, rounds in late]
        total = sum(fresh) if fresh else sum(weight for weight, _ in late)
        scale = total / (sum(fresh) + sum(stale))
        return [weight * scale for weight in (*fresh, *stale)]
