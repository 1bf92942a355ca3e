"""The sketches and sketch files that `test_pins.py` pins."""

from __future__ import annotations

import base64
import hashlib
import struct
import tempfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy import sparse

from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform

DIM = 12
TEXTS = ["To be, or not to be", "that is the question", "", "Whether 'tis nobler", "ÄÖ naïve ☃ to"]
TOKENS = [["a", "b", "c"], ["b", "a"], [], [1, 2, 3], [-1, 2**40], [b"raw", "raw", 7], ["naïve ☃"]]
CENTER = Transform(center=[i / 8 for i in range(DIM)], scale=2.0)
LABELS = Transform(center=0.25, unit=True, classes=3, label_weight=0.5)


def vectors(columns=DIM):
    """Whole numbers over 16: exact in every float type."""
    return np.random.default_rng(1).integers(-64, 64, (60, columns)) / 16


def filled(sketch, *data):
    sketch.add(*data)
    return sketch


def srp(**options):
    return RaceSketch.srp(DIM, **{"rows": 20, "bits": 4, "seed": 5} | options)


def pstable(**options):
    return RaceSketch.pstable(DIM, **{"rows": 20, "buckets": 16, "seed": 5} | options)


def minhash(**options):
    return RaceSketch.minhash(rows=20, buckets=16, seed=5, **options)


def small():
    """Return a sketch of few bytes, with a label and all of a transform that a file can hold."""
    transform = Transform("name", center=0.5, scale=2.0, unit=True, classes=3, label_weight=0.5)
    return filled(RaceSketch.srp(DIM, 8, 2, 5, transform=transform), vectors(), labels())


def labels():
    return np.arange(60) % 3


def private(sketch, *budget, **options):
    return sketch.privatize(*budget, **options, rng=np.random.default_rng(11))


def thinned():
    return sparse.csr_matrix(np.where(vectors() > 2, vectors(), 0))


SKETCHES = {
    "srp fast": lambda: filled(srp(), vectors()),
    "srp float32": lambda: filled(srp(), vectors().astype(np.float32)),
    "srp integers": lambda: filled(srp(), (16 * vectors()).astype(np.int16)),
    "srp sparse": lambda: filled(srp(), thinned()),
    "srp wide": lambda: filled(RaceSketch.srp(700, 30, 6, 2), vectors(700)),
    "srp far": lambda: filled(srp(), np.ldexp(vectors(), 60)),
    "srp center": lambda: filled(srp(transform=CENTER), vectors()),
    "srp unit": lambda: filled(srp(transform=Transform(unit=True)), vectors()),
    "srp labels": lambda: filled(srp(transform=LABELS), vectors(), labels()),
    "pstable": lambda: filled(pstable(), vectors()),
    "pstable wide steps": lambda: filled(pstable(width=8.0), vectors()),
    "pstable center": lambda: filled(pstable(transform=CENTER), vectors()),
    "pstable labels": lambda: filled(pstable(transform=LABELS), vectors(), labels()),
    "minhash tokens": lambda: filled(minhash(), TOKENS),
    "minhash sparse": lambda: filled(minhash(), thinned()),
    "minhash words": lambda: filled(minhash(transform=Tokenizer("word")), TEXTS),
    "minhash characters": lambda: filled(
        minhash(transform=Tokenizer("char_wb", (2, 3), lowercase=False)), TEXTS
    ),
    "merged": lambda: filled(srp(), vectors()) + filled(srp(), -vectors()),
    "private laplace": lambda: private(filled(srp(), vectors()), 1.0),
    "private gaussian": lambda: private(filled(srp(rows=200), vectors()), 1.0, 1e-3),
    "private replace": lambda: private(filled(minhash(), TOKENS), 2.0, neighbors="replace"),
    "private n": lambda: private(
        filled(pstable(transform=LABELS), vectors(), labels()), 1.0, n="private"
    ),
    "private merged": lambda: (
        private(filled(srp(), vectors()), 1.0) + private(filled(srp(), -vectors()), 0.5)
    ),
}


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def sketched(make):
    sketch = make()
    told = sketch.reading()
    release = sketch.release and {
        k: float(f"{v:.7g}") if isinstance(v, float) else v
        for k, v in asdict(sketch.release).items()
    }
    return {
        "counts": digest(sketch.counts.astype("<i8").tobytes()),
        "n": sketch.n,
        "reading": [told.nbytes, str(told["counts"].dtype), list(told["counts"].shape)],
        "release": release,
    }


FILES = {
    "exact": small,
    # Gaussian noise, whose header holds no rounded logarithm: the same bytes on every machine.
    "private": lambda: private(small(), 1.0, 1e-2),
    "tokens": lambda: filled(RaceSketch.minhash(3, 8, transform=Tokenizer("char", (1, 2))), TEXTS),
}


def sketch_file(make):
    """Pin the whole file, and what must be so whichever zlib compressed it."""
    with tempfile.TemporaryDirectory() as folder:
        make().save(f"{folder}/sketch")
        data = Path(f"{folder}/sketch").read_bytes()
    magic, version, head, packed = struct.unpack_from("<8sHII", data)
    header, body, checksum = data[18 : 18 + head], data[18 + head : -32], data[-32:]
    assert len(body) == packed
    counts = zlib.decompress(body)
    assert body == zlib.compress(counts, 6)
    assert checksum == hashlib.blake2b(data[:-32], digest_size=32).digest()
    return {
        "magic": magic.decode(),
        "version": version,
        "header": header.decode(),
        "counts": hashlib.sha256(counts).hexdigest(),
        "file": base64.b64encode(data).decode(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
