"""Arrays in NumPy's .npy format from sources that are not trusted.

NumPy's own reader allocates whatever the header claims, and raises about ten kinds of errors on a
damaged one. Here a damaged header or a wrong size is a ValueError, and nothing is allocated before
the sizes agree.
"""

from __future__ import annotations

import ast
import io
import math
import struct
from functools import lru_cache
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

MAX_HEADER = 1 << 16


class Header(NamedTuple):
    """What an .npy header states; `start` is where the values begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes]) -> Header:
    """Read the header of an .npy file; ValueError if it is damaged.

    Examples
    --------
    >>> file = io.BytesIO()
    >>> np.save(file, np.zeros((2, 3), "<f4"))
    >>> _ = file.seek(0)
    >>> read_header(file).shape, read_header(io.BytesIO(file.getvalue())).size
    ((2, 3), 24)
    """
    start = file.tell()
    try:
        shape, fortran, dtype = _stated(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, struct.error) as error:
        raise ValueError(f"damaged .npy header: {str(error)[:200] or 'too deep'}") from None
    return Header(shape, fortran, dtype, file.tell() - start)


def _stated(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version} is unknown")
    form = "<H" if version == (1, 0) else "<I"
    (length,) = struct.unpack(form, file.read(struct.calcsize(form)))
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return _parsed(file.read(length).decode("utf-8" if version == (3, 0) else "latin-1"))


@lru_cache(maxsize=64)  # many files have the same header
def _parsed(text: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stated = ast.literal_eval(text)
    if not isinstance(stated, dict) or stated.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"it states {text[:80]!r}")
    shape, fortran = stated["shape"], stated["fortran_order"]
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {str(shape)[:80]}")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order {str(fortran)[:80]}")
    return shape, fortran, npy.descr_to_dtype(stated["descr"])


def decode(content: bytes) -> NDArray[Any]:
    """Return the array of an .npy file's content, without copying its values.

    Examples
    --------
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(3))
    >>> decode(file.getvalue()).tolist()
    [0, 1, 2]
    >>> decode(file.getvalue()[:-1])
    Traceback (most recent call last):
    ValueError: the .npy header claims 24 bytes of values; there are 23
    """
    header = read_header(io.BytesIO(content))
    if header.dtype.hasobject:
        raise ValueError(f"the .npy file holds Python objects ({header.dtype})")
    found = len(content) - header.start
    if header.size != found:
        raise ValueError(f"the .npy header claims {header.size} bytes of values; there are {found}")
    values = np.frombuffer(content, header.dtype, math.prod(header.shape), header.start)
    return values.reshape(header.shape, order="F" if header.fortran else "C")
