"""A privacy budget, kept in a file across releases.

Releases of the same data compose in two ways, and the better bound counts: epsilons and deltas add
up; or their zero-concentrated costs rho add up and give epsilon = rho + 2 sqrt(rho ln(1 / delta))
for the ledger's delta (Bun and Steinke 2016), which grows like a square root for many releases.

Two ledgers know nothing of each other: whoever holds data keeps one for all of them. A release is
stored beside the ledger in the step that pays for it, until it has been delivered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock

from fedcohort.exceptions import BudgetExceeded, DataError
from fedcohort.options import Range, Whole, check_fields
from fedcohort.privacy.noise import Neighbors, check_budget
from fedcohort.privacy.release import Release
from fedcohort.storage import DAMAGED, make_folder, refuse_links, remove_leftovers, write_atomically

Amount = Annotated[float, Range(0, 1e100)]  # arithmetic on amounts cannot overflow


@dataclass(frozen=True)
class Account:
    """What has been spent."""

    epsilon: Amount = 0.0
    delta: Amount = 0.0
    rho: Amount = 0.0
    releases: Whole = 0
    neighbors: Neighbors = "add-remove"

    def __post_init__(self) -> None:
        check_fields(self, "spent")

    def after(self, release: Release) -> Account:
        """Return the account with one more release."""
        if release.parts != 1:
            raise ValueError(f"a merged sketch of {release.parts} parts is not one release")
        if self.releases and self.neighbors != release.neighbors:
            raise ValueError(
                f"earlier releases were for neighbors={self.neighbors!r}, this one for "
                f"{release.neighbors!r}; they do not add up"
            )
        added = {k: getattr(self, k) + getattr(release, k) for k in ("epsilon", "delta", "rho")}
        return Account(**added, releases=self.releases + 1, neighbors=release.neighbors)

    def total(self, delta: float) -> float:
        """Return the epsilon of everything spent, at the ledger's delta."""
        plain = self.epsilon if self.delta <= delta * (1 + 1e-9) else math.inf
        if delta == 0 or self.releases == 0:
            return plain
        return min(plain, self.rho + 2 * math.sqrt(self.rho * math.log(1 / delta)))


class BudgetLedger:
    """Refuses releases beyond one budget for all data of its owner.

    A JSON file, made at the first release. A symbolic link leads to the same ledger; hard links are
    refused, because writing through one would part it from the others.

    Examples
    --------
    >>> import tempfile
    >>> from fedcohort.privacy.release import noise_for
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = BudgetLedger(folder.name + "/budget.json", epsilon=1.0)
    >>> ledger.charge(noise_for(10, 0.75, 0.0, "add-remove"))
    >>> ledger.spent()
    0.75
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], epsilon: float, delta: float = 0.0) -> None:
        check_budget(epsilon, delta)
        self.path = Path(path).resolve()  # links end here; a later change of folder is harmless
        self.epsilon, self.delta = float(epsilon), float(delta)
        remove_leftovers(self.path.parent)
        self._read()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BudgetLedger:
        """Open a ledger that exists, with the budget that it holds."""
        return cls(path, *_load(Path(path))[:2])

    def spent(self) -> float:
        """Epsilon that has been spent, at the ledger's delta."""
        return self._read()[0].total(self.delta)

    def charge(self, *releases: Release) -> None:
        """Enter releases before they leave; BudgetExceeded, and nothing entered, if too much."""
        with self._lock():
            account, undelivered = self._read()
            self._write(self._after(account, releases), undelivered)

    def charge_and_store(
        self, releases: Sequence[Release], make: Callable[[], bytes], *, request: str
    ) -> bytes:
        """Pay for releases, all or none, then `make` them; keep the bytes until `delivered`.

        `request`, of letters and digits, names the releases and the data: what was paid for and not
        yet delivered returns the stored bytes, and costs nothing.
        """
        if not request.isalnum():
            raise ValueError(f"request={request!r} must be letters and digits")
        with self._lock():
            account, undelivered = self._read()
            self._remove_unpaid(undelivered)
            stored = self._store / request
            if request in undelivered and stored.exists():
                return stored.read_bytes()
            account = self._after(account, releases)
            make_folder(self._store)
            data = make()
            write_atomically(stored, data)
            self._write(account, {*undelivered, request})  # now it is paid for, and stored
        return data

    def delivered(self, *requests: str) -> None:
        """Forget the stored bytes of releases that have reached their place, all in one step."""
        with self._lock():
            account, undelivered = self._read()
            if undelivered & set(requests):
                undelivered -= set(requests)
                self._write(account, undelivered)
            self._remove_unpaid(undelivered)

    def _lock(self) -> FileLock:
        """Keep other processes from spending at the same time."""
        return FileLock(self.path.with_name(self.path.name + ".lock"))

    @property
    def _store(self) -> Path:
        store = self.path.with_name(self.path.name + ".undelivered")
        refuse_links(store)
        return store

    def _remove_unpaid(self, undelivered: Set[str]) -> None:
        """Delete stored releases that were delivered, or that a crash left before the payment."""
        for path in self._store.iterdir() if self._store.is_dir() else ():
            if path.name not in undelivered:
                path.unlink(missing_ok=True)

    def _after(self, account: Account, releases: Sequence[Release]) -> Account:
        before = account.total(self.delta)
        for release in releases:
            account = account.after(release)
        if account.total(self.delta) > self.epsilon * (1 + 1e-9):
            epsilon, delta = (sum(getattr(r, k) for r in releases) for k in ("epsilon", "delta"))
            why = f"a release of epsilon={epsilon:g}, delta={delta:g} is too much"
            if account.delta > self.delta and account.epsilon <= self.epsilon:
                why += f": the ledger's delta is {self.delta:g}"
            raise BudgetExceeded(
                f"{self.path}: epsilon={before:g} of {self.epsilon:g} is spent; {why}"
            )
        return account

    def _read(self) -> tuple[Account, set[str]]:
        """Return what was spent, and the requests that are paid for and not yet delivered."""
        if not self.path.exists():
            return Account(), set()
        if (links := self.path.stat().st_nlink) > 1:
            raise DataError(
                f"{self.path}: the ledger has {links} hard links, so its budget could be spent "
                "under each of them; keep one and delete the others"
            )
        epsilon, delta, account, undelivered = _load(self.path)
        if (epsilon, delta) != (self.epsilon, self.delta):
            raise DataError(
                f"{self.path} holds a budget of epsilon={epsilon}, delta={delta}, not "
                f"{self.epsilon:g}, {self.delta:g}; open it with its own"
            )
        return account, undelivered

    def _write(self, account: Account, undelivered: Set[str]) -> None:
        content: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        content["spent"] = asdict(account)
        if undelivered:
            content["undelivered"] = sorted(undelivered)
        write_atomically(self.path, json.dumps(content, indent=1).encode())


def _load(path: Path) -> tuple[float, float, Account, set[str]]:
    """Read a ledger file: its budget, what was spent, and the requests not yet delivered."""
    try:
        content = json.loads(path.read_text("utf-8"))
        undelivered = content.get("undelivered", [])
        if not isinstance(undelivered, list) or not all(map(str.isalnum, undelivered)):
            raise ValueError("undelivered must be a list of requests")
        budget = float(content["epsilon"]), float(content["delta"])
        check_budget(*budget)
        return *budget, Account(**content["spent"]), set(undelivered)
    except DAMAGED as error:
        raise DataError(f"{path} is not a budget ledger: {error}") from None
