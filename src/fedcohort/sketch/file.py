"""One sketch, one file: magic, version, JSON header, compressed counts, checksum.

::

    8 bytes   b"FCSKETCH"
    2 bytes   version, little-endian as all numbers here
    4 bytes   length of the header, h
    4 bytes   length of the compressed counts, c
    h bytes   header: UTF-8 JSON
    c bytes   zlib stream of signed integers of the header's width: rows * buckets counts, then
              16 per column where the sketch holds single columns
    32 bytes  BLAKE2b of all that comes before

A reader trusts nothing: sizes are checked against each other before anything is allocated, and the
stream is unpacked no further than the header's size. The checksum is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import InvalidSketch
from fedcohort.signals.forms import smallest_width
from fedcohort.sketch.hashing import MAX_CELLS

MAGIC = b"FCSKETCH"
VERSION = 2  # 1 had other hash functions for the same seed
PREFIX = struct.Struct("<8sHII")
DIGEST = 32
MAX_HEADER = 1 << 22
MAX_FILE = MAX_HEADER + 8 * MAX_CELLS + (1 << 20)
MAX_RATIO = 1100  # zlib packs at most 1032 to 1


def pack(header: dict[str, Any], counts: NDArray[np.int64]) -> bytes:
    """Return a file's content; the header gets the width of the counts."""
    packed = narrow(counts)
    header |= {"width": packed.itemsize}
    text = json.dumps(header, allow_nan=False, sort_keys=True).encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is too long; use fewer constants")
    content = zlib.compress(packed.tobytes(), 6)
    body = PREFIX.pack(MAGIC, VERSION, len(text), len(content)) + text + content
    return body + hashlib.blake2b(body, digest_size=DIGEST).digest()


def narrow(counts: NDArray[Any]) -> NDArray[Any]:
    """Return counts in the smallest little-endian integers that hold them."""
    return counts.astype(f"<i{smallest_width(counts)}")


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

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        header = json.loads(data[PREFIX.size : start].decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidSketch(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InvalidSketch("the header is not a JSON object")
    return header, data[start:-DIGEST]


def unpack_counts(packed: bytes, width: object, cells: int) -> NDArray[np.int64]:
    """Unpack exactly `cells` integers, or refuse."""
    if type(width) is not int or width not in (1, 2, 4, 8):
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
    return np.frombuffer(raw, f"<i{width}").astype(np.int64)


def checked_n(n: Any, counts: NDArray[np.int64], private: bool) -> int | float:
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
