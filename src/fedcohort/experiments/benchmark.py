"""Benchmarks that anybody can repeat: settings x variants x seeds from one file.

A suite is a TOML file that ships with the package (`suites`). Each pair of a setting and a variant
(a policy with options, perhaps with a gate) is a part: all its seeds run at once, and its result is
a file of its own, so that a suite can be interrupted, and spread over machines. `join` puts the
parts together into one result file. It refuses parts that were made by different code, and a
checkout that differs from its commit.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import fedcohort
from fedcohort.atomic import write_atomically
from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments import config
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.folder import dataset_of, simulation_of
from fedcohort.experiments.results import read_json
from fedcohort.experiments.summary import summarize
from fedcohort.metrics import rounds_to_target
from fedcohort.registry import lookup
from fedcohort.simulate.history import History
from fedcohort.simulate.simulation import Simulation

FIRST_PUBLISHED_SEED = 1000  # those below are for development and tuning
CURVE_STEP = 5  # rounds between two points of a curve in a result file
COMPARED = ("numpy", "scipy", "scikit-learn", "numba", "torch", "flwr", "ray", "faiss-cpu")


@dataclass(frozen=True)
class Part:
    """One setting with one variant, over all seeds.

    Parameters
    ----------
    setting, variant : str
        Labels; a variant is a policy with options, and perhaps a gate.
    experiment : Experiment
        What is run.
    targets : tuple of float
        Accuracies whose first round is reported.
    """

    setting: str
    variant: str
    experiment: Experiment
    targets: tuple[float, ...]

    @property
    def file_name(self) -> str:
        """Name of the part's result file."""
        plain = re.sub(r"[^a-z0-9.]+", "-", f"{self.setting}--{self.variant}".lower()).strip("-")
        digest = hashlib.blake2b(f"{self.setting}/{self.variant}".encode(), digest_size=3)
        return f"{plain}-{digest.hexdigest()}.json"


def suites() -> dict[str, Path]:
    """Return the suites that come with the package, by name."""
    folder = Path(__file__).parent / "suites"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_suite(name: str, *, quick: bool = False) -> list[Part]:
    """Return the parts of a suite of the package, or of a TOML file.

    `quick` applies the suite's [quick] table, which makes it a matter of minutes; its numbers are
    not for publication.
    """
    path = Path(name) if name.endswith(".toml") else lookup("suite", name, suites())
    try:
        suite = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        parts = list(_parts(suite, suite.get("quick", {}) if quick else {}))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a suite ({error!r})") from None
    if not quick and any(min(part.experiment.seeds) < FIRST_PUBLISHED_SEED for part in parts):
        raise ConfigError(f"{path}: published seeds begin at {FIRST_PUBLISHED_SEED}")
    return parts


def _parts(suite: Mapping[str, Any], quick: Mapping[str, Any]) -> Iterator[Part]:
    variants = suite["variants"]
    for setting in suite["settings"]:
        chosen = quick.get("variants") or setting.get("variants") or list(variants)
        for label in chosen:
            values: dict[str, Any] = {}
            own = {"experiment": lookup("variant", label, variants)}
            for table in (suite, setting, quick, own):
                values = _merged(values, table.get("experiment", {}))
            targets = tuple(setting.get("targets", ()))
            yield Part(setting["name"], label, config.parse(values), targets)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `more`, table by table."""
    out = copy.deepcopy(dict(base))
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else copy.deepcopy(value)
    return out


def run_suite(
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    seconds: float | None = None,
    on_part: Callable[[Part, bool], None] | None = None,
) -> list[Part]:
    """Run the parts whose result is not in the folder yet, and return those that are left.

    Parameters
    ----------
    parts : sequence of Part
        What to run.
    folder : path
        One file per part goes there.
    resume : bool, default=False
        Go on in a folder that holds parts already; otherwise such a folder is refused.
    seconds : float, optional
        Begin no further part after this many seconds, for machines that are lent for a while.
    on_part : callable, optional
        Called with each part and whether it was run now.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if not resume and any(place.glob("*.json")):
        raise ConfigError(f"{place} holds results already: continue with --resume")
    started, loaded = time.perf_counter(), _Datasets()
    left = []
    for part in parts:
        path = place / part.file_name
        if path.exists() and _is_of(read_json(path), part):
            if on_part is not None:
                on_part(part, False)
        elif seconds is not None and time.perf_counter() - started > seconds:
            left.append(part)
        else:
            result = run_part(part, loaded.get(part.experiment))
            write_atomically(path, json.dumps(result).encode())
            if on_part is not None:
                on_part(part, True)
    return left


class _Datasets:
    """The last data set, with its hash: neighbors in a suite usually share it."""

    def __init__(self) -> None:
        self.key: object = None
        self.value: tuple[Dataset, str] | None = None

    def get(self, experiment: Experiment) -> tuple[Dataset, str]:
        data = experiment.data
        key = (data.dataset, data.root, data.standardize)
        if self.value is None or key != self.key:
            dataset = dataset_of(data)
            self.key, self.value = key, (dataset, data_digest(dataset))
        return self.value


def _is_of(found: Any, part: Part) -> bool:
    """Whether a part file is of this part and of the present code; others are run again."""
    if not isinstance(found, dict) or not isinstance(found.get("provenance"), dict):
        return False
    made = (found.get("experiment"), found["provenance"].get("source"))
    return made == (_plain(part.experiment), source_digest())


