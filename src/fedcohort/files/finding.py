"""Files by name: which kind a data file is, what a folder holds, how a client's sketch is called.

Client ids may be hostile, so file names are made from them with care, and an index beside the
sketches says which client a file belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedcohort.exceptions import DataError
from fedcohort.files.source import Source, Want

LONGEST = 100
INDEX = "clients.json"
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
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", client).strip("._-")[:LONGEST]
        plain = safe == client != "" and not RESERVED.fullmatch(safe)
        if not plain or safe.lower() in self._taken:
            digest = hashlib.blake2b(client.encode("utf-8", "surrogatepass")).hexdigest()
            safe = f"{safe or 'client'}-{digest[:8]}"
            while safe.lower() in self._taken:
                digest = digest[1:]
                safe = f"{safe}{digest[0]}"
        self._taken.add(safe.lower())
        return f"{safe}.sketch"


def client_names(paths: Sequence[Path]) -> list[str]:
    """Return the clients of sketch files, from the folder's index or else from the file names.

    Two clients of one name are called by their paths.
    """
    indexes = {folder: _index(folder) for folder in {path.parent for path in paths}}
    names = [indexes[path.parent].get(path.name, path.stem) for path in paths]
    uses = Counter(names)
    return [name if uses[name] == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def lost_files(folder: Path) -> list[str]:
    """Return the sketches that a folder's index names and that are not there."""
    return [name for name in _index(folder) if not (folder / name).is_file()]


def _index(folder: Path) -> dict[str, str]:
    try:
        held = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # no index, or somebody else's file of that name
    if not isinstance(held, dict):
        return {}
    return {k: v for k, v in held.items() if isinstance(v, str) and v}


ENDINGS = {
    "parquet": r"\.(parquet|pq)",
    "csv": r"\.(csv|tsv|data)(\.gz|\.bz2)?",
    "arrow": r"\.(arrow|arrows|feather|ipc)",
    "npy": r"\.npy",
    "npz": r"\.npz",
    "idx": r"[.-]idx\d?(-ubyte)?(\.gz)?",
    "text": r"\.(txt|text)(\.gz)?",
}
_ENDING = re.compile(f"(?:{'|'.join(f'(?P<{k}>{ending})' for k, ending in ENDINGS.items())})$")
KNOWN = ".parquet, .csv, .tsv, .data, .arrow, .feather, .npy, .npz, IDX (-idx3-ubyte, .idx) or .txt"


def open_source(path: str | os.PathLike[str], want: Want) -> Source:
    """Open a data file, or a folder of files of one kind.

    Raises
    ------
    DataError
        For a file that is missing, unreadable, or does not hold what is wanted.
    """
    from fedcohort.files.array_source import ArraySource
    from fedcohort.files.table_source import TableSource
    from fedcohort.files.text_source import TextSource

    root = Path(path)
    files = find_files(root)
    kind = kind_of(files[0])
    if kind in ("parquet", "csv", "arrow"):
        return TableSource(files, root, want)
    if kind == "text":
        return TextSource(files, want)
    return ArraySource(files, want)


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name, None for an unknown one.

    Examples
    --------
    >>> kind_of(Path("train-images-idx3-ubyte.gz")), kind_of(Path("notes.md"))
    ('idx', None)
    """
    found = _ENDING.search(path.name.lower())
    return None if found is None else found.lastgroup


def find_files(root: Path) -> list[Path]:
    """Return the file itself, or the sorted data files of a folder, which must be of one kind."""
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    if root.is_file():
        if kind_of(root) is None:
            raise DataError(f"{root}: unknown kind of file; known are {KNOWN}")
        return [root]
    inside = (p for p in sorted(root.rglob("*")) if not _hidden(p, root) and p.is_file())
    files = [p for p in inside if kind_of(p) is not None]
    kinds = {kind_of(p): p for p in files}
    if len(kinds) != 1:
        found = " and ".join(str(p) for p in kinds.values()) or "none"
        raise DataError(f"{root}: a folder must hold data files of one kind; found {found}")
    return files


def _hidden(path: Path, root: Path) -> bool:
    """Whether a file or its folder is one of those that tools leave beside the data."""
    return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)
