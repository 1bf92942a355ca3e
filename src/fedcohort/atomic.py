"""Files that survive crashes: written whole or not at all, locked while a process writes them.

A file is written under a temporary name, synced and renamed. A killed writer can leave the
temporary file behind; `remove_leftovers` deletes those whose writer is gone. A writer holds a lock
on its temporary file, so the file of a live writer is never deleted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedcohort.exceptions import FolderInUse

try:
    import fcntl
except ImportError:  # Windows: no locks, and leftovers are not removed
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".fedcohort-tmp"
LOCK = ".lock"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    The file gets the permissions of any new file. The file and the folder's entry for it are
    synced, so that they also survive a power cut. A device or a pipe, such as ``/dev/stdout``, is
    written to and never replaced; a symbolic link stays, and the file it leads to is replaced.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/x", b"abc")
    ...     Path(f"{folder}/x").read_bytes()
    b'abc'
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # refuses a folder
        return
    target = Path(os.path.realpath(target))
    try:
        with _temporary(target) as (file, name):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, target)
            sync_folder(target.parent)
    except OSError as error:
        if error.errno is not None:  # else its text is all it says, and a name would hide it
            error.filename = error.filename or str(path)  # a failed write does not say where
        raise


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a new locked file beside `target`; it is deleted unless it was renamed."""
    while True:
        name = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}{SUFFIX}")
        with open(name, "xb") as file:
            try:
                if not _try_lock(file) or not _is_at(file, name):
                    continue  # before the lock, it was taken for a leftover and deleted
                yield file, name
                return
            finally:
                name.unlink(missing_ok=True)


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the temporary files of killed writers in a folder, and return them.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, f".x.0123456789abcdef{SUFFIX}").touch()
    ...     len(remove_leftovers(folder)), list(Path(folder).iterdir())
    (1, [])
    """
    removed = []
    try:
        names = os.listdir(folder) if fcntl else []
    except OSError:  # there is no such folder, or it cannot be listed
        names = []
    for name in sorted(n for n in names if n.startswith(".") and n.endswith(SUFFIX)):
        path = Path(folder, name)
        try:
            with open(path, "rb+") as file:
                if _try_lock(file):
                    path.unlink(missing_ok=True)
                    removed.append(path)
        except OSError:
            continue  # renamed meanwhile, or not ours to delete
    return removed


@contextmanager
def locked_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a folder for this process alone; FolderInUse if another one holds it.

    The lock ends with the process, however it ends. The lock file stays.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with locked_folder(folder), locked_folder(folder):
    ...         pass
    Traceback (most recent call last):
    fedcohort.exceptions.FolderInUse: ... is being written by another process; ...
    """
    with open(Path(folder) / LOCK, "ab") as file:
        if not _try_lock(file):
            raise FolderInUse(
                f"{folder} is being written by another process; wait for it, or use another folder"
            )
        yield


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file unless another open file of it is locked."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], name: Path) -> bool:
    """Say whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames and new files in a folder survive a power cut, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
