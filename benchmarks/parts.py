"""Run the parts of suites, and join their results.

All seeds of a part run at once, in a run folder of their own, so a suite can be interrupted. A
finished part is one result file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from provenance import ROOT, clean_commit, provenance, source_digest
from suite import Part, Script

from fedcohort import storage
from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.results import Summary, read_json
from fedcohort.experiments.run import dataset_of, run, simulation_of
from fedcohort.metrics import rounds_to_target
from fedcohort.rounds import History
from fedcohort.simulate.simulation import Simulation
from fedcohort.storage import write_atomically

LOADED: dict[object, tuple[Dataset, str]] = {}  # data sets, each with its hash


class OutOfTime(Exception):
    """No time is left for more rounds; those that were run are saved."""


def loaded(experiment: Experiment) -> tuple[Dataset, str]:
    """The data set of an experiment, read once, and a hash of its arrays."""
    source = experiment.data.source
    if source not in LOADED:
        dataset, digest = dataset_of(experiment.data), hashlib.blake2b(digest_size=16)
        for array in (dataset.x, dataset.y, dataset.x_test, dataset.y_test):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        LOADED[source] = dataset, digest.hexdigest()
    return LOADED[source]


def split_done(parts: Sequence[Part], folder: Path, resume: bool) -> tuple[list[Part], list[Part]]:
    """The parts whose result the folder holds, made by the present code, and the others."""
    folder.mkdir(parents=True, exist_ok=True)
    if not resume and any(folder.glob("*.json")):
        raise ConfigError(f"{folder} holds results already: continue with --resume")
    done, left = [], []
    for part in parts:
        path = folder / part.file_name
        (done if path.exists() and is_of(read_json(path), part) else left).append(part)
    return done, left


def is_of(result: Any, part: Part) -> bool:
    """Whether a result is of this part and of the present code."""
    if not isinstance(result, dict) or not isinstance(result.get("provenance"), dict):
        return False
    made_of = (result.get("experiment"), result["provenance"].get("source"))
    return made_of == (part.values, source_digest(part.is_script))


def write_part(part: Part, folder: Path, until: float = math.inf) -> bool:
    """Run one part, from its checkpoint if there is one, and write its result file.

    Return whether that was possible `until` then, a time in seconds since the epoch: a run is saved
    after a round and a script is not begun.
    """
    if time.time() >= until:
        return False
    before, started, digest = os.getloadavg()[0], time.perf_counter(), None
    try:
        if isinstance(part.experiment, Script):
            measured: dict[str, Any] = {"result": run_script(part.experiment)}
        else:
            dataset, digest = loaded(part.experiment)
            started = time.perf_counter()
            measured = {"seeds": _train(part, dataset, folder / part.stem, until)}
    except OutOfTime:
        return False
    result = {
        "setting": part.setting,
        "variant": part.variant,
        "targets": list(part.targets),
        "experiment": part.values,
        "seconds": time.perf_counter() - started,
        "load": [before, os.getloadavg()[0]],
        **measured,
        "provenance": provenance(part.experiment.device, part.is_script) | {"data": digest},
    }
    write_atomically(folder / part.file_name, json.dumps(result).encode())
    shutil.rmtree(folder / part.stem, ignore_errors=True)
    return True


def _train(part: Part, dataset: Dataset, folder: Path, until: float) -> list[dict[str, Any]]:
    """Run the part's seeds in a run folder, and return one row per seed."""

    def look_at_the_clock(records: Any) -> None:
        if time.time() >= until:
            raise OutOfTime

    mark = folder / "source"
    if not mark.exists() or mark.read_text() != source_digest(False):  # begun by other code
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(source_digest(False))
    experiment: Any = part.experiment
    result = run(experiment, folder, resume=True, on_round=look_at_the_clock, dataset=dataset)
    simulation = simulation_of(experiment, dataset)
    simulation.load_state_dict(storage.load(folder / "checkpoint"))
    pairs = zip(result.histories, result.summaries, strict=True)
    return [_row(simulation, i, *pair, part) for i, pair in enumerate(pairs)]


def run_script(script: Script) -> Any:
    """Run a script of the checkout, and return what it wrote to `--out`."""
    import torch

    device = script.device
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    words = [device if word == "{device}" else word for word in script.arguments]
    words += ["--seeds", *map(str, script.seeds)] if script.seeds else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / script.path), *words, "--out", str(out)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise DataError(f"{script.path} failed: {done.stderr[-2000:]}")
        return read_json(out)["result"]


