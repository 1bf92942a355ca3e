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
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.sketching import INDEX
from fedcohort.files.spec import ReleaseOptions
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import signal_to_noise
from fedcohort.sketch.race import RaceSketch
from fedcohort.storage import make_folder, remove_leftovers, write_atomically

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


class Publisher:
    """Writes sketches, with noise and on a budget where those were asked for.

    Everything that can be refused is refused here, before the data are read.

    Parameters
    ----------
    out : Path
        One file, or with `many` a folder of sketches.
    data : Path
        The input, which is never replaced; other files, and a folder's set of sketches, by `force`.
    release : ReleaseOptions
        The private release; none without epsilon.
    ledger : BudgetLedger, optional
        Pays for the release. The sketches of all clients of a table are paid for once: each record
        is in one of them.
    """

    def __init__(
        self,
        out: Path,
        data: Path,
        release: ReleaseOptions,
        ledger: BudgetLedger | None = None,
        *,
        many: bool = False,
        force: bool = False,
    ) -> None:
        if ledger is not None and release.epsilon is None:
            raise ConfigError("--budget needs --epsilon: exact sketches are not a private release")
        self.out, self.release, self.ledger = out, release, ledger
        self.written: list[Written] = []
        self.last: RaceSketch | None = None
        folder = out if many else out.parent
        if many and not out.is_file():
            make_folder(folder)
        if not (folder.is_dir() and os.access(folder, os.W_OK)) or (out.is_dir() and not many):
            raise DataError(f"{out}: cannot be written; {folder} must be a folder to write to")
        remove_leftovers(folder)
        if not many:
            check_output(out, [data], force)
        elif not force and (present := sorted(self._present())):
            raise DataError(
                f"{out}: the folder holds {len(present)} sketches ({present[0].name}, ...); choose "
                "another one, or add --force to replace them all"
            )

    def write(self, sketch: RaceSketch) -> None:
        """Make one sketch private if asked for, and save it."""
        request, contents = self._contents([(self.out.stem, sketch)])
        for client, content in contents:
            self._save(self.out, self.out, client, content)
        self._deliver(request)

    def write_all(self, sketches: Iterable[tuple[str, RaceSketch]]) -> None:
        """Write the sketches of all clients and the index that says whose they are.

        They are written aside and put in place together, so that a folder never holds a mixture
        of an old set and a new one.
        """
        names, index, staging = FileNames(), dict[str, str](), self.out / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            request, contents = self._contents(sketches)
            for client, content in contents:
                index[name := names.of(client)] = client
                self._save(staging / name, self.out / name, client, content)
            for path in self._present():
                path.unlink()
            # The index comes first: a set that is not complete is then known as such.
            write_atomically(self.out / INDEX, json.dumps(index, indent=1, sort_keys=True).encode())
            for name in index:
                os.replace(staging / name, self.out / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._deliver(request)

    def _present(self) -> list[Path]:
        return [*self.out.glob("*.sketch"), *self.out.glob(INDEX)]

    def _save(self, path: Path, final: Path, client: str, content: bytes) -> None:
        write_atomically(path, content)
        self.last = sketch = RaceSketch.from_bytes(content)
        noise = signal_to_noise(sketch)
        self.written.append(Written(client, str(final), sketch.n, len(content), noise))

    def _contents(
        self, sketches: Iterable[tuple[str, RaceSketch]]
    ) -> tuple[str, Iterable[tuple[str, bytes]]]:
        """Return the bytes that leave by client, and the request by which they were paid for."""
        release, ledger = self.release, self.ledger
        if release.epsilon is None:
            return "", ((client, sketch.to_bytes()) for client, sketch in sketches)
        if ledger is None:
            return "", ((client, release.private(sketch).to_bytes()) for client, sketch in sketches)
        exact = [(client, sketch.to_bytes()) for client, sketch in sketches]

        def make() -> bytes:
            return _packed([release.private(RaceSketch.from_bytes(c)).to_bytes() for _, c in exact])

        digest = hashlib.blake2b(json.dumps(asdict(release)).encode(), digest_size=16)
        for client, content in exact:
            digest.update(hashlib.blake2b(client.encode("utf-8", "surrogatepass")).digest())
            digest.update(hashlib.blake2b(content).digest())
        costs = release.costs(RaceSketch.from_bytes(exact[0][1]))
        packed = ledger.charge_and_store(costs, make, request=digest.hexdigest())
        clients = [client for client, _ in exact]
        return digest.hexdigest(), zip(clients, _unpacked(packed), strict=True)

    def _deliver(self, request: str) -> None:
        if self.ledger is not None and request:
            self.ledger.delivered(request)


def _packed(parts: Sequence[bytes]) -> bytes:
    return json.dumps([len(part) for part in parts]).encode() + b"\n" + b"".join(parts)


def _unpacked(content: bytes) -> Iterator[bytes]:
    start = content.index(b"\n") + 1
    for length in json.loads(content[:start]):
        yield content[start : start + length]
        start += length
