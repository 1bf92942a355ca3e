"""One lookup for everything that has a name: policies, signals, gates, models, partitions, ...

A registry is a plain dict from names to objects. `lookup` finds a name in it, or among the entry
points of installed packages, and otherwise raises the one error for an unknown name.

A package offers a policy of its own with an entry point in the group of its kind (`GROUPS`):

.. code-block:: toml

    [project.entry-points."fedcohort.policies"]
    least-used = "my_package.policies:LeastUsed"
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

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
    """Read a name with options, ``name:key=value;key=value``, as settings and commands write it.

    Examples
    --------
    >>> parse_named("sketch-match:epsilon=1")
    ('sketch-match', {'epsilon': 1})
    """
    name, _, rest = text.strip().partition(":")
    options = {}
    for part in filter(None, rest.split(";")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: write options as name:key=value;key=value")
        options[key.strip()] = _value(value.strip())
    return name.strip(), options


def _value(text: str) -> Any:
    """Read a number, true or false, and anything else as a word."""
    try:
        return json.loads(text)
    except ValueError:
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
