"""Shakespeare's plays: guess the next character; the roles are the clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedcohort.datasets.base import Array, Dataset
from fedcohort.datasets.folder import Folder, damaged, read_all
from fedcohort.exceptions import ConfigError

WINDOW = 80
MIN_LINES = 10
CHARACTERS = "\n !\"$&'(),-." + digits + ":;?" + ascii_uppercase + "[]" + ascii_lowercase
CLASSES = 1 + len(CHARACTERS)  # 80; token 0 stands for any other character
LIMIT = 64 << 20
HEADER = "play\tspeaker\tline_id\ttext"
HOLDS = "UTF-8 lines of tab-separated play, speaker, line_id, text, with these names in line 1"

Tokens = NDArray[np.uint8]


def read(folder: Folder, *, max_samples: int | None = 500) -> Dataset:
    """Read windows (samples, 80) of tokens and the token that follows each.

    A client is a role with at least ten lines, named "play/SPEAKER"; its lines are joined by line
    breaks in the order of the play. A sample is 80 characters and the next one. The last tenth of
    a role's samples is for testing: no character to be guessed there is part of a training sample.

    Parameters
    ----------
    folder : Folder
    max_samples : int, optional
        Samples per role at most, evenly spaced over its text; None for all of them (4.2 million,
        which takes 2.7 GB).
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"shakespeare: max_samples={max_samples} must be at least 1, or None")
    path = folder.file("plays.tsv.gz", "plays.tsv", holds=HOLDS)
    roles = {
        role: encode("\n".join(lines))
        for role, lines in sorted(_lines_by_role(path).items())
        if len(lines) >= MIN_LINES and sum(map(len, lines)) + len(lines) - 1 > WINDOW
    }
    if not roles:
        raise damaged(path, f"no role has {MIN_LINES} lines and over {WINDOW} characters", HOLDS)
    starts = {role: _starts(text.size - WINDOW, max_samples) for role, text in roles.items()}
    train = {role: s[: s.size - s.size // 10] for role, s in starts.items()}
    test = {role: s[s.size - s.size // 10 :] for role, s in starts.items()}
    x, y, clients = _windows(roles, train)
    x_test, y_test, test_clients = _windows(roles, test)
    return Dataset(folder.name, x, y, x_test, y_test, CLASSES, clients, test_clients, tokens=True)


def encode(text: str) -> Tokens:
    """Turn characters into tokens.

    Examples
    --------
    >>> encode("a!é").tolist()
    [54, 3, 0]
    """
    table = np.zeros(128, dtype=np.uint8)
    table[[ord(c) for c in CHARACTERS]] = np.arange(1, CLASSES)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.where(codes < 128, table[np.minimum(codes, 127)], 0).astype(np.uint8)


def _lines_by_role(path: Path) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for play, speaker, _, text in _rows(path):
        roles.setdefault(f"{play}/{speaker}", []).append(text)
    return roles


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        lines = read_all(path, LIMIT, HOLDS).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is not UTF-8 ({error})", HOLDS) from error
    if lines[0] != HEADER:
        raise damaged(path, f"its first line is {lines[0][:60]!r}", HOLDS)
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) == 4:
            yield fields
        elif line:
            raise damaged(path, f"line {number} has {len(fields)} fields", HOLDS)


def _starts(windows: int, most: int | None) -> NDArray[np.int64]:
    count = windows if most is None else min(windows, most)
    return np.arange(count) * windows // count


def _windows(
    roles: dict[str, Tokens], starts: dict[str, NDArray[np.int64]]
) -> tuple[Array, NDArray[np.int64], Array]:
    """Cut the windows out, role by role into one array."""
    sizes = [s.size for s in starts.values()]
    x = np.empty((sum(sizes), WINDOW), dtype=np.int64)
    y = np.empty(sum(sizes), dtype=np.int64)
    end = 0
    for role, begin in starts.items():
        rows = slice(end, end := end + begin.size)
        x[rows] = sliding_window_view(roles[role], WINDOW)[begin]
        y[rows] = roles[role][begin + WINDOW]
    names = np.empty(len(sizes), dtype=object)  # text of fixed width would outweigh the windows
    names[:] = list(starts)
    return x, y, np.repeat(names, sizes)
