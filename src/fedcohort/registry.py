"""One lookup for everything that has a name: policies, signals, gates, models, partitions, ...

A registry is a plain dict from names to objects. `lookup` finds a name in it, or among the entry
points of installed packages, and otherwise raises the one error for an unknown name.

A package offers a policy of its own with an entry point in the group of its kind (`GROUPS`):

.. code-block:: toml

    [project.entry-points."fedcohort.policies"]
    least-used = "my_package.policies:LeastUsed"

`make` calls what a name stands for, with options that are checked against its declared types.
`load_object` takes one from a Python file (``my_policy.py:Mine``). It runs that file, so it is for
names that the user typed, never for names that came from a client or a data file.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import math
import re
import sys
import types
import typing
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedcohort.exceptions import ConfigError

T = TypeVar("T")

#: The entry-point group of each kind that installed packages can extend.
GROUPS = {
    "policy": "fedcohort.policies",
    "signal": "fedcohort.signals",
    "gate": "fedcohort.gates",
    "model": "fedcohort.models",
    "partition": "fedcohort.partitions",
    "data set": "fedcohort.datasets",
    "aggregation": "fedcohort.aggregations",
    "availability": "fedcohort.availabilities",
}


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return the object of that name.

    Parameters
    ----------
    kind : str
        What the name is of, in words: "policy", "data set". A key of `GROUPS` also finds what
        installed packages offer.
    name : str
    known : mapping of str to object
        The registry.

    Raises
    ------
    ConfigError
        If there is no such name; it lists the names and suggests the nearest.

    Examples
    --------
    >>> lookup("color", "red", {"red": 1, "green": 2})
    1
    >>> lookup("color", "gren", {"red": 1, "green": 2})
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.ConfigError: unknown color 'gren'; did you mean 'green'? Known: red, green
    """
    is_text = isinstance(name, str)  # a name from a file may be anything
    if is_text and name in known:
        return known[name]
    offered = _offered(kind)
    if is_text and name in offered:
        return _enter(kind, offered[name], known)
    raise unknown(kind, name, [*known, *offered])


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name:key=value,key=value``; the name may be ``FILE.py:OBJECT``.

    Examples
    --------
    >>> parse_named("oort:alpha=1,normalize=false")
    ('oort', {'alpha': 1, 'normalize': False})
    >>> parse_named("my_policy.py:Mine:d=3")
    ('my_policy.py:Mine', {'d': 3})
    """
    match = re.fullmatch(r"\s*(.*?\.py:\w+|[^:]*)(?::(.*))?", text, re.S)
    if match is None:
        raise ConfigError(f"{text!r} must be written as name:key=value,key=value")
    return match[1].strip(), parse_options(match[2] or "")


def parse_options(text: str) -> dict[str, Any]:
    """Read ``key=value,key=value``; values are numbers, true, false, none, [lists] or words.

    Examples
    --------
    >>> parse_options("epochs=3,betas=[0.9,0.99],optimizer=adam")
    {'epochs': 3, 'betas': [0.9, 0.99], 'optimizer': 'adam'}
    """
    options = {}
    for part in split_outside_brackets(text):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{part!r} must be written as key=value, in name:key=value,key=value")
        options[key.strip()] = parse_value(value.strip())
    return options


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are not inside brackets; empty parts are left out.

    Examples
    --------
    >>> split_outside_brackets("a=[[1,2],[3]], b={x}")
    ['a=[[1,2],[3]]', 'b={x}']
    """
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
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unknown(kind: str, name: object, names: Iterable[str], where: str = "") -> ConfigError:
    """Return the error for an unknown name: it lists the names and suggests the nearest.

    Examples
    --------
    >>> print(unknown("key", "epoch", ["epochs", "lr"], "in [local]"))
    unknown key 'epoch' in [local]; did you mean 'epochs'? Known: epochs, lr
    >>> print(unknown("policy", "x", []))
    unknown policy 'x'. There are none
    """
    listed = list(dict.fromkeys(names))
    culprit = f"unknown {kind} {name!r}" + (f" {where}" if where else "")
    if not listed:
        return ConfigError(f"{culprit}. There are none")
    near = nearest(str(name), listed)
    hint = "." if near is None else f"; did you mean {near!r}?"
    return ConfigError(f"{culprit}{hint} Known: {', '.join(listed)}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that looks most like the given one, None if none does.

    Examples
    --------
    >>> nearest("Power_of_choise", ["oort", "power-of-choice"])
    'power-of-choice'
    """
    plain = {_plain(known): known for known in names}
    close = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[close[0]] if close else None


def load_installed(kind: str, known: MutableMapping[str, Any]) -> None:
    """Enter into the registry all that installed packages offer of that kind."""
    for name, point in _offered(kind).items():
        if name not in known:
            _enter(kind, point, known)


def make(kind: str, name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call what the name stands for, after checking the options' names and types.

    A name may also be ``FILE.py:OBJECT``; see `load_object`.

    Examples
    --------
    >>> make("number", "complex", {"complex": lambda real: real + 1j}, {"real": 2})
    (2+1j)
    """
    maker = load_object(kind, name) if in_file(name) else lookup(kind, name, known)
    given = checked_options(f"{kind} {name!r}", maker, options)
    try:
        return maker(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from None


def checked_options(
    owner: str, maker: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options in their declared types.

    Parameters
    ----------
    owner : str
        What has the options, for messages: ``policy 'oort'``.
    maker : callable
        Its signature declares names and types; what has no type is accepted as it is.
    options : mapping

    Examples
    --------
    >>> def ring(radius: float, closed: bool = True): ...
    >>> checked_options("ring", ring, {"radius": 2})
    {'radius': 2.0}
    >>> checked_options("ring", ring, {"radius": "wide"})
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.ConfigError: ring: radius = 'wide' must be a finite number
    """
    declared = _declared if isinstance(maker, Hashable) else _declared.__wrapped__
    parameters, hints = declared(maker)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(options)
    given = {}
    for key, value in options.items():
        if key not in parameters:
            raise unknown("option", key, parameters, f"of {owner}")
        given[key] = typed(hints.get(key, Any), value, f"{owner}: {key}")
    return given


def typed(hint: Any, value: Any, where: str) -> Any:
    """Return a value of a file or a command line in the declared type.

    Whole numbers pass as floats, lists as tuples, the word "none" as None. Numbers must be finite.

    Examples
    --------
    >>> typed(float | None, 3, "lr"), typed(tuple[int, ...], [1, 2], "seeds")
    (3.0, (1, 2))
    """
    if type(value) is hint and hint in (int, str, bool):
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return _one_of(args, value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(typed(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max and not math.isnan(value):
            return float(value)
    elif hint is Any or (
        isinstance(hint, type) and isinstance(value, hint) and not _bool_as_int(hint, value)
    ):
        return value
    raise ConfigError(f"{where} = {value!r} must be {in_words(hint)}")


def in_words(hint: Any) -> str:
    """Return a type as a person would say it.

    Examples
    --------
    >>> in_words(int | None), in_words(Literal["sgd", "adam"]), in_words(tuple[int, ...])
    ('a whole number or none', "'sgd' or 'adam'", 'a list')
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join(in_words(arg) for arg in args)
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is tuple:
        return "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a word"}
    return words.get(hint, "none" if hint is type(None) else getattr(hint, "__name__", str(hint)))


_IN_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


def in_file(name: str) -> bool:
    """Whether the name is that of an object in a Python file.

    Examples
    --------
    >>> in_file("my_policy.py:Mine"), in_file("oort")
    (True, False)
    """
    return _IN_FILE.fullmatch(name) is not None


def load_object(kind: str, name: str) -> Any:
    """Return the object ``FILE.py:OBJECT``; this runs the file."""
    match = _IN_FILE.fullmatch(name)
    if match is None:
        raise ConfigError(f"{kind} {name!r} must be written as FILE.py:NAME")
    module = import_file(match["path"])
    if not hasattr(module, match["name"]):
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        raise unknown(kind, match["name"], own, f"in {match['path']}")
    return getattr(module, match["name"])


def import_file(path: str) -> types.ModuleType:
    """Run a Python file as a module, once per process, and return it."""
    file = Path(path).resolve()
    name = f"fedcohort_user_{file.stem}_{zlib.crc32(bytes(file)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError(f"{path}: no such Python file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))  # its own neighbors can be imported, as in a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if type(None) in choices and (value is None or value == "none"):
        return None
    for choice in choices:
        try:
            return typed(choice, value, where)
        except ConfigError:
            continue
    words = " or ".join(in_words(choice) for choice in choices)
    raise ConfigError(f"{where} = {value!r} must be {words}")


def _bool_as_int(hint: type, value: object) -> bool:
    return hint is int and isinstance(value, bool)


@lru_cache(maxsize=256)
def _declared(
    maker: Callable[..., Any],
) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """Return the parameters and the types that the signature of a callable declares."""
    parameters = inspect.signature(maker).parameters
    try:
        function: Any = getattr(maker, "__init__") if isinstance(maker, type) else maker  # noqa: B009
        return parameters, typing.get_type_hints(function)
    except (NameError, TypeError):  # someone else's annotations that cannot be evaluated here
        return parameters, {}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _offered(kind: str) -> dict[str, EntryPoint]:
    if kind not in GROUPS:
        return {}
    return {point.name: point for point in entry_points(group=GROUPS[kind])}


def _enter(kind: str, point: EntryPoint, known: Mapping[str, T]) -> T:
    """Load an entry point; what it loads may have registered itself under that name."""
    try:
        found: T = point.load()
    except Exception as error:
        package = "a package" if point.dist is None else point.dist.name
        raise ConfigError(
            f"{kind} {point.name!r} of {package} cannot be imported from {point.value!r}: {error}"
        ) from error
    if point.name not in known and isinstance(known, MutableMapping):
        known[point.name] = found
    return known.get(point.name, found)
