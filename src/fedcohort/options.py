"""Options: how they are written, declared and checked, each once.

A policy, a gate or a partition declares its options as the annotated parameters of its constructor:
types, choices (`Literal`) and ranges (`Range` inside `Annotated`). Whoever gives a value, it is
checked and converted by `typed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from fedcohort.exceptions import ConfigError

SMALLEST, LARGEST = 1e-12, 1e12  # sizes of a float option other than 0: arithmetic stays finite
_UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, without `low` if `above` and without `high` if `below`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.above else self.low <= value
        return above and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.below else f"at most {self.high:g}"
        ends = ((low, self.low), (high, self.high))
        return " and ".join(words for words, end in ends if math.isfinite(end))


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name:key=value,key=value``; the name may be ``FILE.py:OBJECT``.

    >>> parse_named("sgd:epochs=3,betas=[0.9,0.99],optimizer=adam,shuffle=False")
    ('sgd', {'epochs': 3, 'betas': [0.9, 0.99], 'optimizer': 'adam', 'shuffle': False})
    >>> parse_named("my_policy.py:Mine:d=3")
    ('my_policy.py:Mine', {'d': 3})
    """
    match = re.fullmatch(r"\s*(.*?\.py:\w+|[^:]*)(?::(.*))?", text, re.S)
    assert match is not None  # a name may be empty
    return match[1].strip(), parse_options(match[2] or "")


def parse_options(text: str) -> dict[str, Any]:
    """Read ``key=value,key=value``; values are numbers, true, false, none, [lists] or words."""
    options = {}
    for part in split_outside_brackets(text):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{part!r} must be written as key=value, in name:key=value,key=value")
        options[key.strip()] = parse_value(value.strip())
    return options


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are not inside brackets; empty parts are left out."""
    parts, start, depth = [], 0, 0
    for mark in re.finditer(r"[\[\]{},]", text):
        if mark[0] == ",":
            if not depth:
                parts.append(text[start : mark.start()])
                start = mark.end()
        else:
            depth = max(0, depth + (1 if mark[0] in "[{" else -1))
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def parse_value(text: str) -> Any:
    """Read a number, true, false or a list, and anything else as a word."""
    if text in ("True", "False"):  # as Python writes them
        return text == "True"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def as_text(value: object) -> str:
    """Write what `parse_value` reads."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def unknown(kind: str, name: object, names: Iterable[str], where: str = "") -> ConfigError:
    """Return the error for an unknown name: it lists the names and suggests the nearest."""
    listed = list(dict.fromkeys(names))
    by_kebab = {text.lower().replace("_", "-"): text for text in listed}
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), by_kebab, n=1)
    hint = f"; did you mean {by_kebab[close[0]]!r}?" if close else "."
    culprit = f"unknown {kind} {name!r}" + (f" {where}" if where else "")
    return ConfigError(f"{culprit}{hint} Known: {', '.join(listed) or 'none'}")


def checked_options(
    owner: str, maker: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options in the types that the signature of `maker` declares."""
    parameters, hints = _signature(maker)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(options)
    for key in options:
        if key not in parameters:
            raise unknown("option", key, parameters, f"of {owner}")
    return {k: typed(hints.get(k, Any), v, f"{owner}: {k}") for k, v in options.items()}


def check_fields(instance: Any, owner: str) -> None:
    """Check and convert the fields of a frozen dataclass as they are declared."""
    given = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
    for name, value in checked_options(owner, type(instance), given).items():
        object.__setattr__(instance, name, value)


def typed(hint: Any, value: Any, where: str) -> Any:
    """Return a value in the declared type, or raise ConfigError.

    Whole numbers pass as floats, lists as tuples, the word "none" as None. Numbers must be finite
    and in their range.

    >>> typed(float | None, 3, "lr"), typed(tuple[int, ...], [1, 2], "seeds")
    (3.0, (1, 2))
    """
    if type(value) is hint and hint in (int, str, bool):
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        result = typed(args[0], value, where)
        if any(isinstance(limit, Range) and result not in limit for limit in args[1:]):
            raise ConfigError(f"{where}={value!r} must be {in_words(hint)}")
        return result
    if origin in _UNIONS:
        if type(None) in args and (value is None or value == "none"):
            return None
        for choice in args:
            with contextlib.suppress(ConfigError):
                return typed(choice, value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(typed(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if hint is float and is_number and abs(value) <= sys.float_info.max:  # and not NaN
        return float(value)
    if hint is int and is_number and isinstance(value, Integral):
        return int(value)
    if hint is Any or (
        isinstance(hint, type) and hint not in (int, float) and isinstance(value, hint)
    ):
        return value
    raise ConfigError(f"{where}={value!r} must be {in_words(hint)}")


def in_words(hint: Any) -> str:
    """Return a type as a person would say it: "a whole number, at least 1, or none"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [str(limit) for limit in args[1:] if isinstance(limit, Range)]
        comma = "" if limits and limits[0].startswith("above") else ","
        return f"{in_words(args[0])}{comma} {' and '.join(limits)}" if limits else in_words(args[0])
    if origin in _UNIONS:
        words = [in_words(arg) for arg in args]
        return words[0] + "".join(f"{',' * (',' in words[0])} or {word}" for word in words[1:])
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is tuple:
        return "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table"
    if hint is type(None):
        return "none"
    plain = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a word"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


@functools.lru_cache(maxsize=256)
def _signature(maker: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    parameters = inspect.signature(maker).parameters
    try:
        function: Any = vars(maker).get("__init__", maker) if isinstance(maker, type) else maker
        return parameters, typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # someone else's annotations that cannot be evaluated here
        return parameters, {}


class Configurable:
    """Remembers the arguments of its `__init__`, as given or by default, and its `state`.

    Options of plain types are checked and converted as `typed` says. Floats must also be 0 or have
    a size between `SMALLEST` and `LARGEST`, so that nothing overflows or vanishes.

    >>> class Example(Configurable):
    ...     def __init__(self, size: Count = 3, scale: float = 1.0) -> None:
    ...         self.scale = scale
    >>> Example(size=5), Example().options, Example(scale=2).scale
    (Example(size=5), {'size': 3, 'scale': 1.0}, 2.0)
    """

    state: Any = None  # one dataclass instance: all that is remembered between rounds
    _options: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]

    @property
    def options(self) -> dict[str, Any]:
        """All options by name."""
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
        usual = {k: p.default for k, p in inspect.signature(type(self)).parameters.items()}
        shown = [f"{k}={v!r}" for k, v in self._options.items() if repr(v) != repr(usual[k])]
        return f"{type(self).__name__}({', '.join(shown)})"


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def check(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_options" in self.__dict__:  # a subclass's __init__ came first; its options are kept
            return init(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *names = bound.arguments
        for name in names:
            hint, where = _signature(init)[1].get(name), f"{type(self).__name__}: {name}"
            if _is_plain(hint):
                bound.arguments[name] = value = typed(hint, bound.arguments[name], where)
                if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
                    sizes = f"{SMALLEST:g} and {LARGEST:g}"
                    raise ConfigError(f"{where}={value!r} must be 0 or of a size between {sizes}")
        self._options = {name: bound.arguments[name] for name in names}
        return init(*bound.args, **bound.kwargs)

    return check


def _is_plain(hint: Any) -> bool:
    """Whether a type is made of numbers, words, None, lists and tables of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, tuple):
        return _is_plain(args[0])
    if origin in _UNIONS:
        return all(map(_is_plain, args))
    plain = (int, float, bool, str, type(None))
    return hint in plain or origin in (Literal, Mapping, dict)
