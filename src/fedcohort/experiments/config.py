"""Experiments: TOML into frozen dataclasses, with errors that name the key.

.. code-block:: toml

    rounds = 100
    seeds = [0, 1, 2]
    policy = "power-of-choice:d=10"
    data = {dataset = "digits", partition = "shards:per_client=2", clients = 50}
    local = {epochs = 3, lr = 0.05, schedule = {gamma = 0.5, milestones = [150, 300]}}

What has a name can be given as text, ``name:key=value,key=value``, as on the command line, or as a
table with ``name`` and ``options``. A name may be ``FILE.py:OBJECT``, relative to the TOML file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fedcohort.exceptions import ConfigError
from fedcohort.options import (
    Count,
    Range,
    ShareBelowOne,
    Whole,
    check_fields,
    in_words,
    parse_named,
    parse_options,
    split_outside_brackets,
    typed,
    unknown,
)
from fedcohort.registry import lookup
from fedcohort.rounds import History, is_over
from fedcohort.simulate.clock import Pace
from fedcohort.simulate.local import LocalTraining, Schedule
from fedcohort.storage import read_toml

Options = Mapping[str, Any]


@dataclass(frozen=True)
class NamedConfig:
    """Something that has a name (registered, or FILE.py:OBJECT), with its keyword arguments."""

    name: str
    options: Options = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name for tables and folders: of an object in a file, the object's."""
        return self.name.rpartition(":")[2]


@dataclass(frozen=True)
class DataConfig:
    """Which data set, split over how many clients in which way.

    Parameters
    ----------
    dataset : str
        A data set, or FILE.py:FUNCTION that returns one, as `from_arrays` does.
    partition : str
        How samples are handed out; "natural" for the clients that the data bring along.
    clients : int, optional
        Clients in the federation: by default 60, or all that the data bring along if "natural".
    options : mapping
        Options of the partition.
    root : str, optional
        The folder with the data sets; by default $FEDCOHORT_DATA.
    standardize : bool
        Subtract a mean and divide by a standard deviation, by default those published for the data.
    mean, std : float, optional
        Constants for `standardize` in the place of the published ones.
    """

    dataset: str = "digits"
    partition: str = "shards"
    clients: int | None = None
    options: Options = field(default_factory=dict)
    root: str | None = None
    standardize: bool = False
    mean: float | None = None
    std: float | None = None

    @property
    def num_clients(self) -> int | None:
        """How many clients are asked for; None for all that the data bring along."""
        return 60 if self.clients is None and self.partition != "natural" else self.clients

    @property
    def source(self) -> tuple[Any, ...]:
        """What decides which arrays are loaded."""
        return self.dataset, self.root, self.standardize, self.mean, self.std


NO_GATE = NamedConfig("none")

#: A local training that learns: FedAvg reaches 80 % of digits with two labels per client.
LOCAL = LocalTraining(epochs=5, batch_size=8, lr=0.05)
NO_HURRY = Pace()