def _row(
    simulation: Simulation, index: int, history: History, summary: Summary, part: Part
) -> dict[str, Any]:
    """What a result file says of a seed."""
    accuracy = measured_accuracy(history, part.experiment.train_accuracy)
    sent = np.cumsum([r.bytes_up + r.bytes_down for r in history.rounds])
    hours = np.cumsum([r.working for r in history.rounds]) / 3600
    rounds = [rounds_to_target(accuracy, target) for target in part.targets]
    by_client, step = client_accuracy(simulation, index), part.curve_step
    tenth = np.sort(by_client)[: max(1, len(by_client) // 10)]
    row = {k: None if v != v else v for k, v in summary._asdict().items()}  # NaN is not JSON
    overhead = {key: row.pop(f"overhead_{key}") for key in ("up", "down")}
    overhead["skipped"] = row.pop("skipped")
    overhead["down_to_all"] = down_to_all(simulation, index, history)
    return row | {
        "overhead": overhead,
        "rounds_to": rounds,
        "bytes_to": [None if r is None else int(sent[r - 1]) for r in rounds],
        "seconds_to": [None if r is None else history.rounds[r - 1].elapsed for r in rounds],
        "hours_to": [None if r is None else float(hours[r - 1]) for r in rounds],
        "worst_tenth_accuracy": float(tenth.mean()),
        "curve": [None if np.isnan(a) else round(float(a), 4) for a in thinned(accuracy, step)],
        "megabytes": [round(float(b) / 1e6, 3) for b in thinned(sent, step)],
    }


def measured_accuracy(history: History, on_training_set: bool) -> np.ndarray:
    """Accuracy by round for targets and curves, NaN where it was not measured."""
    if not on_training_set:
        return history.accuracy
    values = [record.train_accuracy for record in history.rounds]
    return np.array([np.nan if value is None else value for value in values])


def down_to_all(simulation: Simulation, index: int, history: History) -> float:
    """The downlink in percent of FedAvg's, where both send every new model to all clients.

    Paper 2 does not say who receives a model; the ledger counts those who train with it.
    """
    seed, rounds = simulation.seeds[index], len(history.rounds)
    ledger, whole = seed.session.ledger, len(seed.clients) * seed.model_bytes
    small = ledger.total("down") - ledger.by_kind("down").get("model", 0)
    sent = rounds - sum(r.skipped for r in history.rounds)
    return 100 * (sent * whole + small) / (rounds * whole)


def thinned(values: Any, step: int) -> Any:
    """Every `step`-th value, the last one included, to keep result files small."""
    return values[(len(values) - 1) % step :: step]


def client_accuracy(simulation: Simulation, index: int) -> np.ndarray:
    """The share of each client's examples that the global model classifies correctly."""
    seed, every = simulation.seeds[index], simulation.train_data
    members = [seed.federation.parts[c] for c in seed.clients]
    held = (every._make(values[rows] for values in every) for rows in members if len(rows))
    return np.array([simulation.trainer.evaluate(seed.model, mine)[0][0] for mine in held])


def join(parts: Sequence[Part], folder: Path, *, partial: bool = False) -> dict[str, Any]:
    """The result of a whole suite from its parts, with the commit that made them.

    DataError if a part was made by other code than this checkout's, if that differs from its
    commit, or if a part is missing; with `partial` it is listed under "missing".
    """
    results, missing = [], []
    for part in parts:
        path = folder / part.file_name
        if path.exists():
            result = read_json(path)
            if not is_of(result, part):
                raise DataError(f"{path} was made by other code or settings: run it again")
            results.append(result)
        elif partial:
            missing.append(f"{part.setting}, {part.variant}")
        else:
            raise DataError(f"{path} is missing: run {part.name!r} first, or join with --partial")
    origins: list[dict[str, Any]] = []
    for result in results:
        source = result.pop("provenance")
        if source not in origins:
            origins.append(source)
        result["made_by"] = origins.index(source)
    return {
        "suite": parts[0].suite,
        "commit": clean_commit(),
        "missing": missing,
        "provenance": origins,
        "parts": results,
    }
