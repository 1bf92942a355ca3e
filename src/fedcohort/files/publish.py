"""From exact sketches to files that leave the site: noise, budget, and nothing overwritten.

A private release is paid for and stored beside the budget ledger in one step, then written to its
place, then forgotten (`BudgetLedger.charge_and_store`). After a crash the same command on the same
data delivers what was paid for, without paying again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.sketching import INDEX
from fedcohort.files.spec import ReleaseOptions
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import signal_to_noise
from fedcohort.rounds import check_id
from fedcohort.sketch.race import RaceSketch
from fedcohort.storage import write_atomically

STAGING = ".staging"
MAX_STEM = 100
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class FileNames:
    """Gives every client a file name of its own that stays inside its folder.

    Letters, digits, ``.``, ``_`` and ``-`` stay; anything else becomes ``_`` and the name gets a
    digest of the id, as do names that would meet another on a system that ignores case.

    Examples
    --------
    >>> names = FileNames()
    >>> names.of("site-a"), names.of("../../etc/passwd"), names.of("Site-A")
    ('site-a.sketch', 'etc_passwd-4d606f08.sketch', 'Site-A-f6b6c7bf.sketch')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, client: str) -> str:
        """Return the file name of a client's sketch."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", client).strip("._-")[:MAX_STEM]
        plain = safe == client != "" and not RESERVED.fullmatch(safe)
        if not plain or safe.lower() in self._taken:
            digest = hashlib.blake2b(client.encode("utf-8", "surrogatepass")).hexdigest()
            safe = f"{safe or 'client'}-{digest[:8]}"
            while safe.lower() in self._taken:
                digest = digest[1:]
                safe = f"{safe}{digest[0]}"
        self._taken.add(safe.lower())
        return f"{safe}.sketch"


class Written(NamedTuple):
    """One sketch that was written."""

    client: str
    file: str
    n: float
    bytes: int
    signal_to_noise: float


@dataclass(frozen=True)
class Target:
    """Where sketches go: one file, or with `many` a folder of them.

    `inputs` must never be replaced; other files, and a folder's set of sketches, by `force`.
    """

    out: Path
    inputs: tuple[Path, ...]
    many: bool = False
    force: bool = False

    def check(self) -> None:
        """Refuse, before any data are read, what would destroy something or cannot be written."""
        folder = self.out if self.many else self.out.parent
        with writing(self.out):
            if self.many and not self.out.exists():
                folder.mkdir(parents=True)
            writable = folder.is_dir() and os.access(folder, os.W_OK)
        if not writable or (self.out.is_dir() and not self.many):
            raise DataError(f"{self.out}: cannot be written; {folder} must be a folder to write to")
        if not self.many:
            check_output(self.out, self.inputs, self.force)
            return
        present = sorted(p.name for p in sketches_in(self.out))
        if present and not self.force:
            raise DataError(
                f"{self.out}: the folder holds {len(present)} sketches ({present[0]}, ...); choose "
                "another one, or add --force to replace them all"
            )


def check_output(out: Path, inputs: Iterable[Path], force: bool) -> None:
    """Refuse to replace an input, and to replace any other file without `force`."""
    if not out.exists():
        return
    for path in inputs:
        inside = path.is_dir() and out.resolve().is_relative_to(path.resolve())
        if path.exists() and (path.samefile(out) or inside):
            raise DataError(f"-o {out}: this is an input, which would be lost; name another file")
    if not force:
        raise DataError(f"-o {out}: the file exists; add --force to replace it")


def sketches_in(folder: Path) -> list[Path]:
    """Return the sketches and the index of a folder."""
    return [*folder.glob("*.sketch"), *folder.glob(INDEX)]


class Publisher:
    """Writes sketches, with noise and on a budget where those were asked for.

    Everything that can be refused is refused here, before the data are read.

    Parameters
    ----------
    target : Target
    release : ReleaseOptions
        The private release; none without epsilon.
    ledger : BudgetLedger, optional
        Pays for the release. The sketches of all clients of a table are paid for once: each record
        is in one of them.
    """

    def __init__(
        self,
        target: Target,
        release: ReleaseOptions,
        ledger: BudgetLedger | None = None,
    ) -> None:
        if ledger is not None and release.epsilon is None:
            raise ConfigError("--budget needs --epsilon: exact sketches are not a private release")
        target.check()
        self.target, self.release, self.ledger = target, release, ledger
        self.written: list[Written] = []
        self.last: RaceSketch | None = None
        self._request = ""

    def write(self, sketch: RaceSketch) -> None:
        """Make one sketch private if asked for, and save it."""
        name = self.target.out.stem
        for _, content in self._contents([(name, sketch)]):
            self._save(self.target.out, name, content)
        self._deliver()

    def write_all(self, sketches: Iterable[tuple[str, RaceSketch]]) -> None:
        """Write the sketches of all clients and the index that says whose they are.

        They are written aside and put in place together, so that a folder never holds a mixture
        of an old set and a new one.
        """
        names, index = FileNames(), {}
        staging = self.target.out / STAGING
        with writing(staging):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        try:
            for client, content in self._contents(sketches):
                index[name := names.of(check_id(client))] = client
                self._save(staging / name, client, content)
            self._put_in_place(staging, index)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._deliver()

    def _put_in_place(self, staging: Path, index: dict[str, str]) -> None:
        out = self.target.out
        with writing(out):
            for path in sketches_in(out):
                path.unlink()
            # The index comes first: a set that is not complete is then known as such.
            write_atomically(out / INDEX, json.dumps(index, indent=1, sort_keys=True).encode())
            for name in index:
                os.replace(staging / name, out / name)
        self.written = [w._replace(file=str(out / Path(w.file).name)) for w in self.written]

    def _save(self, path: Path, client: str, content: bytes) -> None:
        with writing(path):
            write_atomically(path, content)
        sketch = RaceSketch.from_bytes(content)
        written = Written(client, str(path), sketch.n, len(content), signal_to_noise(sketch))
        self.written.append(written)
        self.last = sketch

    def _contents(self, sketches: Iterable[tuple[str, RaceSketch]]) -> Iterator[tuple[str, bytes]]:
        """Yield the bytes that leave by client: exact, private, or private and paid for."""
        release, ledger = self.release, self.ledger
        if release.epsilon is None or ledger is None:
            for client, sketch in sketches:
                out = sketch if release.epsilon is None else release.private(sketch)
                yield client, out.to_bytes()
            return
        exact = [(client, sketch.to_bytes()) for client, sketch in sketches]
        clients = [client for client, _ in exact]

        def make() -> bytes:
            return _packed([release.private(RaceSketch.from_bytes(c)).to_bytes() for _, c in exact])

        self._request = self._named(exact)
        with writing(ledger.path):
            costs = release.costs(RaceSketch.from_bytes(exact[0][1]))
            content = ledger.charge_and_store(costs, make, request=self._request)
        yield from zip(clients, _unpacked(content), strict=True)

    def _named(self, exact: Sequence[tuple[str, bytes]]) -> str:
        digest = hashlib.blake2b(json.dumps(asdict(self.release)).encode(), digest_size=16)
        for client, content in exact:
            digest.update(hashlib.blake2b(client.encode("utf-8", "surrogatepass")).digest())
            digest.update(hashlib.blake2b(content).digest())
        return digest.hexdigest()

    def _deliver(self) -> None:
        if self.ledger is not None and self._request:
            self.ledger.delivered(self._request)


def _packed(parts: Sequence[bytes]) -> bytes:
    return json.dumps([len(part) for part in parts]).encode() + b"\n" + b"".join(parts)


def _unpacked(content: bytes) -> Iterator[bytes]:
    start = content.index(b"\n") + 1
    for length in json.loads(content[:start]):
        yield content[start : start + length]
        start += length


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a line that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