def _plain(experiment: Experiment) -> Any:
    values = config.dump(experiment)
    values.pop("device")  # results do not depend on it
    return json.loads(json.dumps(values))


def run_part(part: Part, data: tuple[Dataset, str]) -> dict[str, Any]:
    """Run one part and return its result, one row per seed."""
    dataset, digest = data
    before = os.getloadavg()[0]
    simulation = simulation_of(part.experiment, dataset)
    selecting = [_Timed(session.policy) for session in simulation.sessions]
    histories = [History(session.seed) for session in simulation.sessions]
    started = time.perf_counter()
    for _ in range(part.experiment.rounds):
        for history, record in zip(histories, simulation.step(), strict=True):
            history.rounds.append(record)
    seconds = time.perf_counter() - started
    rows = [
        _row(simulation, i, history, part, selecting[i].seconds)
        for i, history in enumerate(histories)
    ]
    return {
        "setting": part.setting,
        "variant": part.variant,
        "targets": list(part.targets),
        "experiment": _plain(part.experiment),
        "seconds": seconds,
        "seeds": rows,
        "provenance": {**provenance(), "data": digest, "load": [before, os.getloadavg()[0]]},
    }


class _Timed:
    """Adds up the seconds that a policy takes to select."""

    def __init__(self, policy: Any) -> None:
        self.seconds, self._select = 0.0, policy.select
        policy.select = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._select(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started


def _row(
    simulation: Simulation, index: int, history: History, part: Part, selecting: float
) -> dict[str, Any]:
    seed = simulation.seeds[index]
    model_bytes = seed.session.model_bytes
    summary = summarize(history, seed.federation, seed.session.ledger, None, model_bytes)
    accuracy = history.accuracy
    sent = np.cumsum([r.bytes_up + r.bytes_down for r in history.rounds])
    rounds = [rounds_to_target(accuracy, target) for target in part.targets]
    by_client = client_accuracy(simulation, index)
    tenth = np.sort(by_client)[: max(1, len(by_client) // 10)]
    return {
        "seed": history.seed,
        **{k: v for k, v in summary.as_dict().items() if k not in ("seed", "overhead", "rounds")},
        "rounds_to": rounds,
        "bytes_to": [None if r is None else int(sent[r - 1]) for r in rounds],
        "worst_tenth_accuracy": float(tenth.mean()),
        "select_seconds": selecting / len(history.rounds),
        "curve": [None if np.isnan(a) else round(float(a), 4) for a in thinned(accuracy)],
        "megabytes": [round(float(b) / 1e6, 3) for b in thinned(sent)],
    }


def thinned(values: Sequence[Any] | np.ndarray[Any, Any]) -> Any:
    """Return every fifth value, the last one included, to keep result files small.

    Examples
    --------
    >>> thinned(range(12))
    range(1, 12, 5)
    """
    return values[(len(values) - 1) % CURVE_STEP :: CURVE_STEP]


def client_accuracy(simulation: Simulation, index: int) -> np.ndarray[Any, Any]:
    """Return the share of each client's examples that the global model classifies correctly."""
    seed = simulation.seeds[index]
    parts = [seed.federation.parts[c] for c in seed.clients]
    positions = np.unique(np.concatenate(parts))
    right = np.zeros(len(seed.federation.dataset.x), bool)
    right[positions] = simulation.trainer.hits(seed.model, positions, simulation.train_data)
    return np.array([right[part].mean() for part in parts if len(part)])


def source_digest() -> str:
    """Return a hash of the package's code and settings, the same on every machine."""
    root = Path(fedcohort.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def data_digest(dataset: Dataset) -> str:
    """Return a hash of a data set's arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (dataset.x, dataset.y, dataset.x_test, dataset.y_test):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """Return the command, the code, the machine and the versions behind a result."""
    import torch

    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version()}
    for name in COMPARED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "command": shlex.join(["fedcohort", *map(_without_folder, sys.argv[1:])]),
        "source": source_digest(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "versions": versions,
    }


def _without_folder(word: str) -> str:
    """Leave out where on this machine a file lies."""
    return Path(word).name if Path(word).is_absolute() else word


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def join(
    parts: Sequence[Part], folder: str | os.PathLike[str], name: str, *, quick: bool = False
) -> dict[str, Any]:
    """Return the result of a whole suite from its parts, with the commit that made them.

    DataError if a part is missing, was made by other code than the rest or than this checkout, or
    if the checkout's code differs from its commit.
    """
    found = []
    for part in parts:
        path = Path(folder) / part.file_name
        if not path.exists():
            raise DataError(f"{path} is missing: run {part.setting!r} with {part.variant!r} first")
        result = read_json(path)
        if not _is_of(result, part):
            raise DataError(f"{path} was made by other code or settings: run it again")
        found.append(result)
    origins: list[dict[str, Any]] = []
    for result in found:
        own = result.pop("provenance")
        if own not in origins:
            origins.append(own)
        result["made_by"] = origins.index(own)
    return {
        "suite": name,
        "quick": quick,
        "commit": commit(),
        "provenance": origins,
        "parts": found,
    }


def commit() -> str:
    """Return the commit of the checkout that this code runs from; DataError unless it is clean."""
    root = Path(fedcohort.__file__).resolve().parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            raise DataError(
                f"{root} is not in a git checkout: results are joined in one, so that they can "
                "name their commit"
            ) from None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", str(root))
    if changed:
        raise DataError(f"the code differs from its commit: {changed.splitlines()[0].strip()}")
    return git("rev-parse", "HEAD")
