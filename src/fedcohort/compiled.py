"""Compilation by Numba, with machine code kept on disk where that is possible.

Import this module only where a compiled loop is needed, because importing Numba takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function.

    Numba refuses to cache where neither the installation nor the user's home can be written; the
    function is then compiled anew in each process. It is never cached in a shared folder: Numba's
    cache files are pickles, and whoever can write them runs code.

    Examples
    --------
    >>> @compiled(nogil=True)
    ... def double(x):
    ...     return 2 * x
    >>> double(21)
    42
    """

    def compile(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return njit(**options)(function)

    return compile
