"""Sketch a source, all of it or each of its clients; write sketch files, and load them again.

A private release is paid for and stored beside the budget ledger in one step, then written to its
place, then forgotten: after a crash the same command delivers what was paid for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort.exceptions import ConfigError, DataError, IncompatibleSketches, InvalidSketch
from fedcohort.files.columns import columns_of
from fedcohort.files.marginals import bins_of, copies
from fedcohort.files.source import Block, Source
from fedcohort.files.spec import ReleaseOptions
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import signal_to_noise
from fedcohort.rounds import check_id
from fedcohort.sketch.race import RaceSketch
from fedcohort.storage import make_folder, remove_leftovers, write_atomically

OnRows = Callable[[int], None]
INDEX = "clients.json"
ALL_ROWS = ""  # the client of data without client ids
NO_ROWS = "the data have no rows, so there is nothing to sketch"
MEMORY = 512 << 20  # for the sketches of one pass over the data
STAGING = ".staging"
MAX_STEM = 100
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
ONE_BUCKET = 0.8  # share of the records in the fullest bucket of a row, on average


def sketch_clients(
    source: Source, empty: RaceSketch, on_rows: OnRows | None = None, memory: int = MEMORY
) -> Iterator[tuple[str, RaceSketch]]:
    """Yield every client's name and sketch, in the order of their first rows.

    Data without client ids are one client, `ALL_ROWS`. Where the sketches of all clients would
    take more than `memory` bytes, each pass over the data makes those of the next clients.
    """
    max_clients = max(1, memory // empty.counts.nbytes)
    done: set[str] = set()
    while by_client := sketch_parts(source, empty, done, max_clients, on_rows):
        yield from by_client.items()
        done |= by_client.keys()
        if len(by_client) < max_clients:
            break
    if not done:
        raise DataError(NO_ROWS)


def sketch_parts(
    source: Source,
    empty: RaceSketch,
    done: Collection[str] = (),
    max_clients: float = math.inf,
    on_rows: OnRows | None = None,
) -> dict[str, RaceSketch]:
    """Make one pass; return a sketch per client, but of at most `max_clients` and none `done`."""
    by_client: dict[str, RaceSketch] = {}
    for block in source.blocks():
        bins = None if empty.marginals is None else bins_of(source.columns, block.parts)
        for client, rows in _groups(block):
            if client not in by_client:
                if client in done or len(by_client) >= max_clients:
                    continue
                if block.clients is not None:
                    check_id(client)
                by_client[client] = empty.empty_like()
            sketch, y = by_client[client], None if block.y is None else block.y[rows]
            try:
                sketch.add(_take(block.x, rows), y)
            except ValueError as error:  # such as a label beyond the last class
                raise DataError(str(error)) from None
            if sketch.marginals is not None and bins is not None:
                sketch.marginals.add(bins[rows])
        if on_rows is not None:
            on_rows(len(block.x))
    return by_client


def _groups(block: Block) -> Iterable[tuple[str, Any]]:
    """Return each client with the positions of its rows, first come first."""
    if block.clients is None:
        return [(ALL_ROWS, slice(None))] if len(block.x) else []
    where: dict[str, list[int]] = {}
    for row, client in enumerate(block.clients.tolist()):
        where.setdefault(client, []).append(row)
    return where.items()


def _take(items: Any, rows: Any) -> Any:
    if isinstance(items, np.ndarray) or isinstance(rows, slice):
        return items[rows]
    return [items[i] for i in rows]


class FileNames:
    """Gives every client a file name of its own, inside its folder and on every system.

    Anything but letters, digits, ``.``, ``_`` and ``-`` becomes ``_``; such names, and those that
    differ from another by case only, get a digest of the id.

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
            lengths = range(8, len(digest) + 1)
            names = (f"{safe or 'client'}-{digest[:length]}" for length in lengths)
            safe = next(name for name in names if name.lower() not in self._taken)
        self._taken.add(safe.lower())
        return f"{safe}.sketch"


