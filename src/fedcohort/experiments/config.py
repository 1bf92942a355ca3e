"""TOML -> frozen dataclasses, with errors that name the key.

.. code-block:: toml

    rounds = 100
    cohort_size = 5
    seeds = [0, 1, 2]
    target = 0.8

    [data]
    dataset = "digits"
    partition = "shards"
    clients = 50
    options = {per_client = 2}

    [model]
    name = "mlp-64-30"

    [local]
    epochs = 3
    batch_size = 64
    lr = 0.05
    halve_at = [150, 300]

    [policy]
    name = "power-of-choice"
    options = {d = 10}
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError
from fedcohort.registry import lookup, unknown

Options = Mapping[str, Any]


@dataclass(frozen=True)
class DataConfig:
    """Which data set, split over how many clients in which way."""

    dataset: str = "digits"
    partition: str = "shards"
    clients: int = 50
    options: Options = field(default_factory=dict)
    root: str | None = None
    standardize: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A reference model by name."""

    name: str = "mlp-64-30"


@dataclass(frozen=True)
class LocalConfig:
    """What a client does with the model; see `fedcohort.simulate.LocalTraining`."""

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox_mu: float = 0.0
    epoch_decay: float = 1.0
    round_decay: float = 1.0
    halve_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class NamedConfig:
    """Something of a registry: its name and its keyword arguments."""

    name: str
    options: Options = field(default_factory=dict)


NO_GATE = NamedConfig("none")


@dataclass(frozen=True)
class Experiment:
    """One setting and one policy, over several seeds."""

    rounds: int = 50
    cohort_size: int = 5
    seeds: tuple[int, ...] = (0,)
    target: float | None = None
    evaluate_every: int = 1
    dropout: float = 0.0
    device: str = "auto"
    checkpoint_every: int = 10
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    local: LocalConfig = LocalConfig()
    policy: NamedConfig = NamedConfig("uniform")
    gate: NamedConfig = NO_GATE
    aggregation: NamedConfig = NamedConfig("mean")
    availability: NamedConfig = NamedConfig("always")

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort_size", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds = {list(self.seeds)} must be different numbers")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout = {self.dropout} must lie in [0, 1)")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"target = {self.target} is an accuracy: it must lie in (0, 1]")
        if self.data.clients < self.cohort_size and self.data.partition != "natural":
            raise ConfigError(
                f"cohort_size = {self.cohort_size} exceeds data.clients = {self.data.clients}"
            )


def papers() -> dict[str, Path]:
    """Return the settings of the papers that come with the package, by name."""
    folder = Path(__file__).parent / "papers"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read(path: str | os.PathLike[str]) -> Experiment:
    """Read an experiment from a TOML file, or ``paper:NAME`` from the package."""
    name = os.fspath(path)
    if name.startswith("paper:"):
        path = lookup("paper setting", name[6:], papers())
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        return parse(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(values: Mapping[str, Any]) -> Experiment:
    """Make an experiment of nested mappings.

    Examples
    --------
    >>> parse({"rounds": 3, "local": {"lr": 0.1}}).local.lr
    0.1
    >>> parse({"gate": {"nam": "cmfl"}})
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.ConfigError: unknown key 'nam' in [gate]; did you mean 'name'? ...
    """
    experiment: Experiment = _build(Experiment, values, "")
    return experiment


def dump(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment as plain values, all defaults filled in."""
    return dataclasses.asdict(experiment)


def _build(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Fill a dataclass, checking names and types of its keys."""
    hints = typing.get_type_hints(kind)
    given = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown("key", key, hints, f"in [{where}]" if where else "")
        path = f"{where}.{key}" if where else key
        if dataclasses.is_dataclass(hints[key]):
            if isinstance(value, str) and "name" in typing.get_type_hints(hints[key]):
                value = {"name": value}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} = {value!r} must be a table")
            given[key] = _build(typing.cast(type[Any], hints[key]), value, path)
        else:
            given[key] = _typed(hints[key], value, path)
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"[{where}] {error}") from None


def _typed(hint: Any, value: Any, where: str) -> Any:
    """Return the value in the hinted type: whole numbers pass as floats, lists as tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        if value is None:
            return None
        return _typed(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} = {value!r} must be a list")
        return tuple(_typed(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r} must be a table")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}: the number is too large") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}")
    return value
