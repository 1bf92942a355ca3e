"""Suites: settings x variants x seeds, read from one TOML file into parts.

Each pair of a setting and a variant (a policy with options, perhaps with a gate) is a part. A
setting may name a script of this folder instead of an experiment.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.config import Experiment
from fedcohort.registry import lookup
from fedcohort.storage import read_toml

FIRST_PUBLISHED_SEED = 1000  # those below are for development and tuning
CURVE_STEP = 5  # rounds between two points of a curve in a result file
RENAMED = {  # options of policies in older result files
    ("fedacs", "insight_step", True): ("reward", "gradients"),
    ("fedacs", "gradient_sketch", 100): ("reward", "gradient-sketch"),
}
SUITES = {path.stem: path for path in sorted(Path(__file__).parent.glob("suites/*.toml"))}


@dataclass(frozen=True)
class Script:
    """A measurement that is not a training run: a Python file that writes JSON to `--out`.

    "{device}" among its arguments becomes cpu or cuda. Seeds are given as `--seeds 1000 1001 ...`.
    """

    path: str
    arguments: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    device: str = "auto"


@dataclass(frozen=True)
class Part:
    """One setting with one variant, over all seeds; `targets` are accuracies to reach."""

    suite: str
    setting: str
    variant: str
    experiment: Experiment | Script
    targets: tuple[float, ...] = ()
    curve_step: int = CURVE_STEP

    @property
    def name(self) -> str:
        """Suite, setting and variant, for messages and for choosing parts."""
        return f"{self.suite}: {self.setting}, {self.variant}"

    @property
    def stem(self) -> str:
        """Name of the part's folder, and of its result file without .json."""
        plain = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")
        words = f"{self.suite}/{self.setting}/{self.variant}".encode()
        return f"{plain}-{hashlib.blake2b(words, digest_size=3).hexdigest()}"

    @property
    def file_name(self) -> str:
        return f"{self.stem}.json"

    @property
    def is_script(self) -> bool:
        return isinstance(self.experiment, Script)

    @property
    def values(self) -> Any:
        """What is run, as a result file has it: results do not depend on the device."""
        values = asdict(self.experiment) if self.is_script else config.dump(self.experiment)
        return {k: v for k, v in json.loads(json.dumps(values)).items() if k != "device"}

    def on(self, device: str) -> Part:
        """The part with its device set."""
        return replace(self, experiment=replace(self.experiment, device=device))

    def first(self, seeds: int) -> Part:
        """The part with its first seeds only."""
        kept = self.experiment.seeds[:seeds]
        return replace(self, experiment=replace(self.experiment, seeds=kept))


def read_suite(name: str) -> list[Part]:
    """The parts of a published suite, or of a TOML file."""
    path = Path(name) if name.endswith(".toml") else lookup("suite", name, SUITES)
    try:
        suite = read_toml(path)
        parts = list(_parts(path.stem, suite))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a suite ({error!r})") from None
    first = min((min(p.experiment.seeds) for p in parts if p.experiment.seeds), default=None)
    if not suite.get("tuning") and first is not None and first < FIRST_PUBLISHED_SEED:
        raise ConfigError(f"{path}: published seeds begin at {FIRST_PUBLISHED_SEED}")
    return parts


def published_experiment(values: Mapping[str, Any]) -> Experiment:
    """The experiment of a result file, in today's words."""
    data, policy = values["data"], values["policy"]
    if data["partition"] == "natural":
        data = {**data, "clients": None}
    options = policy["options"].items()
    renamed = dict(RENAMED.get((policy["name"], *option), option) for option in options)
    return config.parse({**values, "data": data, "policy": {**policy, "options": renamed}})


def _parts(name: str, suite: Mapping[str, Any]) -> Iterator[Part]:
    variants, step = suite.get("variants", {}), suite.get("curve_step", CURVE_STEP)
    shared = suite.get("experiment", {})
    for setting in suite["settings"]:
        targets = tuple(setting.get("targets", ()))
        for label in setting.get("variants") or variants:
            run: Experiment | Script
            if label in setting.get("without", ()):
                continue
            if "script" in setting:
                seeds = setting.get("seeds", shared.get("seeds", ()))
                words = (*setting.get("arguments", ()), *setting["variants"][label])
                run = Script(setting["script"], words, tuple(seeds))
            else:
                variant, values = lookup("variant", label, variants), _preset(setting)
                for table in (shared, setting.get("experiment", {}), variant):
                    values = _merged(values, table)
                run = config.parse(values)
            yield Part(name, setting["name"], label, run, targets, step)


def _preset(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The preset that a setting is of, without what its variants and targets say."""
    name, own = setting.get("preset"), ("policy", "gate", "target", "seeds")
    values = config.read_values(f"paper:{name}") if name else {}
    return {key: value for key, value in values.items() if key not in own}


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated by `more`, table by table."""
    out = copy.deepcopy(dict(base))
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else copy.deepcopy(value)
    return out
