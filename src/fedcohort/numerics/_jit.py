"""Compile a hot loop with Numba where it is installed.

Every loop compiled here is plain Python that gives the same numbers without Numba, only slower.
Modules that use it are imported when first needed, because importing Numba takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile `function` and keep the machine code on disk; return it as it is without Numba."""
    try:
        from numba import njit
    except ImportError:
        return function
    compiled: Any = njit(cache=True, nogil=True)(function)
    return cast(F, compiled)
