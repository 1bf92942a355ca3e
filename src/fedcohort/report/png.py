"""A matrix as a small PNG file inside a page: one pixel a number, whatever the size."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

RAMP = ("#f7fbff", "#d6e6f4", "#abcfe6", "#6aaed6", "#3787c0", "#105ba4", "#08306b")


def matrix_image(values: NDArray[np.float64], most: float) -> str:
    """Return a PNG of the values from 0 to `most`, one pixel each, as a data URI.

    Examples
    --------
    >>> matrix_image(np.zeros((2, 2)), 1.0)[:22]
    'data:image/png;base64,'
    """
    levels = np.clip(np.rint(values / (most or 1) * 255), 0, 255).astype(np.uint8)
    height, width = levels.shape
    raw = np.zeros((height, width + 1), np.uint8)  # each line begins with its filter, 0
    raw[:, 1:] = levels
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", ramp().tobytes()),
        (b"IDAT", zlib.compress(raw.tobytes(), 9)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def ramp() -> NDArray[np.uint8]:
    """Return 256 colors from alike to far."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in RAMP], float)
    where = np.linspace(0, len(RAMP) - 1, 256)
    mixed = [np.interp(where, np.arange(len(RAMP)), stops[:, k]) for k in range(3)]
    colors: NDArray[np.uint8] = np.rint(np.stack(mixed, axis=1)).astype(np.uint8)
    return colors