@dataclass(frozen=True)
class Experiment:
    """One setting and one policy, over several seeds.

    Parameters
    ----------
    rounds : int
        Rounds of training.
    cohort_size : int
        Clients per round.
    seeds : list of int
        Each seed is a split, a model and a run of its own.
    target : float, optional
        Accuracy to reach: how many rounds that takes is reported.
    patience : int, optional
        Stop early, once no seed's accuracy has risen for so many evaluations.
    evaluate_every : int
        Rounds between evaluations on the test set.
    train_accuracy : bool
        Evaluate on the training set too.
    holdout : float
        Share of each client's examples that it does not train on: it measures its loss on them.
    dropout : float
        Probability that a selected client does not finish.
    device : str
        "cpu", "cuda" or "auto".
    checkpoint_every : int
        Rounds between checkpoints.
    imports : list of str
        Python files to run first; they may register policies, gates, signals and models.
    data : table
        The federation.
    model : name
        A model, such as "cnn:init=xavier-normal", or FILE.py:CLASS that takes the shape of a sample
        and the number of classes.
    local : table
        What a selected client does.
    policy : name
        Who is selected.
    gate : name
        Who uploads; "none", in Python None, for everybody.
    aggregation : name
        How updates become the next model.
    availability : name
        Which clients are there in a round.
    durations : name
        How fast clients are: "alike", "log-normal:sigma=1", "phones" or "file:path=speeds.csv".
    pace : table
        How long a round waits, and for whom.
    """

    rounds: Count = 60
    cohort_size: Count = 5
    seeds: tuple[Whole, ...] = (0,)
    target: Annotated[float, Range(0, 1, above=True)] | None = None
    patience: Count | None = None
    evaluate_every: Count = 1
    train_accuracy: bool = False
    holdout: ShareBelowOne = 0.0
    dropout: ShareBelowOne = 0.0
    device: str = "auto"
    checkpoint_every: Count = 10
    imports: tuple[str, ...] = ()
    data: DataConfig = DataConfig()
    model: NamedConfig = NamedConfig("mlp-64-30")
    local: LocalTraining = LOCAL
    policy: NamedConfig = NamedConfig("uniform")
    gate: NamedConfig = NO_GATE
    aggregation: NamedConfig = NamedConfig("mean")
    availability: NamedConfig = NamedConfig("always")
    durations: NamedConfig = NamedConfig("alike")
    pace: Pace = NO_HURRY

    def __post_init__(self) -> None:
        check_fields(self, "experiment")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={list(self.seeds)} must be different numbers")
        clients = self.data.num_clients
        if clients is not None and clients < self.cohort_size:
            raise ConfigError(f"cohort_size={self.cohort_size} exceeds data.clients={clients}")

    def is_over(self, histories: Sequence[History]) -> bool:
        """Whether all rounds are there, or no seed's accuracy has risen for `patience`."""
        return is_over(histories, self.rounds, self.patience)


def papers() -> dict[str, Path]:
    """Return the settings of the papers that come with the package, by name."""
    folder = Path(__file__).parent / "papers"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file or ``paper:NAME``; names of Python files become absolute."""
    name = os.fspath(path)
    if name.startswith("paper:"):
        path = lookup("paper setting", name[6:], papers())
    values: dict[str, Any] = _absolute(read_toml(path), Path(path).resolve().parent)
    return values


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors name the file."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise error if text.startswith(f"{path}:") else ConfigError(f"{path}: {text}") from None


def parse(values: Mapping[str, Any]) -> Experiment:
    """Make an experiment of nested mappings; what is not given has its default.

    Examples
    --------
    >>> parse({"policy": "power-of-choice:d=15"}).policy
    NamedConfig(name='power-of-choice', options={'d': 15})
    """
    experiment: Experiment = _filled(Experiment(), values, "")
    return experiment


def dump(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment as plain values, all defaults filled in."""
    return dataclasses.asdict(experiment)


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key, such as ``local.lr``."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{where}{name}.")
        else:
            values[f"{where}{name}"] = list(value) if isinstance(value, tuple) else value
    return values


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, such as ``local.lr``, in nested tables.

    Examples
    --------
    >>> values = {"policy": "oort:alpha=1"}
    >>> put(values, "policy.options.window", 5)
    >>> values
    {'policy': {'name': 'oort', 'options': {'alpha': 1, 'window': 5}}}
    """
    table, path = values, key.split(".")
    for part in path[:-1]:
        inner = table.get(part, {})
        table[part] = _table_of(part, inner) if isinstance(inner, str) else inner
        table = table[part]
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} = {inner!r} is not a table")
    table[path[-1]] = value


def parse_list(text: str) -> list[NamedConfig]:
    """Read comma-separated names, each with its options.

    Examples
    --------
    >>> [p.name for p in parse_list("uniform,oort:alpha=1,window=5,power-of-choice:d=15")]
    ['uniform', 'oort', 'power-of-choice']
    """
    names: list[str] = []
    for part in split_outside_brackets(text):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"  # another option of the last name
        else:
            names.append(part)
    return [NamedConfig(*parse_named(name)) for name in names]


class Key(NamedTuple):
    """One key of the TOML file."""

    table: str
    name: str
    kind: str
    default: Any
    about: str


def reference() -> list[Key]:
    """Return every key of an experiment, from the dataclasses and their docstrings."""
    return list(_keys(Experiment(), ""))


def to_toml(experiment: Experiment, comments: bool = False) -> str:
    """Write an experiment as TOML, all defaults filled in, if asked with what each key means.

    Examples
    --------
    >>> import tomllib
    >>> parse(tomllib.loads(to_toml(Experiment()))) == Experiment()
    True
    """
    lines = ["# An experiment. Run it: fedcohort run FILE."] if comments else []
    table = ""
    for key in _keys(experiment, ""):
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]"]
        if comments:
            lines.append(f"# {key.about or key.name}")
        if key.default is not None:
            lines.append(f"{key.name} = {_toml(key.default)}")
        elif comments:
            lines.append(f"# {key.name} =")
    return "\n".join(lines) + "\n"


def _types(instance: Any) -> dict[str, Any]:
    """Return the declared types of a dataclass's fields, with their ranges."""
    return typing.get_type_hints(type(instance), include_extras=True)


