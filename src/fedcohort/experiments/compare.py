"""Several experiments, each in a folder of its own: comparisons of policies, and sweeps."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.config import NO_GATE, DataConfig, Experiment, NamedConfig
from fedcohort.experiments.results import Results, read_run
from fedcohort.experiments.run import check, dataset_of, run
from fedcohort.options import as_text
from fedcohort.rounds import RoundRecord
from fedcohort.storage import make_folder, remove_leftovers, write_atomically

MAX_NAME = 100

#: What `fedcohort compare` runs by default: real digits, two labels per client.
DEFAULT_SETTING = Experiment(
    seeds=(0, 1, 2), target=0.8, data=DataConfig(options={"per_client": 2})
)

#: What a gate's accuracy and traffic are compared with: random cohorts that always upload.
BASELINE = "fedavg"


class Setting(NamedTuple):
    """One experiment of several, and the name of its folder."""

    name: str
    experiment: Experiment


#: Called with a setting's name and the records of every new round.
OnRound = Callable[[str, Sequence[RoundRecord]], None]

#: Runs settings, each in the folder of its name: `in_turn`, or `distribute.run_all` on a cluster.
Runner = Callable[..., None]


def in_turn(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
) -> None:
    """Run settings one after the other; a data set is loaded once for all its neighbors."""
    source, dataset = None, None
    for name, experiment in settings:
        if dataset is None or experiment.data.source != source:
            source, dataset = experiment.data.source, dataset_of(experiment.data)
        report = None if on_round is None else partial(on_round, name)
        run(experiment, Path(folder) / name, resume=resume, on_round=report, dataset=dataset)


def run_several(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    runner: Runner = in_turn,
) -> Results:
    """Run settings, all checked first, in folders of their own, which ``runs.json`` lists."""
    for _, experiment in settings:
        check(experiment)["policy"].check_cohort(experiment.cohort_size)
    root = make_folder(folder)
    remove_leftovers(root)
    names = [name for name, _ in settings]
    write_atomically(root / "runs.json", json.dumps(names, indent=2).encode())
    runner(settings, root, resume=resume, on_round=on_round)
    return Results(read_run(root / name) for name in names)


def compare(
    setting: Experiment, policies: Sequence[NamedConfig], folder: str | os.PathLike[str], **how: Any
) -> Results:
    """Run `setting` with each policy, as `run_several` does with its keyword arguments.

    With a gate, plain FedAvg runs first, named `BASELINE`: random cohorts and no gate.
    """
    return run_several(settings_of(setting, policies), folder, **how)


def settings_of(setting: Experiment, policies: Sequence[NamedConfig]) -> list[Setting]:
    """Return one setting per policy, as `compare` runs them."""
    settings = [
        Setting(name, dataclasses.replace(setting, policy=policy))
        for name, policy in zip(labels(policies), policies, strict=True)
    ]
    if setting.gate != NO_GATE:
        plain = dataclasses.replace(setting, policy=NamedConfig("uniform"), gate=NO_GATE)
        settings.insert(0, Setting(BASELINE, plain))
    return settings


def labels(policies: Sequence[NamedConfig]) -> list[str]:
    """Return one name per policy: its own, with the options where a name occurs twice.

    Examples
    --------
    >>> labels([NamedConfig("oort"), NamedConfig("oort", {"alpha": 1}), NamedConfig("uniform")])
    ['oort', 'oort,alpha=1', 'uniform']
    """
    plain = [policy.label for policy in policies]
    names = [
        _folder_name(",".join([label, *(f"{k}={as_text(v)}" for k, v in policy.options.items())]))
        if plain.count(label) > 1
        else label
        for label, policy in zip(plain, policies, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ConfigError(f"the policies {', '.join(names)}: give each one once")
    return names


def read(
    path: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    imports: Sequence[str] = (),
    default: Experiment | None = None,
) -> Experiment | list[Setting]:
    """Read the experiment of a TOML file or ``paper:NAME``, or the settings of its ``[sweep]``.

    Without a `path` it is the `default`. By dotted key, `overrides` replace what it says.
    """
    values = config.dump(default or Experiment()) if path is None else config.read_values(path)
    if imports:
        values["imports"] = [*values.get("imports", ()), *imports]
    changes = dict(overrides or {})
    if "data.partition" in changes:  # it does not inherit the options of another one
        config.put(values, "data.options", {})
    for key, value in changes.items():
        config.put(values, key, value)
    with nullcontext() if path is None else config.naming(path):
        return expand(values) if "sweep" in values else config.parse(values)


def expand(values: Mapping[str, Any]) -> list[Setting]:
    """Return every combination, the last key varying fastest.

    Examples
    --------
    >>> settings = expand({"sweep": {"local.lr": [0.1, 0.2], "policy": ["uniform", "oort"]}})
    >>> [setting.name for setting in settings][:2]
    ['local.lr=0.1,policy=uniform', 'local.lr=0.1,policy=oort']
    >>> settings[-1].experiment.local.lr, settings[-1].experiment.policy.name
    (0.2, 'oort')
    """
    base = {key: value for key, value in values.items() if key != "sweep"}
    table = values["sweep"]
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f'[sweep] sweep = {table!r}: must be a table of lists, such as "local.lr" = [0.1, 0.2]'
        )
    axes = config.flat(table)
    for key, choices in axes.items():
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"[sweep] {key} = {choices!r} must be a list of values")
        if len(set(map(as_text, choices))) < len(choices):
            raise ConfigError(f"[sweep] {key} = {choices!r}: give each value once")
    combinations = itertools.product(*axes.values())
    return [_setting(base, dict(zip(axes, chosen, strict=True))) for chosen in combinations]


def _setting(base: Mapping[str, Any], chosen: Mapping[str, Any]) -> Setting:
    values = copy.deepcopy(dict(base))
    text = ",".join(f"{key}={as_text(value)}" for key, value in chosen.items())
    try:
        for key, value in chosen.items():
            config.put(values, key, copy.deepcopy(value))
        experiment = config.parse(values)
        check(experiment)
    except ConfigError as error:
        raise ConfigError(f"[sweep] {text}: {error}") from None
    return Setting(_folder_name(text), experiment)


def _folder_name(text: str) -> str:
    """Return a folder's name; a digest tells apart what plain characters cannot."""
    plain = re.sub(r"[^\w.=,+-]+", "_", text, flags=re.ASCII)
    if plain == text and len(text) <= MAX_NAME:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{plain[:MAX_NAME]}-{digest}"
