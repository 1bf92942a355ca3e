"""One lookup for everything that has a name: policies, signals, gates, models, partitions, ...

A registry is a plain dict from names to objects. `lookup` finds a name in it, or among the entry
points of installed packages. A package offers a policy of its own in the group of its kind
(`GROUPS`):

.. code-block:: toml

    [project.entry-points."fedcohort.policies"]
    least-used = "my_package.policies:LeastUsed"

`make` calls what a name stands for, with options that are checked against its declared types.
`load_object` takes one from a Python file (``my_policy.py:Mine``). It runs that file, so it is for
names that the user typed, never for names that came from a client or a data file.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
import zlib
from collections.abc import Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from fedcohort.exceptions import ConfigError
from fedcohort.options import checked_options, parse_named, unknown

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
    """Return the object of that name, here or in an installed package."""
    key = str(name)  # a name from a file may be anything
    if key in known:
        return known[key]
    offered = _offered(kind)
    if key in offered:
        return _enter(kind, offered[key], known)
    raise unknown(kind, name, [*known, *offered])


def load_installed(kind: str, known: MutableMapping[str, Any]) -> None:
    """Enter into the registry all that installed packages offer of that kind."""
    for name, point in _offered(kind).items():
        if name not in known:
            _enter(kind, point, known)


def make(
    kind: str, spec: Any, known: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Return the object that ``name:key=value`` describes; an object is returned as it is.

    The name may also be ``FILE.py:OBJECT``; see `load_object`. Options are checked as declared.
    """
    if isinstance(spec, type):
        raise ConfigError(f"{kind} {spec.__name__} is a class; give an object: {spec.__name__}()")
    if not isinstance(spec, str):
        return spec
    name, given = parse_named(spec)
    maker = load_object(kind, name) if in_file(name) else lookup(kind, name, known)
    owner = f"{kind} {name!r}"
    try:
        return maker(**checked_options(owner, maker, given | dict(options or {})))
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ConfigError(text if owner in text else f"{owner}: {text}") from None


_IN_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


def in_file(name: str) -> bool:
    """Whether the name is that of an object in a Python file: ``my_policy.py:Mine``."""
    return _IN_FILE.fullmatch(name) is not None


def load_object(kind: str, name: str) -> Any:
    """Return the object ``FILE.py:OBJECT``; this runs the file."""
    match = _IN_FILE.fullmatch(name)
    if match is None:
        raise ConfigError(f"{kind} {name!r} must be written as FILE.py:NAME")
    module = import_file(match["path"])
    if not hasattr(module, match["name"]):
        raise unknown(kind, match["name"], vars(module), f"in {match['path']}")
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


def _offered(kind: str) -> dict[str, EntryPoint]:
    points = entry_points(group=GROUPS[kind]) if kind in GROUPS else ()
    return {point.name: point for point in points}


def _enter(kind: str, point: EntryPoint, known: Mapping[str, T]) -> T:
    """Load an entry point; what it loads may have registered itself under that name."""
    try:
        loaded: T = point.load()
    except Exception as error:
        package = "a package" if point.dist is None else point.dist.name
        raise ConfigError(
            f"{kind} {point.name!r} of {package} cannot be imported from {point.value!r}: {error}"
        ) from error
    if point.name not in known and isinstance(known, MutableMapping):
        known[point.name] = loaded
    return known.get(point.name, loaded)