def _filled(base: Any, values: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a dataclass with the given values, names and types checked."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or 'experiment'}={values!r} must be a table")
    hints, given = _types(base), {}
    if isinstance(base, DataConfig) and isinstance(values.get("partition"), str):
        name, options = parse_named(values["partition"])  # such as "shards:per_client=2"
        values = {**values, "partition": name} | ({"options": options} if options else {})
    for key, value in values.items():
        if key not in hints:
            raise unknown("key", key, hints, f"in [{where}]" if where else "")
        path = f"{where}.{key}" if where else key
        inner = _table_default(base, key, value)
        if inner is None:
            given[key] = typed(hints[key], value, path)
        else:
            table = _table_of(key, value) if isinstance(value, str) else value
            given[key] = _filled(inner, table, path)
    return dataclasses.replace(base, **given)


def _table_default(base: Any, key: str, value: Any) -> Any:
    """Return what a table's missing keys are taken from; None where the key is not a table."""
    current = getattr(base, key)
    if isinstance(current, NamedConfig):  # another name does not inherit this one's options
        return NamedConfig(current.name)
    if isinstance(base, LocalTraining) and key == "schedule" and value is not None:
        return Schedule()
    return current if dataclasses.is_dataclass(current) else None


def _table_of(key: str, text: str) -> dict[str, Any]:
    """Return the table that a text stands for: a name with options, or options alone."""
    if key == "data":
        return {"dataset": text}
    if key in ("local", "schedule", "pace"):
        return parse_options(text)
    name, options = parse_named(text)
    return {"name": name, "options": options} if options else {"name": name}


def _absolute(value: Any, folder: Path) -> Any:
    """Make names of Python files that lie beside the TOML file absolute."""
    if isinstance(value, dict):
        return {k: _absolute(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute(v, folder) for v in value]
    if isinstance(value, str) and (match := re.match(r"(.+?\.py)(?=:|$)", value)):
        return str(folder / match[1]) + value[match.end() :]
    return value


def _keys(base: Any, table: str) -> Iterator[Key]:
    plain, about, tables = dataclasses.asdict(base), _abouts(type(base)), []
    for name, hint in _types(base).items():
        value, kind, default = getattr(base, name), in_words(hint), plain[name]
        if isinstance(value, NamedConfig):
            kind, default = "a name", default if value.options else value.name
        elif dataclasses.is_dataclass(value) and not table:
            tables.append((value, name))
            continue
        yield Key(table, name, kind, default, about.get(name, ""))
    for inner, name in tables:
        yield from _keys(inner, name)


def _abouts(kind: type) -> dict[str, str]:
    """Return the meaning of each parameter, from the NumPy docstrings of a class and its bases."""
    abouts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = (base.__doc__ or "").partition("----------\n")[2]
        text = re.split(r"\n\s*\n\s*\w+\n\s*-{3,}", text)[0] + "\n"
        for names, body in re.findall(r"^    (\w[\w, ]*) : .*\n((?:        .*\n|\n)+)", text, re.M):
            abouts |= dict.fromkeys(names.split(", "), " ".join(body.split()))
    return abouts


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)
