"""Many settings from one file: every combination of the values in its ``[sweep]`` table.

.. code-block:: toml

    rounds = 40

    [sweep]
    policy = ["uniform", {name = "power-of-choice", options = {d = 15}}]
    "data.options.alpha" = [0.1, 1.0]
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.build import gate_of, policy_of
from fedcohort.experiments.several import Setting

LONGEST_NAME = 100


def read(path: str | os.PathLike[str]) -> list[Setting] | None:
    """Read the settings of a TOML file; None if it has no ``[sweep]`` table."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config.read(path)  # says what is wrong, unless it knows the name
        return None
    if "sweep" not in values:
        return None
    try:
        return expand(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def expand(values: Mapping[str, Any]) -> list[Setting]:
    """Return every combination, the last key varying fastest.

    Examples
    --------
    >>> found = expand({"sweep": {"local.lr": [0.1, 0.2], "policy": ["uniform", "oort"]}})
    >>> [setting.name for setting in found][:2]
    ['local.lr=0.1,policy=uniform', 'local.lr=0.1,policy=oort']
    >>> found[-1].experiment.local.lr, found[-1].experiment.policy.name
    (0.2, 'oort')
    """
    base = {key: value for key, value in values.items() if key != "sweep"}
    table = values["sweep"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"[sweep] sweep = {table!r}: must be a table of lists")
    axes = dict(_axes(table, ""))
    if not axes:
        raise ConfigError('[sweep] must be a table of lists, such as "local.lr" = [0.1, 0.2]')
    combinations = itertools.product(*axes.values())
    return [_setting(base, dict(zip(axes, chosen, strict=True))) for chosen in combinations]


def _axes(table: Any, where: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield dotted keys and their values; ``a.b`` may be written quoted or as nested tables."""
    if isinstance(table, Mapping):
        for key, inner in table.items():
            yield from _axes(inner, f"{where}.{key}" if where else key)
        return
    if not isinstance(table, list) or not table:
        raise ConfigError(f"[sweep] {where} = {table!r} must be a list of values")
    if len({json.dumps(value, sort_keys=True, default=str) for value in table}) < len(table):
        raise ConfigError(f"[sweep] {where} = {table!r}: give each value once")
    yield where, table


def _setting(base: Mapping[str, Any], chosen: Mapping[str, Any]) -> Setting:
    values = copy.deepcopy(dict(base))
    text = ",".join(f"{key}={_text(value)}" for key, value in chosen.items())
    try:
        for key, value in chosen.items():
            _put(values, key.split("."), value)
        experiment = config.parse(values)
        policy_of(experiment.policy)
        gate_of(experiment.gate)
    except ConfigError as error:
        raise ConfigError(f"[sweep] {text}: {error}") from None
    return Setting(_name(text), experiment)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a dotted key; a table given by its name alone, policy = "oort", becomes a table."""
    table = values
    for key in path[:-1]:
        inner = table.get(key, {})
        table[key] = {"name": inner} if isinstance(inner, str) else inner
        table = table[key]
        if not isinstance(table, dict):
            raise ConfigError(f"{'.'.join(path)}: {key} = {inner!r} is no table")
    table[path[-1]] = copy.deepcopy(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _name(text: str) -> str:
    """Return a folder's name; a digest tells apart what plain characters cannot."""
    plain = re.sub(r"[^\w.=,+-]+", "_", text, flags=re.ASCII)
    if plain == text and len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{plain[:LONGEST_NAME]}-{digest}"
