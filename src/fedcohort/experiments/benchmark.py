"""Run the parts of suites, and join their results.

All seeds of a part run at once, and each part has a result file of its own, so a suite can be
interrupted and spread over processes and machines. `join` puts the parts of a suite into one result
file. It refuses parts that were made by different code, and a checkout that differs from its
commit.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort import storage
from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments import config
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.folder import dataset_of, simulation_of
from fedcohort.experiments.provenance import (
    checkout,
    commit,
    data_digest,
    provenance,
    source_digest,
)
from fedcohort.experiments.results import read_json
from fedcohort.experiments.suite import CURVE_STEP, Part, Script
from fedcohort.experiments.summary import summarize
from fedcohort.metrics import rounds_to_target
from fedcohort.progress import Progress, Show
from fedcohort.simulate.history import History, record_from
from fedcohort.simulate.local import device_name
from fedcohort.simulate.simulation import Simulation
from fedcohort.storage import write_atomically

MEAN_OF = 5  # evaluations, for rounds_to_mean


def run_suite(
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    seconds: float | None = None,
    progress: bool = False,
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
    progress : bool, default=False
        Show the rounds of each part on standard error.
    on_part : callable, optional
        Called with each part and whether it was run now.
    """
    started, loaded, left = time.perf_counter(), Datasets(), []
    kept, missing = split_done(parts, folder, resume)
    for part in kept:
        if on_part is not None:
            on_part(part, False)
    for part in missing:
        if seconds is not None and time.perf_counter() - started > seconds:
            left.append(part)
            continue
        with Progress() as show:
            write_part(part, folder, loaded, show=show if progress else None)
        if on_part is not None:
            on_part(part, True)
    return left


def split_done(
    parts: Sequence[Part], folder: str | os.PathLike[str], resume: bool
) -> tuple[list[Part], list[Part]]:
    """Return the parts whose result the folder holds, and the others; make the folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if not resume and any(place.glob("*.json")):
        raise ConfigError(f"{place} holds results already: continue with --resume")
    done: list[Part] = []
    left: list[Part] = []
    for part in parts:
        path = place / part.file_name
        (done if path.exists() and _is_of(read_json(path), part) else left).append(part)
    return done, left


class Unfinished(Exception):
    """The time of a training run was over; it goes on from its checkpoint."""


@dataclass
class Checkpoint:
    """Where a training run is kept whose time is over, and when that is (`time.monotonic`).

    A round that would not end before that time, judged by the latest ones, is not begun.
    """

    path: Path
    until: float = float("inf")

    def save(self, simulation: Simulation, histories: list[History], times: list[float]) -> None:
        """Keep all that the next round depends on."""
        records = [[asdict(r) for r in h.rounds] for h in histories]
        state = {"source": source_digest(), "simulation": simulation.state_dict()}
        storage.save(self.path, {**state, "records": records, "times": times})

    def load(self, simulation: Simulation, histories: list[History]) -> list[float] | None:
        """Go on from what was kept, and return its times; None if this code kept nothing."""
        if not self.path.exists():
            return None
        state = storage.load(self.path)
        if state["source"] != source_digest():
            return None
        simulation.load_state_dict(state["simulation"])
        for history, records in zip(histories, state["records"], strict=True):
            history.rounds = [record_from(r) for r in records]
        times: list[float] = state["times"]
        return times


def write_part(
    part: Part,
    folder: str | os.PathLike[str],
    loaded: Datasets,
    until: float = float("inf"),
    show: Show | None = None,
) -> None:
    """Run one part and write its result file; `Unfinished` if its time is over before."""
    place = Path(folder)
    kept = Checkpoint(place / f"{part.file_name}.checkpoint", until)
    result = run_part(part, loaded, kept, show)
    write_atomically(place / part.file_name, json.dumps(result).encode())
    kept.path.unlink(missing_ok=True)


@dataclass
class Datasets:
    """The data sets that were loaded, each with its hash."""

    held: dict[object, tuple[Dataset, str]] = field(default_factory=dict)

    def get(self, experiment: Experiment) -> tuple[Dataset, str]:
        """Load the data set of an experiment, or return it if it is loaded already."""
        data = experiment.data
        key = (data.dataset, data.root, data.standardize)
        if key not in self.held:
            dataset = dataset_of(data)
            self.held[key] = dataset, data_digest(dataset)
        return self.held[key]


def _is_of(found: Any, part: Part) -> bool:
    """Whether a part file is of this part and of the present code; others are run again."""
    if not isinstance(found, dict) or not isinstance(found.get("provenance"), dict):
        return False
    made = (found.get("experiment"), found["provenance"].get("source"))
    return made == (_plain(part.experiment), source_digest(scripts_of(part)))


def _plain(experiment: Experiment | Script) -> Any:
    values = asdict(experiment) if isinstance(experiment, Script) else config.dump(experiment)
    values.pop("device")  # results do not depend on it
    return json.loads(json.dumps(values))


def scripts_of(part: Part) -> Path | None:
    """Return the folder of a part's script; None for a training run."""
    return checkout() / "benchmarks" if isinstance(part.experiment, Script) else None


