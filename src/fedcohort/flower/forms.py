"""What a reading must look like, where the policy's options say so.

A session takes the form of the first readings as the rule for all later ones; a hostile client that
answers first must not set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fedcohort.policies.base import Option

SCALARS = ("num_examples", "loss", "loss_rms")
SKETCHES = ("model_sketch", "gradient_sketch")


def fits(name: str, reading: NDArray[Any], options: Mapping[str, Option]) -> bool:
    """Whether a reading has the form of its signal.

    Examples
    --------
    >>> import numpy as np
    >>> fits("loss", np.float64(0.5), {}), fits("loss", np.zeros(3), {})
    (True, False)
    >>> fits("model_sketch", np.zeros(10, np.float32), {"k": 10})
    True
    """
    if name == "race_sketch":
        return _is_sketch(reading, options)
    if reading.dtype.names is not None:
        return False
    if name == "num_examples":
        return reading.shape == () and reading.dtype.kind in "iu" and int(reading) > 0
    if name in SCALARS:
        return reading.shape == () and reading.dtype.kind == "f"
    if name in SKETCHES:
        return reading.shape == (options.get("k"),) and reading.dtype.kind == "f"
    return reading.ndim == 1  # a vector whose length only the clients' models or users know


def _is_sketch(reading: NDArray[Any], options: Mapping[str, Option]) -> bool:
    if reading.dtype.names != ("n", "noise", "counts") or reading.shape != ():
        return False
    shape = (options.get("rows"), 2 ** int(options.get("bits", 0)))
    counts = reading["counts"]
    plain = reading["n"].shape == reading["noise"].shape == ()
    return plain and counts.shape == shape and counts.dtype.kind == "i" and bool(reading["n"] >= 0)


def most_bytes(name: str, options: Mapping[str, Option], limit: int) -> int:
    """Return the largest size that a reading of a signal can have, at most `limit`."""
    if name in SCALARS:
        return 8
    known = limit
    if name in SKETCHES:
        known = 8 * int(options.get("k", 0))
    if name == "race_sketch":
        known = 16 + (8 * int(options.get("rows", 0)) << int(options.get("bits", 0)))
    return min(limit, known)
