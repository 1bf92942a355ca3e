"""The privacy budget of every client, kept in a file across releases.

Each release of the same data protects it less. A client's releases compose in two ways, and the
better bound counts: epsilons and deltas add up; or their zero-concentrated costs rho add up and
give epsilon = rho + 2 sqrt(rho ln(1 / delta)) for the ledger's delta (Bun and Steinke 2016), which
for many releases grows like a root only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcohort.atomic import write_atomically
from fedcohort.exceptions import BudgetExceeded, DataError
from fedcohort.privacy.calibration import Neighbors, check_budget, sensitivity
from fedcohort.privacy.release import Release, noise_for

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch


@dataclass(frozen=True)
class Account:
    """What one client has spent."""

    epsilon: float = 0.0
    delta: float = 0.0
    rho: float = 0.0
    releases: int = 0
    neighbors: Neighbors = "add-remove"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "rho", "releases"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} is no amount")
        sensitivity(1, self.neighbors)

    def after(self, release: Release) -> Account:
        """Return the account with one more release."""
        if self.releases and self.neighbors != release.neighbors:
            raise ValueError(
                f"earlier releases were for neighbors={self.neighbors!r}, this one for "
                f"{release.neighbors!r}; they do not add up"
            )
        return Account(
            self.epsilon + release.epsilon,
            self.delta + release.delta,
            self.rho + release.rho,
            self.releases + 1,
            release.neighbors,
        )

    def total(self, delta: float) -> float:
        """Return the epsilon of everything spent, at the ledger's delta."""
        plain = self.epsilon if self.delta <= delta * (1 + 1e-9) else math.inf
        if delta == 0 or self.releases == 0:
            return plain
        return min(plain, self.rho + 2 * math.sqrt(self.rho * math.log(1 / delta)))


class BudgetLedger:
    """Refuses releases beyond a budget per client.

    Parameters
    ----------
    path : str or path
        A JSON file, written whole or not at all; made at the first release.
    epsilon, delta : float
        The budget of every client, over all its releases.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = BudgetLedger(folder.name + "/budget.json", epsilon=1.0)
    >>> ledger.spend("hospital-a", noise_for(10, 0.75, 0.0, "add-remove"))
    >>> ledger.remaining("hospital-a")
    0.25
    >>> ledger.spend("hospital-a", noise_for(10, 0.5, 0.0, "add-remove"))
    Traceback (most recent call last):
    fedcohort.exceptions.BudgetExceeded: 'hospital-a' has spent epsilon=0.75 of 1; ...
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], epsilon: float, delta: float = 0.0) -> None:
        check_budget(epsilon, delta)
        self.path = Path(path)
        self.epsilon = float(epsilon)
        self.delta = float(delta)
        self._read()

    def spent(self, client: str) -> float:
        """Epsilon that the client has spent, at the ledger's delta."""
        return self._read().get(client, Account()).total(self.delta)

    def remaining(self, client: str) -> float:
        """Epsilon left under plain addition; composition may allow a little more."""
        return max(0.0, self.epsilon - self.spent(client))

    def spend(self, client: str, release: Release) -> None:
        """Enter a release before it leaves; BudgetExceeded, and nothing entered, if too much."""
        if release.parts != 1:
            raise ValueError(
                f"a merged sketch of {release.parts} parts is no release of {client!r}"
            )
        with _locked(self.path):
            accounts = self._read()
            before = accounts.get(client, Account())
            after = before.after(release)
            if after.total(self.delta) > self.epsilon * (1 + 1e-9):
                raise BudgetExceeded(
                    f"{client!r} has spent epsilon={before.total(self.delta):g} of "
                    f"{self.epsilon:g}; a release of epsilon={release.epsilon:g}, "
                    f"delta={release.delta:g} is too much"
                )
            self._write({**accounts, client: after})

    def release(
        self,
        client: str,
        sketch: RaceSketch,
        epsilon: float,
        delta: float = 0.0,
        neighbors: Neighbors = "add-remove",
        **options: Any,
    ) -> RaceSketch:
        """Spend first, then return the private sketch; options as in `RaceSketch.privatize`."""
        self.spend(client, noise_for(sketch.rows, epsilon, delta, neighbors))
        return sketch.privatize(epsilon, delta, neighbors, **options)

    def _read(self) -> dict[str, Account]:
        if not self.path.exists():
            return {}
        try:
            held = json.loads(self.path.read_text("utf-8"))
            accounts = {str(c): Account(**a) for c, a in held["clients"].items()}
            budget = held["epsilon"], held["delta"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self.path} is no budget ledger: {error}") from None
        if budget != (self.epsilon, self.delta):
            raise DataError(
                f"{self.path} holds a budget of epsilon={budget[0]}, delta={budget[1]}, not "
                f"{self.epsilon:g}, {self.delta:g}; open it with its own"
            )
        return accounts

    def _write(self, accounts: dict[str, Account]) -> None:
        clients = {client: asdict(account) for client, account in sorted(accounts.items())}
        held = {"epsilon": self.epsilon, "delta": self.delta, "clients": clients}
        write_atomically(self.path, json.dumps(held, indent=1).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from spending at the same time, where the system has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