def run_part(
    part: Part, loaded: Datasets, kept: Checkpoint | None = None, show: Show | None = None
) -> dict[str, Any]:
    """Run one part and return its result, one row per seed; a script returns its own.

    Seconds, load and device are those of the last go.
    """
    before, started = os.getloadavg()[0], time.perf_counter()
    if isinstance(part.experiment, Script):
        found, digest = {"result": run_script(part.experiment)}, None
    else:
        dataset, digest = loaded.get(part.experiment)
        started = time.perf_counter()
        found = {"seeds": _train(part, part.experiment, dataset, kept, show)}
    seconds = time.perf_counter() - started
    load = [before, os.getloadavg()[0]]
    origin = provenance(part.experiment.device, scripts_of(part))
    return {
        "setting": part.setting,
        "variant": part.variant,
        "targets": list(part.targets),
        "experiment": _plain(part.experiment),
        "seconds": seconds,
        "load": load,
        **found,
        "provenance": {**origin, "data": digest},
    }


def _train(
    part: Part,
    experiment: Experiment,
    dataset: Dataset,
    kept: Checkpoint | None,
    show: Show | None,
) -> list[dict[str, Any]]:
    simulation = simulation_of(experiment, dataset)
    selecting = [_Timed(session.policy) for session in simulation.sessions]
    histories = [History(session.seed) for session in simulation.sessions]
    times = kept.load(simulation, histories) if kept is not None else None
    for timed, seconds in zip(selecting, times or (), strict=False):
        timed.seconds = seconds
    expected = 0.0
    while simulation.round_number < experiment.rounds:
        now = time.monotonic()
        if kept is not None and now + expected > kept.until:
            kept.save(simulation, histories, [timed.seconds for timed in selecting])
            raise Unfinished(part.name)
        for history, record in zip(histories, simulation.step(), strict=True):
            history.rounds.append(record)
        if show is not None:
            show(part.name, simulation.round_number, experiment.rounds)
        expected = max(expected / 2, time.monotonic() - now)  # the first round may compile
    return [
        _row(simulation, i, history, part, selecting[i].seconds)
        for i, history in enumerate(histories)
    ]


def run_script(script: Script) -> Any:
    """Run a script of the checkout in this process, and return what it wrote to `--out`."""
    path = checkout() / script.path
    seeds = ["--seeds", *map(str, script.seeds)] if script.seeds else []
    old, old_path = sys.argv, list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        device = {"{device}": device_name(script.device)}
        words = [*(device.get(w, w) for w in script.arguments), *seeds, "--out", str(out)]
        sys.argv, sys.path[:0] = [str(path), *words], [str(path.parent)]
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise DataError(f"{script.path} failed: {end.code}") from None
        finally:
            sys.argv, sys.path[:] = old, old_path
        return read_json(out)["result"]


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
    by_client, step = client_accuracy(simulation, index), part.curve_step
    tenth = np.sort(by_client)[: max(1, len(by_client) // 10)]
    return {
        "seed": history.seed,
        **{k: v for k, v in summary.as_dict().items() if k not in ("seed", "rounds")},
        "rounds_to": rounds,
        "rounds_to_mean": [rounds_to_mean(accuracy, target) for target in part.targets],
        "bytes_to": [None if r is None else int(sent[r - 1]) for r in rounds],
        "worst_tenth_accuracy": float(tenth.mean()),
        "select_seconds": selecting / len(history.rounds),
        "curve": [None if np.isnan(a) else round(float(a), 4) for a in thinned(accuracy, step)],
        "megabytes": [round(float(b) / 1e6, 3) for b in thinned(sent, step)],
    }


def rounds_to_mean(
    accuracy: np.ndarray[Any, Any], target: float, window: int = MEAN_OF
) -> int | None:
    """Return the first round at which the mean of the last evaluations reaches the target.

    A single lucky round counts in `rounds_to_target`; here it does not.

    Examples
    --------
    >>> rounds_to_mean(np.array([0.1, 0.9, 0.1, np.nan, 0.6, 0.7]), 0.6, window=2)
    6
    """
    rounds = np.flatnonzero(np.isfinite(accuracy))
    sums = np.cumsum(np.concatenate([[0.0], accuracy[rounds]]))
    means = (sums[window:] - sums[:-window]) / window
    reached = np.flatnonzero(means >= target)
    return int(rounds[reached[0] + window - 1]) + 1 if reached.size else None


def thinned(values: Sequence[Any] | np.ndarray[Any, Any], step: int = CURVE_STEP) -> Any:
    """Return every fifth value, the last one included, to keep result files small.

    Examples
    --------
    >>> thinned(range(12))
    range(1, 12, 5)
    """
    return values[(len(values) - 1) % step :: step]


def client_accuracy(simulation: Simulation, index: int) -> np.ndarray[Any, Any]:
    """Return the share of each client's examples that the global model classifies correctly."""
    seed = simulation.seeds[index]
    parts = [seed.federation.parts[c] for c in seed.clients]
    positions = np.unique(np.concatenate(parts))
    right = np.zeros(len(seed.federation.dataset.x), bool)
    right[positions] = simulation.trainer.hits(seed.model, positions, simulation.train_data)
    return np.array([right[part].mean() for part in parts if len(part)])


def join(
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    name: str,
    *,
    quick: bool = False,
    partial: bool = False,
) -> dict[str, Any]:
    """Return the result of a whole suite from its parts, with the commit that made them.

    DataError if a part was made by other code than the rest or than this checkout, or if the
    checkout's code differs from its commit. A part that is missing is a DataError too; with
    `partial` its name is listed under "missing".
    """
    found, missing = [], []
    for part in parts:
        path = Path(folder) / part.file_name
        if path.exists():
            result = read_json(path)
            if not _is_of(result, part):
                raise DataError(f"{path} was made by other code or settings: run it again")
            found.append(result)
        elif partial:
            missing.append(f"{part.setting}, {part.variant}")
        else:
            raise DataError(f"{path} is missing: run {part.name!r} first, or join with --partial")
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
        "missing": missing,
        "provenance": origins,
        "parts": found,
    }
