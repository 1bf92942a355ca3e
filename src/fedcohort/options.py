"""What policies and gates share: the options they were made with, and the state they remember."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

SMALLEST, LARGEST = 1e-12, 1e12  # sizes of a float option other than 0: arithmetic stays finite


class Configurable:
    """Remembers the arguments of its `__init__`, as given or by default, and its `state`.

    Options that are declared as float must be 0 or have a size between `SMALLEST` and `LARGEST`.
    Anything else is a mistake, and would overflow or vanish somewhere in the arithmetic.

    Examples
    --------
    >>> class Example(Configurable):
    ...     def __init__(self, size: int = 3, kind: str = "a") -> None: ...
    >>> Example(size=5), Example().options
    (Example(size=5), {'size': 3, 'kind': 'a'})
    >>> class Scaled(Configurable):
    ...     def __init__(self, scale: float = 1.0) -> None: ...
    >>> Scaled(scale=1e300)
    Traceback (most recent call last):
    ...
    ValueError: Scaled: scale=1e+300 must be 0 or of a size between 1e-12 and 1e+12
    """

    state: Any = None  # one dataclass instance: all that is remembered between rounds
    _options: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]

    @property
    def options(self) -> dict[str, Any]:
        """All options by the name they are given under."""
        return dict(self._options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values and arrays."""
        if self.state is None:
            return {}
        return {f.name: getattr(self.state, f.name) for f in dataclasses.fields(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.state is not None:
            self.state = type(self.state)(**state)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults."""
        kind: Any = type(self)
        defaults = _defaults(kind)
        shown = [f"{n}={v!r}" for n, v in self._options.items() if not _same(v, defaults.get(n))]
        return f"{type(self).__name__}({', '.join(shown)})"


@functools.cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of a class's options."""
    parameters = inspect.signature(kind.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and repr(value) == repr(default))


def _check_size(owner: str, name: str, value: Any) -> None:
    """Raise ValueError for a number that is neither 0 nor of a sensible size; NaN included."""
    size: Any = abs(value) if isinstance(value, Real) else 0
    if size != 0 and not SMALLEST <= size <= LARGEST:
        raise ValueError(
            f"{owner}: {name}={value} must be 0 or of a size between {SMALLEST:g} and {LARGEST:g}"
        )


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)
    floats = [n for n, p in signature.parameters.items() if "float" in str(p.annotation)]

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_options" not in self.__dict__:  # a subclass's __init__ comes first and is kept
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            self._options = dict(list(bound.arguments.items())[1:])
            for name in floats:
                _check_size(type(self).__name__, name, self._options[name])
        init(self, *args, **kwargs)

    return remember