class Written(NamedTuple):
    """What was written of a sketch."""

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

    `out` is one file, or with `many` a folder of sketches. What is there is replaced only by
    `force`, the input `data` never. The ledger pays once for the sketches of all clients of a
    table: each record is in one of them. All that can be refused is refused before data are read.
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
        self.out, self.release, self.ledger, self._many = out, release, ledger, many
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

    def write(self, sketches: Iterable[tuple[str, RaceSketch]]) -> None:
        """Make sketches private if asked for, and save them, or the only one as a file."""
        if not self._many:
            sketches = ((self.out.stem, sketch) for _, sketch in sketches)
        with self._paid(sketches) as contents:
            if self._many:
                self._write_set(contents)
            else:
                ((client, content),) = contents
                self._save(self.out, self.out, client, content)

    def _write_set(self, contents: Iterable[tuple[str, bytes]]) -> None:
        """Write the sketches of all clients and the index that says whose they are.

        They are written aside and put in place together, so that a folder never holds a mixture
        of an old set and a new one.
        """
        names, index, staging = FileNames(), dict[str, str](), self.out / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
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

    def _present(self) -> list[Path]:
        return [*self.out.glob("*.sketch"), *self.out.glob(INDEX)]

    def _save(self, path: Path, final: Path, client: str, content: bytes) -> None:
        write_atomically(path, content)
        self.last = sketch = RaceSketch.from_bytes(content)
        noise = signal_to_noise(sketch)
        self.written.append(Written(client, str(final), sketch.n, len(content), noise))

    @contextmanager
    def _paid(
        self, sketches: Iterable[tuple[str, RaceSketch]]
    ) -> Iterator[Iterable[tuple[str, bytes]]]:
        """Give the bytes that leave; when they are in place, the ledger forgets them."""
        release, ledger = self.release, self.ledger
        if ledger is None:
            noisy = ((c, s if release.epsilon is None else release.private(s)) for c, s in sketches)
            yield ((client, sketch.to_bytes()) for client, sketch in noisy)
            return
        exact = [(client, sketch.to_bytes()) for client, sketch in sketches]

        def make() -> bytes:
            noisy = (release.private(RaceSketch.from_bytes(c)).to_bytes() for _, c in exact)
            return json.dumps([b64encode(content).decode() for content in noisy]).encode()

        digest = hashlib.blake2b(json.dumps(asdict(release)).encode(), digest_size=16)
        for client, content in exact:
            digest.update(hashlib.blake2b(client.encode("utf-8", "surrogatepass")).digest())
            digest.update(hashlib.blake2b(content).digest())
        costs = release.costs(RaceSketch.from_bytes(exact[0][1]))
        stored = json.loads(ledger.charge_and_store(costs, make, request=digest.hexdigest()))
        yield zip((client for client, _ in exact), map(b64decode, stored), strict=True)
        ledger.delivered(digest.hexdigest())


def load_sketch(path: Path) -> RaceSketch:
    """Load one sketch; errors name the file."""
    try:
        sketch = RaceSketch.load(path)
        columns_of(sketch)
        return sketch
    except InvalidSketch as error:
        named = "" if str(path) in str(error) else f"{path}: "
        raise InvalidSketch(f"{named}{error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def load_alike(paths: Sequence[Path]) -> Iterator[tuple[Path, RaceSketch]]:
    """Yield sketches one by one, each checked against the first.

    Merged sketches that lie in a folder are left out: their data are those of the others.
    """
    given = set(paths)
    first: tuple[Path, RaceSketch] | None = None
    for path in sketch_files(paths):
        sketch = load_sketch(path)
        if path not in given and sketch.origin.get("merged"):
            continue
        first = first or (path, sketch)
        try:
            first[1].check_alike(sketch)
        except IncompatibleSketches as error:
            raise IncompatibleSketches(f"{first[0]} and {path} are unlike: {error}") from None
        yield path, sketch


def sketch_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and the sketches inside the folders; none may come twice."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.sketch")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: no .sketch files in this folder")
        lost = [name for name in _index(path) if not (path / name).is_file()]
        if lost:
            raise DataError(
                f"{path}: the set of sketches is not complete, {len(lost)} are missing "
                f"({lost[0]}, ...); make it again"
            )
        files += inside
    times = Counter(path.resolve() for path in files)
    for path in files:
        if times[path.resolve()] > 1:
            raise DataError(f"{path}: given twice")
    return files


def client_names(paths: Sequence[Path]) -> list[str]:
    """Return the clients of sketch files, from the folder's index or else from the file names.

    Two clients of one name are called by their paths.
    """
    indexes = {folder: _index(folder) for folder in {path.parent for path in paths}}
    names = [indexes[path.parent].get(path.name, path.stem) for path in paths]
    uses = Counter(names)
    return [name if uses[name] == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def _index(folder: Path) -> dict[str, str]:
    try:
        names = json.loads((folder / INDEX).read_text("utf-8"))
        return {k: v for k, v in names.items() if isinstance(v, str) and v}
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}  # no index, or somebody else's file of that name


def concentration(counts: Any, n: float) -> float:
    """Return the share of the records in the fullest bucket, averaged over rows."""
    return float(counts.max(axis=1).mean() / n)


def sketch_warnings(sketch: RaceSketch) -> list[str]:
    """Say why an exact sketch cannot tell anything apart, and whether its records are copies."""
    messages = []
    if sketch.n >= 10 and concentration(sketch.counts, sketch.n) > ONE_BUCKET:
        remedy = "choose a smaller width, or scale the columns"
        if sketch.family.name == "srp":
            remedy = "set center=... or hash=pstable: srp compares directions from 0"
        messages.append(
            f"most records fall into one bucket, so that every distance will be about 0: {remedy}"
        )
    if (times := copies(sketch)) > 1:
        messages.append(f"every record seems to be there {times} times: remove the copies")
    return messages


def same_data(sketches: Sequence[RaceSketch], names: Sequence[str]) -> list[str]:
    """Say which clients seem to hold records several times, or the data of another one."""
    messages, equal = [], dict[bytes, list[str]]()
    for sketch, name in zip(sketches, names, strict=True):
        if sketch.n:
            digest = hashlib.blake2b(sketch.counts.tobytes(), digest_size=16).digest()
            equal.setdefault(digest, []).append(name)
        if (times := copies(sketch)) > 1:
            messages.append(
                f"Every record of {name} seems to be there {times} times: all counts are "
                f"multiples of {times}. Remove the copies."
            )
    for twins in (names for names in equal.values() if len(names) > 1):
        listed = ", ".join(twins[:8]) + (", ..." if len(twins) > 8 else "")
        messages.append(f"The sketches of {listed} are equal: the same data twice?")
    return messages
