"""Tell data files by their names, and look into folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedcohort.exceptions import DataError
from fedcohort.files.source import Source, Want

ENDINGS = {
    "parquet": r"\.(parquet|pq)",
    "csv": r"\.(csv|tsv)(\.gz|\.bz2)?",
    "arrow": r"\.(arrow|arrows|feather|ipc)",
    "npy": r"\.npy",
    "npz": r"\.npz",
    "idx": r"[.-]idx\d?(-ubyte)?(\.gz)?",
    "text": r"\.(txt|text)(\.gz)?",
}
KNOWN = ".parquet, .csv, .tsv, .arrow, .feather, .npy, .npz, IDX (-idx3-ubyte, .idx) or .txt"


def open_source(path: str | os.PathLike[str], want: Want) -> Source:
    """Open a data file, or a folder of files of one kind.

    Raises
    ------
    DataError
        For a file that is missing, unreadable, or does not hold what is wanted.
    """
    from fedcohort.files import arrays, tables, text

    root = Path(path)
    files = find_files(root)
    kind = kind_of(files[0])
    if kind in ("parquet", "csv", "arrow"):
        return tables.TableSource(files, root, want)
    if kind == "text":
        return text.TextSource(files, want)
    return arrays.ArraySource(files, want)


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name, None for an unknown one.

    Examples
    --------
    >>> kind_of(Path("train-images-idx3-ubyte.gz")), kind_of(Path("notes.md"))
    ('idx', None)
    """
    name = path.name.lower()
    return next((k for k, ending in ENDINGS.items() if re.search(ending + "$", name)), None)


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
