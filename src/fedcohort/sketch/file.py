"""One sketch, one file: magic, version, JSON header, compressed counts, checksum.

::

    8 bytes   b"FCSKETCH"
    2 bytes   version, little-endian as all numbers here
    4 bytes   length of the header, h
    4 bytes   length of the compressed counts, c
    h bytes   header: UTF-8 JSON
    c bytes   zlib stream of rows * buckets signed integers of the header's width
    32 bytes  BLAKE2b of all that comes before

A reader trusts nothing: sizes are checked against each other before anything is allocated, the
stream is unpacked no further than the header's size, and nothing in a file is ever executed. The
checksum finds accidents; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import InvalidSketch
from fedcohort.files.columns import Column, columns_from_spec, columns_width
from fedcohort.files.marginals import BINS, Marginals
from fedcohort.privacy.release import Release
from fedcohort.sketch import hashing, transforms
from fedcohort.sketch.hashing import HashFamily
from fedcohort.sketch.hashing.base import MAX_CELLS
from fedcohort.sketch.transforms import Tokenizer, Transform

MAGIC = b"FCSKETCH"
VERSION = 2  # 1 had other hash functions for the same seed
PREFIX = struct.Struct("<8sHII")
DIGEST = 32
MAX_HEADER = 1 << 22
MAX_FILE = MAX_HEADER + 8 * MAX_CELLS + (1 << 20)
MAX_RATIO = 1100  # zlib packs at most 1032 to 1
WIDTHS = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def pack(header: dict[str, Any], counts: NDArray[np.int64]) -> bytes:
    """Return a file's content; the header gets the width of the counts."""
    low, high = int(counts.min()), int(counts.max())
    width = next(w for w in WIDTHS if -(1 << (8 * w - 1)) <= low <= high < 1 << (8 * w - 1))
    stated = json.dumps({**header, "width": width}, allow_nan=False, sort_keys=True).encode()
    if len(stated) > MAX_HEADER:
        raise ValueError(f"a header of {len(stated)} bytes is too long; use fewer constants")
    packed = zlib.compress(counts.astype(WIDTHS[width]).tobytes(), 6)
    body = PREFIX.pack(MAGIC, VERSION, len(stated), len(packed)) + stated + packed
    return body + hashlib.blake2b(body, digest_size=DIGEST).digest()


class Parts(NamedTuple):
    """What a sketch is made of."""

    family: HashFamily
    transform: Transform | Tokenizer
    counts: NDArray[np.int64]
    n: int | float
    release: Release | None
    columns: tuple[Column, ...]
    origin: dict[str, Any]
    marginals: Marginals | None


def parse(data: bytes, embedding: Callable[[Any], Any] | None = None) -> Parts:
    """Read a file's content; InvalidSketch for anything else."""
    header, packed = unpack(data)
    try:
        family = hashing.from_spec(header.get("hash"))
        transform = transforms.from_spec(header.get("transform"), embedding)
        stated = header.get("release")
        release = None if stated is None else Release.from_spec(stated)
        columns = columns_from_spec(header.get("columns", []))
        check_columns(columns, family, transform)
        origin = header.get("origin", {})
        if not isinstance(origin, dict):
            raise ValueError("the origin must be an object")
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSketch(f"the header is wrong: {error}") from None
    cells, more = family.rows * family.buckets, _marginal_cells(header, columns)
    flat = _unpack_counts(packed, header.get("width"), cells + more)
    counts = flat[:cells].reshape(family.rows, family.buckets)
    n = _checked_n(header.get("n"), counts, release is not None)
    marginals = _marginals(header["marginals"], columns, flat[cells:]) if more else None
    return Parts(family, transform, counts, n, release, columns, origin, marginals)


def _marginal_cells(header: dict[str, Any], columns: tuple[Column, ...]) -> int:
    """How many counts of single columns follow those of the joint sketch."""
    held = header.get("marginals")
    if held is None:
        return 0
    if not isinstance(held, dict) or set(held) != {"n", "release"} or not columns:
        raise InvalidSketch("the header is wrong: marginals must state n and release")
    return len(columns) * BINS


def _marginals(
    held: dict[str, Any], columns: tuple[Column, ...], counts: NDArray[np.int64]
) -> Marginals:
    out = Marginals(columns)
    out.counts = counts.reshape(len(columns), BINS)
    try:
        out.release = None if held["release"] is None else Release.from_spec(held["release"])
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSketch(f"the header is wrong: {error}") from None
    out.n = _checked_n(held["n"], out.counts, out.release is not None)
    return out


def check_columns(
    columns: tuple[Column, ...], family: HashFamily, transform: Transform | Tokenizer
) -> None:
    """Refuse columns that do not make the vectors of the hash family."""
    if not columns or not hasattr(family, "dim"):
        return
    labels = transform.classes if isinstance(transform, Transform) else 0
    if columns_width(columns) + labels != family.dim:
        raise ValueError(
            f"columns of {columns_width(columns)} numbers for a hash of dim={family.dim}"
        )


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Check a file's content and return its header and its counts, still compressed."""
    if len(data) < PREFIX.size + DIGEST:
        raise InvalidSketch(f"{len(data)} bytes are too few for a sketch file")
    magic, version, head, packed = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise InvalidSketch("not a sketch file")
    if version != VERSION:
        raise InvalidSketch(f"sketch file of version {version}; this reader knows {VERSION}")
    if head > MAX_HEADER or PREFIX.size + head + packed + DIGEST != len(data):
        raise InvalidSketch("the file is truncated, or longer than it says")
    if hashlib.blake2b(data[:-DIGEST], digest_size=DIGEST).digest() != data[-DIGEST:]:
        raise InvalidSketch("the checksum is wrong: the file was damaged or altered")
    start = PREFIX.size + head
    return _parse(data[PREFIX.size : start]), data[start:-DIGEST]


def _parse(text: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        header = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidSketch(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InvalidSketch("the header is not a JSON object")
    return header


def _unpack_counts(packed: bytes, width: object, cells: int) -> NDArray[np.int64]:
    """Unpack exactly `cells` integers, or refuse."""
    if not isinstance(width, int) or width not in WIDTHS:
        raise InvalidSketch(f"counts cannot have a width of {width!r} bytes")
    size = cells * width
    if size > 8 * MAX_CELLS or size > MAX_RATIO * len(packed):
        raise InvalidSketch(f"{len(packed)} bytes cannot hold {cells} counts")
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise InvalidSketch(f"the counts cannot be unpacked: {error}") from None
    if len(raw) != size or not stream.eof or stream.unused_data:
        raise InvalidSketch(f"the counts are not {cells} integers")
    return np.frombuffer(raw, WIDTHS[width]).astype(np.int64)


def _checked_n(n: Any, counts: NDArray[np.int64], private: bool) -> int | float:
    """Return the number of samples if it is one and, without noise, agrees with every row."""
    if type(n) not in (int, float) or not -(2**62) < n < 2**62:
        raise InvalidSketch(f"n={str(n)[:40]} is not a number of samples")
    if not private and (counts.min() < 0 or (counts.sum(axis=1) != n).any()):
        raise InvalidSketch(f"the rows of an exact sketch must each hold n={n} samples")
    return float(n) if private and type(n) is float else int(n)


def read(path: str | os.PathLike[str]) -> bytes:
    """Read a file that is not longer than a sketch can be."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size or MAX_FILE  # a pipe has none
        data = file.read(min(size, MAX_FILE) + 1)
    if len(data) > MAX_FILE:
        raise InvalidSketch(f"{os.fspath(path)}: longer than any sketch")
    return data
