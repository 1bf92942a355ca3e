from __future__ import annotations

import hashlib
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.exceptions import InvalidSketch
from fedcohort.sketch import file
from fedcohort.sketch.file import DIGEST, MAGIC, PREFIX, VERSION
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform


def filled(sketch, *data):
    sketch.add(*data)
    return sketch


RNG = np.random.default_rng(0)
STEP = Transform("net", (0.1, 0.2, 0.3), 2.0, unit=True, classes=2, label_weight=0.7)
EMPTY = RaceSketch.srp(dim=3, rows=6, bits=3, seed=4, transform=STEP)
SRP = filled(EMPTY.empty_like(), RNG.standard_normal((50, 3)), RNG.integers(0, 2, 50))
ALL = [
    SRP,
    EMPTY,
    filled(RaceSketch.minhash(4, 10, transform=Tokenizer("char", (2, 3), False)), ["to be", "or"]),
    filled(RaceSketch.pstable(dim=2, rows=3, width=0.1, buckets=5), np.ones((200, 2))),
    SRP.privatize(0.01, rng=RNG),
    SRP.privatize(1.0, 1e-5, "replace", "private", RNG),
]
GOOD = ALL[0].to_bytes()


def sealed(header, packed):
    """A file whose checksum is right, whatever it holds."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = PREFIX.pack(MAGIC, VERSION, len(text), len(packed)) + text + packed
    return body + hashlib.blake2b(body, digest_size=DIGEST).digest()


def opened(sketch=None):
    return file.unpack((sketch or ALL[0]).to_bytes())


@pytest.mark.parametrize("sketch", ALL, ids=repr)
def test_round_trip(sketch, tmp_path):
    assert RaceSketch.from_bytes(sketch.to_bytes()) == sketch
    sketch.save(tmp_path / "a.sketch")
    loaded = RaceSketch.load(tmp_path / "a.sketch")
    assert loaded.header() == sketch.header()
    assert type(loaded.n) is type(sketch.n)
    assert [p.name for p in tmp_path.iterdir()] == ["a.sketch"]


@given(st.integers(0, 8 * len(GOOD) - 1))
def test_every_flipped_bit_and_every_cut_is_found(bit):
    data = bytearray(GOOD)
    data[bit // 8] ^= 1 << bit % 8
    for damaged in (bytes(data), GOOD[: bit // 8]):
        with pytest.raises(InvalidSketch):
            RaceSketch.from_bytes(damaged)


def peak_of(data):
    tracemalloc.start()
    with pytest.raises(InvalidSketch):
        RaceSketch.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_bombs_and_huge_claims_allocate_nothing_large():
    header, packed = opened()
    bomb = zlib.compress(bytes(50_000_000), 9)
    assert peak_of(sealed(header, bomb)) < 1_000_000  # unpacks 50 MB where 48 bytes belong
    for rows in (1 << 21, 1 << 40):  # claims 16 million counts, or more, in 60 bytes
        huge = {**header, "hash": {**header["hash"], "rows": rows}}
        assert peak_of(sealed(huge, packed)) < 1_000_000
    nested = b"[" * 200_000 + b"]" * 200_000
    assert peak_of(sealed(nested, packed)) < 30_000_000
    digits = b'{"n": ' + b"9" * 100_000 + b"}"
    assert peak_of(sealed(digits, packed)) < 2_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 51}, "each hold"),
        ({"n": True}, "not a number"),
        ({"width": True}, "width of True"),
        ({"width": 2}, "not 48 integers"),
        ({"hash": {"name": "sha"}}, "unknown hash family"),
        ({"transform": {"function": "os.system"}}, "function"),
        ({"release": {}}, "missing"),
        ({"release": 1}, "header is wrong"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    header, packed = opened()
    with pytest.raises(InvalidSketch, match=message):
        RaceSketch.from_bytes(sealed({**header, **change}, packed))


def test_negative_counts_are_for_private_sketches_only():
    header, packed = opened()
    counts = np.zeros((6, 8), "i1")
    counts[:, 0], counts[:, 1] = 51, -1
    forged = zlib.compress(counts.tobytes())
    with pytest.raises(InvalidSketch, match="each hold"):
        RaceSketch.from_bytes(sealed(header, forged))
    private, _ = opened(ALL[4])
    loaded = RaceSketch.from_bytes(sealed({**private, "width": 1}, forged))
    assert loaded.counts.min() == -1
    trailing = packed + b"more"
    with pytest.raises(InvalidSketch, match="not 48 integers"):
        RaceSketch.from_bytes(sealed(header, trailing))


def test_other_versions_and_long_files(tmp_path, monkeypatch):
    body = PREFIX.pack(MAGIC, 1, 0, 0)
    with pytest.raises(InvalidSketch, match="version 1"):
        RaceSketch.from_bytes(body + bytes(DIGEST))
    monkeypatch.setattr(file, "MAX_FILE", 100)
    SRP.save(tmp_path / "a.sketch")
    with pytest.raises(InvalidSketch, match="longer"):
        RaceSketch.load(tmp_path / "a.sketch")
    with pytest.raises(FileNotFoundError):
        RaceSketch.load(tmp_path / "none.sketch")
