"""Damage to files: bytes, JSON values, zip members, .npy headers, checksums made right again."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import re
import struct
import zipfile
from random import Random

ODD = [
    *(None, True, False, 0, -1, 1, 7.5, -0.0, 2**31, 2**40, 2**63, -(2**63) - 1, 10**400),
    *(1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "\x00", "\ud800", "\x1b[2J", "../../x", "nan", "é" * 300),
    *([], [[]], {}, {"x": 1}, {"__array__": 0}, [0, 1], list(range(50))),
]
LENGTHS = [2**31 - 1, 2**31, 2**40 - 1, 2**62, 2**63 - 1, 2**64, -1]
WORDS = [b"\x00", b"\xff", b"\xff\xfe", b"[" * 5000, b"{", b"'", b'"', b"\n", b"-", b"9" * 500]
INTEGERS = [struct.Struct(order + width) for order in "<>" for width in "BHIQ"]


def odd_shape(rng: Random) -> list[int]:
    """Draw a shape of zeros and extremes: no bytes at all, or more than there can be."""
    return [rng.choice([0, 0, 1, 2, 3, *LENGTHS]) for _ in range(rng.randrange(5))]


def odd(rng: Random):
    """Draw an odd value."""
    value = rng.choice(ODD)
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


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
                form = rng.choice(INTEGERS)
                new = form.pack(
                    rng.choice([0, 1, 2**7, 2**15, *LENGTHS]) & ((1 << 8 * form.size) - 1)
                )
                out[at : at + len(new)] = new
            case 6:
                out[at:at] = out[at : at + rng.randrange(1, 200)]
    return bytes(out)


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
    if not isinstance(value, dict | list):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        yield from _places(inner)


def json_bytes(value) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # an integer of too many digits
        return json.dumps(str(value)[:100] if isinstance(value, str) else None).encode()


def damaged_document(data: bytes, rng: Random) -> bytes:
    """A JSON document: its values three times in four, its bytes otherwise."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.randrange(1, 4)):
        value = damaged_json(value, rng)
    return json_bytes(value)


def damaged_lines(data: bytes, rng: Random) -> bytes:
    """JSON lines: one of them."""
    lines = data.split(b"\n")
    at = rng.randrange(max(1, len(lines) - 1))
    lines[at] = damaged_document(lines[at], rng)
    return b"\n".join(lines)


def damaged_npy(data: bytes, rng: Random) -> bytes:
    """An .npy file: its header as text, or its bytes."""
    if rng.random() < 0.3 or data[:6] != b"\x93NUMPY":
        return damaged_bytes(data, rng)
    end = 10 + struct.unpack("<H", data[8:10])[0]
    text = data[10:end].decode("latin-1")
    if rng.random() < 0.2:
        shape = ", ".join(map(str, odd_shape(rng)))
        text = re.sub(r"\(.*?\)", f"({shape},)" if shape else "()", text, count=1)
    else:
        text = text.replace(*rng.choice(SWAPS), 1)
    length = struct.pack("<H", len(text) & 0xFFFF)
    return data[:8] + length + text.encode("latin-1") + data[end:]


SWAPS = [
    *(("'<f8'", "'|O'"), ("'<f4'", "'<f8'"), ("(", "(((("), ("(", "(9999999999,"), ("(", "(-1,")),
    *(("(", "(0,"), ("True", "-" * 3000 + "1"), ("False", "True"), ("shape", "shap"), ("}", "")),
    *((":", "::"), ("3", "3.5"), ("'<", "'>")),
    ("'descr':", "'descr': [('a', '<f8', (2**20, 2**20))], 'x':"),
    ("'descr':", "'descr': ('<f8', (1000000,)), 'x':"),
]


def damaged_zip(data: bytes, rng: Random) -> bytes:
    """A zip archive: mostly a member inside a valid archive, with right checksums."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, draw = rng.choice(list(members)), rng.random()
    if draw < 0.05:
        del members[name]
    elif draw < 0.1:
        members[f"{rng.randrange(99)}.npy"] = members.pop(name)
    else:
        change = damaged_document if name.endswith(".json") else damaged_npy
        members[name] = change(members[name], rng)
    out, method = io.BytesIO(), 8 if rng.random() < 0.1 else 0  # deflated, or stored
    with zipfile.ZipFile(out, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content, method)
    return out.getvalue()


def damaged_sketch(data: bytes, rng: Random) -> bytes:
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


def damaged_text(data: bytes, rng: Random) -> bytes:
    """Text with values: a token is replaced by another odd one, or bytes are damaged."""
    if rng.random() < 0.2:
        return damaged_bytes(data, rng)
    words = re.split(r"(\s+)", data.decode().strip())
    words[2 * rng.randrange(len(words) // 2 + 1)] = json_bytes(odd(rng)).decode()
    return "".join(words).encode("utf-8", "surrogatepass")
