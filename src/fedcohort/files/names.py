"""Names of sketch files: made of client ids that may be hostile, and turned back for people."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

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
    """Return the clients of sketch files: as their folders' indexes say, else the files' names.

    Where two would be called alike, they are called by their paths.
    """
    indexes = {folder: _index(folder) for folder in {path.parent for path in paths}}
    names = [indexes[path.parent].get(path.name, path.stem) for path in paths]
    uses = Counter(names)
    return [name if uses[name] == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def _index(folder: Path) -> dict[str, str]:
    try:
        held = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # no index, or somebody else's file of that name
    if not isinstance(held, dict):
        return {}
    return {k: v for k, v in held.items() if isinstance(v, str) and v}
