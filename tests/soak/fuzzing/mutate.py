"""Damage to files: bytes, JSON values, zip members, .npy headers, checksums made right again."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import struct
import zipfile
from functools import lru_cache

import numpy as np

ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7.5,
    -0.0,
    2**31,
    2**40,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "\x1b[2J",
    "../../x",
    "nan",
    "é" * 300,
    [],
    [[]],
    {},
    {"x": 1},
    {"__array__": 0},
    [0, 1],
    list(range(50)),
]
WORDS = [b"\x00", b"\xff", b"\xff\xfe", b"[" * 5000, b"{", b"'", b'"', b"\n", b"-", b"9" * 500]
SIZES = [0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def odd(rng: np.random.Generator):
    """Draw an odd value."""
    return copy.deepcopy(ODD[rng.integers(len(ODD))])


def damaged_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Change, cut, repeat or insert bytes, one to four times."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(len(out) + 1))
        match rng.integers(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << int(rng.integers(8))
            case 1:
                out[at : at + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + int(rng.integers(1, 40))]
            case 4:
                out[at:at] = WORDS[rng.integers(len(WORDS))]
            case 5:
                size, form = SIZES[rng.integers(len(SIZES))], "<>"[rng.integers(2)]
                width = "BHIQ"[rng.integers(4)]
                mask = (1 << 8 * struct.calcsize(width)) - 1
                new = struct.pack(form + width, size & mask)
                out[at : at + len(new)] = new
            case 6:
                out[at:at] = out[at : at + int(rng.integers(1, 200))]
    return bytes(out)


def damaged_json(value, rng: np.random.Generator):
    """Replace, delete, rename or repeat a random part of a JSON value."""
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return odd(rng)
    parent, key = places[rng.integers(len(places))]
    match rng.integers(6):
        case 0 | 1 | 2:
            parent[key] = odd(rng)
        case 3:
            del parent[key]
        case 4:
            other, name = places[rng.integers(len(places))]
            if isinstance(other, (dict, list)):
                parent[key] = json.loads(json.dumps(other[name]))
        case 5:
            if isinstance(parent, dict):
                parent[str(odd(rng))[:40]] = parent.pop(key)
            else:
                parent.extend(parent[:3])
    return value


def _places(value):
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value, i
            yield from _places(value[i])


def json_bytes(value) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # an integer of too many digits
        return json.dumps(str(value)[:100] if isinstance(value, str) else None).encode()


def damaged_document(data: bytes, rng: np.random.Generator) -> bytes:
    """A JSON document: its values three times in four, its bytes otherwise."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.integers(1, 4)):
        value = damaged_json(value, rng)
    return json_bytes(value)


def damaged_lines(data: bytes, rng: np.random.Generator) -> bytes:
    """JSON lines: one of them."""
    lines = data.split(b"\n")
    at = int(rng.integers(max(1, len(lines) - 1)))
    try:
        lines[at] = damaged_document(lines[at], rng)
    except (ValueError, RecursionError):
        lines[at] = damaged_bytes(lines[at], rng)
    return b"\n".join(lines)


def damaged_npy(data: bytes, rng: np.random.Generator) -> bytes:
    """An .npy file: its header as text, or its bytes."""
    if rng.random() < 0.3 or data[:6] != b"\x93NUMPY":
        return damaged_bytes(data, rng)
    length = struct.unpack("<H", data[8:10])[0]
    text = data[10 : 10 + length].decode("latin-1")
    swaps = [
        ("'<f8'", "'|O'"),
        ("'<f4'", "'<f8'"),
        ("(", "(((("),
        ("True", "-" * 3000 + "1"),
        ("False", "True"),
        ("(", "(9999999999,"),
        ("(", "(-1,"),
        ("(", "(0,"),
        ("'descr':", "'descr': [('a', '<f8', (2**20, 2**20))], 'x':"),
        ("'descr':", "'descr': ('<f8', (1000000,)), 'x':"),
        ("shape", "shap"),
        ("}", ""),
        (":", "::"),
        ("3", "3.5"),
        ("'<", "'>"),
    ]
    old, new = swaps[rng.integers(len(swaps))]
    text = text.replace(old, new, 1)
    return (
        data[:8]
        + struct.pack("<H", len(text) & 0xFFFF)
        + text.encode("latin-1")
        + (data[10 + length :])
    )


@lru_cache(64)
def _members(data: bytes) -> tuple[tuple[str, bytes], ...]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return tuple((name, archive.read(name)) for name in archive.namelist())


def damaged_zip(data: bytes, rng: np.random.Generator) -> bytes:
    """A zip archive: mostly a member inside a valid archive, with right checksums."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    members = dict(_members(data))
    name = list(members)[rng.integers(len(members))]
    draw = rng.random()
    if draw < 0.05:
        del members[name]
    elif draw < 0.1:
        members[f"{rng.integers(99)}.npy"] = members.pop(name)
    elif name.endswith(".json"):
        members[name] = damaged_document(members[name], rng)
    else:
        members[name] = damaged_npy(members[name], rng)
    out = io.BytesIO()
    packing = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", packing) as archive:
        for key, content in members.items():
            archive.writestr(zipfile.ZipInfo(key), content, packing)
    return out.getvalue()


def damaged_sketch(data: bytes, rng: np.random.Generator) -> bytes:
    """A sketch file: its header or its counts, with lengths and checksum that are right."""
    if rng.random() < 0.2:
        return damaged_bytes(data, rng)
    prefix = struct.Struct("<8sHII")
    magic, version, head, _ = prefix.unpack_from(data)
    header = data[prefix.size : prefix.size + head]
    counts = data[prefix.size + head : -32]
    if rng.random() < 0.8:
        header = damaged_document(header, rng)
    else:
        counts = damaged_bytes(counts, rng)
    body = prefix.pack(magic, version, len(header), len(counts)) + header + counts
    return body + hashlib.blake2b(body, digest_size=32).digest()


def damaged_text(data: bytes, rng: np.random.Generator) -> bytes:
    """Text with values: a token is replaced by another odd one, or bytes are damaged."""
    if rng.random() < 0.2:
        return damaged_bytes(data, rng)
    words = data.decode().split(" ")
    value = odd(rng)
    try:
        new = json.dumps(value)
    except ValueError:
        new = "9" * 400
    words[rng.integers(len(words))] = new
    return " ".join(words).encode("utf-8", "surrogatepass")
