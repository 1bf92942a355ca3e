"""What a Parquet file will take when it is read, from its footer alone.

A file of a few hundred bytes can hold one row with a list of a billion zeros, or a long text in
each of a million rows. PyArrow finds out while it reads, and its own access to these numbers ends
the process on a damaged file; so the footer is decoded here (Thrift's compact protocol).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcohort.exceptions import DataError

MAX_FOOTER = 1 << 26
MAX_CHUNK = 1 << 30  # bytes that a column of a row group may take; more if the file is as large
MAX_BATCH = 1 << 28  # bytes of texts that are stored by what differs, unpacked at a time
MAX_EXPANSION = 200  # times that numbers in lists may outgrow the file
BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7  # Parquet's codes of a type and of an encoding


def reading_plan(path: Path, columns: Sequence[str], rows: int) -> tuple[int, list[str]]:
    """Return how many rows to read at a time and what as dictionaries, or refuse.

    Texts stay dictionaries, since a long one may be repeated at no cost. Where each text is stored
    as what differs from the one before, it may be as long as the whole column.
    """
    size, texts = path.stat().st_size, set[str]()
    try:
        for group in _Thrift(_footer(path)).struct()[4]:
            for chunk in (column[3] for column in group[1]):
                kind, encodings, names, values, unpacked = (chunk[i] for i in (1, 2, 3, 5, 6))
                name = names[0].decode()
                if name not in columns:
                    continue
                if kind == BYTE_ARRAY and DELTA_BYTE_ARRAY in encodings:
                    rows = max(1, min(rows, MAX_BATCH // max(1, unpacked)))
                elif kind == BYTE_ARRAY:
                    texts.add(".".join(part.decode() for part in names))
                elif len(names) > 1 and 8 * values > MAX_EXPANSION * size:
                    unpacked = max(unpacked, 8 * values)
                if unpacked > max(MAX_CHUNK, 10 * size):
                    raise DataError(
                        f"{path}: column {name!r} unpacks {size:,} bytes of file to {unpacked:,}; "
                        "write it again in smaller row groups"
                    )
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, RecursionError):
        raise DataError(f"{path}: cannot be read: its footer is damaged") from None
    return rows, sorted(texts)


def _footer(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-8, 2)
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != b"PAR1" or length > min(MAX_FOOTER, path.stat().st_size - 8):
            raise DataError(f"{path}: cannot be read: its footer is encrypted or damaged")
        file.seek(-8 - length, 2)
        return file.read(length)


class _Thrift:
    """Decodes Thrift's compact protocol; a structure becomes a dict by field number."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

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
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise ValueError("the footer ends too early")
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number is too long")

    def _whole(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
