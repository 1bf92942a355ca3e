"""The privacy budget of every client, kept in a file across releases.

Each release of the same data protects it less. A client's releases compose in two ways, and the
better bound counts: epsilons and deltas add up; or their zero-concentrated costs rho add up and
give epsilon = rho + 2 sqrt(rho ln(1 / delta)) for the ledger's delta (Bun and Steinke 2016), which
for many releases grows only like a square root.

The budget belongs to the data. The ledger keeps a salted fingerprint of the data of each client,
so that the same data under a second name are refused. It never leaves the client.

A release is paid for in the same step that stores it, in a folder beside the ledger, and is kept
there until it has been delivered: after a crash the same request returns it without paying again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcohort.exceptions import BudgetExceeded, ConfigError, DataError
from fedcohort.privacy.calibration import Neighbors, check_budget, sensitivity
from fedcohort.privacy.release import Release, noise_for
from fedcohort.rounds import check_id
from fedcohort.storage import remove_leftovers, write_atomically

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

MAX_AMOUNT = 1e100  # of epsilon, delta, rho or releases: arithmetic on amounts cannot overflow


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
            if type(value) not in (int, float) or not 0 <= value <= MAX_AMOUNT:
                raise ValueError(f"{name}={str(value)[:80]} is not an amount")
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


@dataclass
class _Content:
    """What a ledger file holds."""

    accounts: dict[str, Account] = field(default_factory=dict)
    undelivered: dict[str, str] = field(default_factory=dict)  # request -> client
    data: dict[str, str] = field(default_factory=dict)  # fingerprint -> client
    salt: str = field(default_factory=lambda: secrets.token_hex(16))

    def digest(self, fingerprint: bytes) -> str:
        """Return a fingerprint as the ledger keeps it: salted, so that it tells others nothing."""
        return hashlib.blake2b(
            fingerprint, key=bytes.fromhex(self.salt), digest_size=16
        ).hexdigest()


class BudgetLedger:
    """Refuses releases beyond a budget per client.

    Parameters
    ----------
    path : str or path
        A JSON file, written whole or not at all; made at the first release. A symbolic link leads
        to the same ledger. A ledger with several hard links is refused, because writing through
        one of them would part it from the others.
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
        self.path = Path(path).resolve()  # links end here; a later change of folder is harmless
        self.epsilon = float(epsilon)
        self.delta = float(delta)
        remove_leftovers(self.path.parent)
        self._read()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BudgetLedger:
        """Open a ledger that exists, with the budget that it holds."""
        try:
            held = json.loads(Path(path).read_text("utf-8"))
            epsilon, delta = float(held["epsilon"]), float(held["delta"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not a budget ledger: {error}") from None
        return cls(path, epsilon, delta)

    def spent(self, client: str) -> float:
        """Epsilon that the client has spent, at the ledger's delta."""
        return self._read().accounts.get(check_id(client), Account()).total(self.delta)

    def remaining(self, client: str) -> float:
        """Epsilon left under plain addition; composition may allow a little more."""
        return max(0.0, self.epsilon - self.spent(client))

    def spend(self, client: str, *releases: Release) -> None:
        """Enter releases before they leave; BudgetExceeded, and nothing entered, if too much."""
        with _locked(self.path):
            held = self._read()
            held.accounts[client] = self._after(held, client, releases)
            self._write(held)

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

    def charge_and_store(
        self,
        client: str,
        releases: Sequence[Release],
        make: Callable[[], bytes],
        *,
        request: str,
        fingerprints: Sequence[bytes] = (),
    ) -> bytes:
        """Pay for a release, store it until `delivered`, and return its bytes.

        Parameters
        ----------
        client : str
            Whose account is charged.
        releases : sequence of Release
            What is paid for, all of it or nothing.
        make : callable
            Makes the bytes to release; called only if the budget allows it.
        request : str
            Names the release: letters and digits. A request that was paid for and not yet
            delivered returns the stored bytes, and costs nothing.
        fingerprints : sequence of bytes
            Of the data. ConfigError if another client has released data with one of them.
        """
        if not request.isalnum():
            raise ValueError(f"request={request!r} must be letters and digits")
        with _locked(self.path):
            held = self._read()
            self._remove_unpaid(held)
            kept = self._store / request
            if request in held.undelivered and kept.exists():
                return kept.read_bytes()
            for fingerprint in fingerprints:
                _claim_data(held, client, fingerprint, self.path)
            held.accounts[client] = self._after(held, client, releases)
            self._store.mkdir(exist_ok=True)
            content = make()
            write_atomically(kept, content)
            held.undelivered[request] = client
            self._write(held)  # from here on it is paid for, and stored
        return content

    def delivered(self, *requests: str) -> None:
        """Forget the stored bytes of releases that have reached their place.

        Releases that belong together are forgotten in one step: if a crash came between them, the
        same requests would pay again for those already forgotten.
        """
        with _locked(self.path):
            held = self._read()
            found = [held.undelivered.pop(r) for r in requests if r in held.undelivered]
            if found:
                self._write(held)
            self._remove_unpaid(held)

    @property
    def _store(self) -> Path:
        return self.path.with_name(self.path.name + ".undelivered")

    def _remove_unpaid(self, held: _Content) -> None:
        """Delete stored releases that were delivered, or that a crash left before the payment."""
        if not self._store.is_dir():
            return
        for path in self._store.iterdir():
            if path.name not in held.undelivered:
                path.unlink(missing_ok=True)

    def _after(self, held: _Content, client: str, releases: Sequence[Release]) -> Account:
        before = after = held.accounts.get(check_id(client), Account())
        for release in releases:
            if release.parts != 1:
                raise ValueError(
                    f"a merged sketch of {release.parts} parts is not a release of {client!r}"
                )
            after = after.after(release)
        if after.total(self.delta) > self.epsilon * (1 + 1e-9):
            epsilon, delta = (sum(getattr(r, k) for r in releases) for k in ("epsilon", "delta"))
            raise BudgetExceeded(
                f"{client!r} has spent epsilon={before.total(self.delta):g} of {self.epsilon:g}; "
                f"a release of epsilon={epsilon:g}, delta={delta:g} is too much"
            )
        return after

    def _read(self) -> _Content:
        if not self.path.exists():
            return _Content()
        if (links := self.path.stat().st_nlink) > 1:
            raise DataError(
                f"{self.path}: the ledger has {links} hard links, so its budget could be spent "
                "under each of them; keep one and delete the others"
            )
        try:
            held = json.loads(self.path.read_text("utf-8"))
            accounts = {str(c): Account(**a) for c, a in held["clients"].items()}
            content = _Content(accounts)
            if "data" in held or "undelivered" in held:
                content.undelivered = _texts(held.get("undelivered", {}))
                content.data, content.salt = _texts(held.get("data", {})), held["salt"]
            content.digest(b"")
            budget = held["epsilon"], held["delta"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{self.path} is not a budget ledger: {error}") from None
        if budget != (self.epsilon, self.delta):
            raise DataError(
                f"{self.path} holds a budget of epsilon={budget[0]}, delta={budget[1]}, not "
                f"{self.epsilon:g}, {self.delta:g}; open it with its own"
            )
        return content

    def _write(self, held: _Content) -> None:
        clients = {client: asdict(account) for client, account in sorted(held.accounts.items())}
        written: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "clients": clients}
        if held.undelivered or held.data:
            written |= {
                "undelivered": held.undelivered,
                "data": held.data,
                "salt": held.salt,
            }
        write_atomically(self.path, json.dumps(written, indent=1).encode())


def _claim_data(held: _Content, client: str, fingerprint: bytes, path: Path) -> None:
    """Enter the data as those of the client; refuse data that another client has released."""
    digest = held.digest(fingerprint)
    owner = held.data.setdefault(digest, client)
    if owner != client:
        raise ConfigError(
            f"{path}: these data were released before, by {owner!r}; their budget is that of "
            f"{owner!r}, not of {client!r}"
        )


def _texts(value: Any) -> dict[str, str]:
    """Check a mapping of texts to texts."""
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError("it must map names to clients")
    return dict(value)


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
