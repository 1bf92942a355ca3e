"""Damage to files, by their format: values, members, headers and rows, with checksums made right.

One time in four, or where the format is not known, bytes are damaged.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import io
import json
import re
import sqlite3
import struct
import zipfile
from contextlib import closing
from random import Random

ODD = [
    *(None, True, False, 0, -1, 1, 7.5, -0.0, 2**31, 2**40, 2**63, -(2**63) - 1, 10**40),
    *(1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "\x00", "\ud800", "\x1b[2J", "../../x", "nan", "é" * 300),
    *([], [[]], {}, {"x": 1}, {"__array__": 0}, [0, 1], list(range(50))),
]
LENGTHS = [2**31 - 1, 2**31, 2**40 - 1, 2**62, 2**63 - 1, 2**64, -1]
WORDS = [b"\x00", b"\xff", b"\xff\xfe", b"[" * 5000, b"{", b"'", b'"', b"\n", b"-", b"9" * 500]
INTEGERS = [struct.Struct(order + width) for order in "<>" for width in "BHIQ"]


def damaged(data: bytes, rng: Random) -> bytes:
    """Return a damaged copy of a file's content."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    for magic, change in FORMATS.items():
        if data.startswith(magic):
            return change(data, rng)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\x00"
    return damaged_bytes(data, rng) if "\x00" in text else damaged_text(text, rng)


def damaged_bytes(data: bytes, rng: Random) -> bytes:
    """Change, cut, repeat or insert bytes, one to four times."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randrange(1, 40)]
            case 4:
                out[at:at] = rng.choice(WORDS)
            case 5:
                form, number = rng.choice(INTEGERS), rng.choice([0, 1, 2**7, 2**15, *LENGTHS])
                out[at : at + form.size] = form.pack(number & ((1 << 8 * form.size) - 1))
            case 6:
                out[at:at] = out[at : at + rng.randrange(1, 200)]
    return bytes(out)


def odd(rng: Random):
    """Draw an odd value."""
    return copy.deepcopy(rng.choice(ODD))


def odd_shape(rng: Random) -> list[int]:
    """Draw a shape of zeros and extremes: no bytes at all, or more than there can be."""
    return [rng.choice([0, 0, 1, 2, 3, *LENGTHS]) for _ in range(rng.randrange(5))]


def damaged_text(text: str, rng: Random) -> bytes:
    """Damage values of a JSON document or of a line of JSON; else replace a word of a line."""
    lines = text.split("\n") if "\n{" in text or "\n[" in text or text[:1] not in "{[" else [text]
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
        for _ in range(rng.randrange(1, 4)):
            value = damaged_json(value, rng)
        lines[at] = json.dumps(value)
    except ValueError:
        words = re.split(r"([\s,=]+)", lines[at])
        words[2 * rng.randrange(len(words) // 2 + 1)] = json.dumps(odd(rng))
        lines[at] = "".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def damaged_json(value, rng: Random):
    """Replace, delete, rename or repeat a random part of a JSON value."""
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return odd(rng)
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1 | 2:
            whole = isinstance(parent[key], list) and all(type(n) is int for n in parent[key])
            parent[key] = odd_shape(rng) if whole and rng.random() < 0.7 else odd(rng)
        case 3:
            del parent[key]
        case 4:
            other, name = rng.choice(places)
            parent[key] = copy.deepcopy(other[name])
        case 5 if isinstance(parent, dict):
            parent[str(odd(rng))[:40]] = parent.pop(key)
        case 5:
            parent.extend(parent[:3])
    return value


def _places(value):
    """Yield every container and key of a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner)


def damaged_npy(data: bytes, rng: Random) -> bytes:
    """Damage the header of an .npy file as text."""
    end = 10 + struct.unpack("<H", data[8:10])[0]
    header = ast.literal_eval(data[10:end].decode("latin-1"))
    match rng.randrange(4):
        case 0:
            header["shape"] = tuple(odd_shape(rng))
        case 1:
            header["descr"] = rng.choice(TYPES)
        case 2:
            header["fortran_order"] = not header["fortran_order"]
        case 3:
            header = damaged_json(header, rng)
    text = (
        damaged_bytes(repr(header).encode(), rng) if rng.random() < 0.2 else repr(header).encode()
    )
    return data[:8] + struct.pack("<H", len(text)) + text + data[end:]


TYPES = ["|O", "<f4", ">f8", "<U9", "|V0", [("a", "<f8", (2**20, 2**20))], ("<f8", (1000000,))]


def damaged_zip(data: bytes, rng: Random) -> bytes:
    """Delete, rename or damage a member of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, draw = rng.choice(list(members)), rng.random()
    if draw < 0.05:
        del members[name]
    elif draw < 0.1:
        members[f"{rng.randrange(99)}.npy"] = members.pop(name)
    else:
        members[name] = damaged(members[name], rng)
    out, method = io.BytesIO(), 8 if rng.random() < 0.1 else 0  # deflated, or stored
    with zipfile.ZipFile(out, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content, method)
    return out.getvalue()


def damaged_sketch(data: bytes, rng: Random) -> bytes:
    """Damage the header or the counts of a sketch file; its lengths stay right."""
    prefix = struct.Struct("<8sHII")
    magic, version, head, _ = prefix.unpack_from(data)
    header = data[prefix.size : prefix.size + head]
    counts = data[prefix.size + head : -32]
    if rng.random() < 0.8:
        header = damaged(header, rng)
    else:
        counts = damaged_bytes(counts, rng)
    body = prefix.pack(magic, version, len(header), len(counts)) + header + counts
    return body + hashlib.blake2b(body, digest_size=32).digest()


def damaged_database(data: bytes, rng: Random) -> bytes:
    """Put an odd value into a row of a SQLite database, if SQLite takes it."""
    value = odd(rng)
    if isinstance(value, list | dict) or (isinstance(value, int) and abs(value) >= 2**63):
        value = json.dumps(value)
    if isinstance(value, str):
        encoded = value.encode("utf-8", "surrogatepass")
        value = encoded if rng.random() < 0.3 else encoded.decode("latin-1")
    with closing(sqlite3.connect(":memory:")) as db:
        try:
            db.deserialize(data)
            tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            (table,) = rng.choice(tables)
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            (rows,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            row = f"(SELECT {columns[0]} FROM {table} LIMIT 1 OFFSET {rng.randrange(rows + 1)})"
            where = f"{columns[0]} = {row}"
            db.execute(f"UPDATE {table} SET {rng.choice(columns)} = ? WHERE {where}", (value,))
            db.commit()
        except sqlite3.Error:  # such as of a database with a log
            return damaged_bytes(data, rng)
        return db.serialize()


FORMATS = {
    b"PK": damaged_zip,
    b"\x93NUMPY": damaged_npy,
    b"SQLite format 3": damaged_database,
    b"FCSKETCH": damaged_sketch,
}
