"""What a small file would take once it is unpacked, before PyArrow unpacks it.

A Parquet or Arrow file of a few kilobytes can hold a page of a billion zeros, or a long text in
each of a million rows. PyArrow finds out while it reads, and its own access to these numbers ends
the process on a damaged file. So the headers of all pages (Parquet, in Thrift's compact protocol)
and batches (Arrow, in FlatBuffers) are decoded here. They bind PyArrow, too: it unpacks no more
than they say.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.exceptions import DataError

MAX_UNPACKED = 1 << 30  # bytes of a batch, of a column's row group, or of all sheets
MAX_TEXTS = 1 << 28  # bytes of texts that are stored by what differs, unpacked at a time
BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7  # Parquet's codes of a type and of an encoding


@contextmanager
def _decoding() -> Iterator[None]:
    """Say in one way that a header holds something else, or less, than its format says."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError("a header in it is damaged") from error


@_decoding()
def parquet_plan(path: Path, columns: Sequence[str], rows: int) -> tuple[int, list[str]]:
    """Return how many rows to read at a time and what as dictionaries, or refuse.

    Texts stay dictionaries, since a long one may be repeated at no cost. Where each text is stored
    as what differs from the one before, it may be as long as the whole column.
    """
    texts = set[str]()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length, magic = struct.unpack("<I4s", data[-8:])
        if magic != b"PAR1" or length > len(data) - 8:
            raise ValueError("the footer is encrypted or damaged")
        for group in _Thrift(data, len(data) - 8 - length).struct()[4]:
            for chunk in (column[3] for column in group[1]):
                kind, encodings, names = (chunk[i] for i in (1, 2, 3))
                name = names[0].decode()
                if name not in columns:
                    continue
                unpacked = _pages(data, chunk)
                if kind == BYTE_ARRAY and DELTA_BYTE_ARRAY in encodings:
                    rows = max(1, min(rows, MAX_TEXTS // max(1, unpacked)))
                elif kind == BYTE_ARRAY:
                    texts.add(".".join(part.decode() for part in names))
                check_unpacked(path, f"column {name!r}", unpacked)
    return rows, sorted(texts)


@_decoding()
def check_arrow(path: Path, messages: Any) -> None:
    """Refuse an Arrow file by its messages, as `pyarrow.ipc.MessageReader` gives them."""
    for message in messages:
        if message.type not in ("record batch", "dictionary"):
            continue
        unpacked, values = _batch(message.metadata.to_pybytes(), message.body)
        if values > 8 * unpacked:  # the fewest bits that a value takes
            raise DataError(f"{path}: {values:,} rows in {unpacked:,} bytes hold no values")
        check_unpacked(path, "a batch", unpacked)


def check_unpacked(path: Path, what: str, unpacked: int) -> None:
    """Refuse what takes more than `MAX_UNPACKED` bytes, and more than 10 times the whole file."""
    size = path.stat().st_size
    if unpacked > max(MAX_UNPACKED, 10 * size):
        raise DataError(
            f"{path}: {what} unpacks {size:,} bytes of file to {unpacked:,}; write it again in "
            "smaller row groups, batches or files"
        )


def _pages(data: mmap.mmap, chunk: dict[int, Any]) -> int:
    """Return the unpacked bytes of a column's pages, or what the footer claims, if that is more."""
    values, unpacked, packed, first = (chunk[i] for i in (5, 6, 7, 9))
    at = min(first, chunk[11]) if chunk.get(11, 0) > 0 else first
    end, total = at + packed * (values > 0), 0
    while at < end:
        thrift = _Thrift(data, at)
        page = thrift.struct()
        if min(page[2], page[3]) < 0:
            raise ValueError("a page of negative size")
        total += page[2]
        at = thrift.at + page[3]
    return int(max(unpacked, total))


class _Thrift:
    """Decodes Thrift's compact protocol; a structure becomes a dict by field number."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self.at = data, at

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._whole()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (4, 5, 6):
            return self._whole()
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (7, 8):
            return self._bytes(8 if kind == 7 else self._varint())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"kind {kind} of Thrift is not part of Parquet")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("a header ends too late")
        return self._data[self.at - count : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")
        return value | byte << shift

    def _whole(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


def _batch(header: bytes, body: Any) -> tuple[int, int]:
    """Return the unpacked bytes and the longest array of a record or dictionary batch."""
    message = struct.unpack_from("<I", header)[0]
    kind, batch = header[_field(header, message, 1)], _target(header, message, 2)
    if kind == 2:  # a dictionary holds a batch
        batch = _target(header, batch, 1)
    nodes, buffers = (_pairs(header, _target(header, batch, i)) for i in (1, 2))
    rows = struct.unpack_from("<q", header, at)[0] if (at := _field(header, batch, 0)) else 0
    unpacked = int(buffers[:, 1].sum())
    if _field(header, batch, 3):  # compressed: each buffer begins with its length
        held = [offset for offset, length in buffers.tolist() if length]
        lengths = [struct.unpack("<q", body[at : at + 8].to_pybytes())[0] for at in held]
        unpacked += sum(max(length, 0) for length in lengths)
    return unpacked, max([rows, *nodes[:, 0].tolist()])


def _field(data: bytes, table: int, number: int) -> int:
    """Return where the field of a FlatBuffers table lies, 0 if it is absent."""
    slots = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, slots)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, slots + slot)[0]
    return table + offset if offset else 0


def _target(data: bytes, table: int, number: int) -> int:
    """Return where what a field refers to lies."""
    at = _field(data, table, number)
    if not at:
        raise ValueError("a field is missing")
    target: int = at + struct.unpack_from("<I", data, at)[0]
    return target


def _pairs(data: bytes, at: int) -> Any:
    """Return a vector of pairs: nodes (length, nulls), or buffers (offset, length)."""
    count = struct.unpack_from("<I", data, at)[0]
    return np.frombuffer(data, "<i8", 2 * count, at + 4).reshape(-1, 2)
