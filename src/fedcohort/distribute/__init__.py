"""Comparisons, sweeps and sketches on a Ray cluster, with the results of one process.

Ray starts a task again whose worker or node died: a run goes on from its checkpoint, and the counts
of a sketch add up in any grouping. Noise, if any, is added once, to the merged sketch.
"""

from __future__ import annotations

import os
import re
import socket
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.exceptions import ConfigError, DataError, FedcohortError, FolderInUse
from fedcohort.files import Want
from fedcohort.files.sketching import NO_ROWS, OnRows, sketch_parts
from fedcohort.files.source import Reading, find_files, open_files
from fedcohort.sketch.race import RaceSketch

if TYPE_CHECKING:
    from fedcohort.datasets import Dataset
    from fedcohort.experiments.compare import OnRound, Setting
    from fedcohort.experiments.config import Experiment

POLL_SECONDS = 1.0
RETRIES = 3  # restarts of a task whose worker or node died
LOST_SECONDS = 60  # how long a lost node's process may still hold its folder
TASKS_PER_CPU = 4  # so that a slow worker does not keep the others waiting


@contextmanager
def cluster(address: str, cpus: int | None = None) -> Iterator[None]:
    """Connect to a Ray cluster inside the block; disconnect, or stop it, at the end.

    "local" starts Ray on this machine, with as many tasks at a time as `cpus` (by default one per
    core); "auto" takes the cluster that this machine belongs to (or ``$RAY_ADDRESS``);
    ``HOST:PORT`` is a cluster's head. A program that is connected already stays connected.
    """
    if address not in ("local", "auto") and not re.fullmatch(r"[^\s/]+:\d{1,5}", address):
        raise ConfigError(f"--ray {address}: write local, auto or HOST:PORT")
    ray = need_ray()
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in ("local", "auto", connected):
            raise ConfigError(f"--ray {address}: this program is connected to {connected} already")
        yield
        return
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"num_cpus": cpus, "include_dashboard": False}
    elif address != "auto":
        host, _, port = address.rpartition(":")
        try:  # the port first: Ray retries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--ray {address}: no cluster answers ({error}); start one with "
                "`ray start --head`, or use --ray local"
            ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tips about Ray's future defaults
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"--ray {address}: no cluster to work on ({reason})") from None
    try:
        yield
    finally:
        ray.shutdown()


def need_ray() -> Any:
    """Return the module `ray`; ConfigError says how to install it."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'fedcohort[ray]'") from None
    return ray


def cluster_error(error: Exception, what: str) -> Exception:
    """Return the error to raise: a worker's own FedcohortError, else one that says what failed."""
    culprit = getattr(error, "cause", None) or error
    if isinstance(culprit, FedcohortError):
        return culprit
    text = str(culprit).strip().partition("\n")[0]
    return FedcohortError(f"{what} failed on the cluster: {type(culprit).__name__}: {text}")


def run_all(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
) -> None:
    """Run settings, one task each, on the cluster that this program is connected to.

    As `experiments.compare.in_turn`, in a `folder` on a file system that all nodes share. Runs that
    fail permanently are reported when all others have ended.
    """
    from fedcohort.experiments.results import new_rounds

    ray, root = need_ray(), Path(folder).resolve()
    root.mkdir(parents=True, exist_ok=True)
    for name, _ in settings:  # tasks always resume, since they may be started again
        if not resume and (root / name / "config.json").exists():
            raise ConfigError(f"{root / name} holds a run already: continue it with --resume")
    tasks = _submit(settings, root)
    seeds = {name: len(experiment.seeds) for name, experiment in settings}
    reported: Counter[str] = Counter()  # bytes of each run's rounds
    failed: dict[str, Exception] = {}
    while tasks:
        ready, _ = ray.wait(list(tasks), timeout=POLL_SECONDS)
        for name in tasks.values():
            path = root / name / "rounds.jsonl"
            for end, records in new_rounds(path, reported[name], seeds[name]):
                reported[name] = end
                if on_round is not None:
                    on_round(name, records)
        for task in ready:
            name = tasks.pop(task)
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                failed[name] = cluster_error(error, f"run {name}")
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        raise FedcohortError(
            f"{len(failed)} of {len(settings)} runs failed ({', '.join(failed)}); the first: "
            f"{next(iter(failed.values()))}"
        )


def _submit(settings: Sequence[Setting], root: Path) -> dict[Any, str]:
    """Start one task per setting; each data set goes to the object store once."""
    from fedcohort.experiments.run import dataset_of

    ray, stored, names = need_ray(), dict[Any, Any](), {}
    some_gpu = ray.cluster_resources().get("GPU", 0) > 0
    for name, experiment in settings:
        source, device = experiment.data.source, experiment.device
        if source not in stored:
            stored[source] = ray.put(dataset_of(experiment.data))
        gpus = int(device.startswith("cuda") or (device == "auto" and some_gpu))
        options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": RETRIES}
        task = ray.remote(_run).options(name=name, retry_exceptions=[OSError], **options)
        names[task.remote(experiment, root / name, stored[source])] = name
    return names


def _run(experiment: Experiment, folder: Path, dataset: Dataset) -> None:
    """Run one setting on a worker, once a lost node's process has left the folder."""
    from fedcohort.experiments.run import run

    if not folder.parent.is_dir():
        raise ConfigError(
            f"{folder.parent} is not there on node {os.uname().nodename}: choose an --out on a "
            "file system that all nodes of the cluster share"
        )
    end = time.monotonic() + LOST_SECONDS
    while True:
        try:
            run(experiment, folder, resume=True, dataset=dataset)
            return
        except FolderInUse:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def sketch_folder(
    path: str | os.PathLike[str],
    want: Want,
    empty: RaceSketch,
    on_rows: OnRows | None = None,
    reading: Reading | None = None,
) -> dict[str, RaceSketch]:
    """Return the sketches of a folder's clients, in the order of their first rows.

    As `files.sketching.sketch_parts`, of a folder that every node of the cluster sees under this
    name. `reading` is told what the workers left out and what looks wrong.
    """
    root, ray = Path(path).resolve(), need_ray()
    if not root.is_dir():
        raise ConfigError(f"{path}: --ray spreads the files of a folder, this is one file")
    files = find_files(root)
    max_parts = TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(_sketch).options(num_cpus=1, max_retries=RETRIES, retry_exceptions=[OSError])
    shared, merged = ray.put(empty), dict[str, RaceSketch]()
    waiting = [task.remote(files[0], part, root, want, shared) for part in split(files, max_parts)]
    while waiting:
        try:
            rows, sketches, left_out = ray.get(waiting[0])
        except ray.exceptions.RayError as error:
            for other in waiting:
                ray.cancel(other)
            raise cluster_error(error, f"sketching {path}") from None
        del waiting[0]  # its result may leave the object store
        for client, sketch in sketches.items():
            merged[client] = merged[client] + sketch if client in merged else sketch
        if on_rows is not None:
            on_rows(rows)
        if reading is not None:
            reading.add(left_out)
    if not merged:
        raise DataError(NO_ROWS)
    return merged


def split(files: Sequence[Path], max_parts: int) -> list[list[Path]]:
    """Cut files into at most `max_parts` consecutive parts of about the same size."""
    sizes = np.array([max(1, file.stat().st_size) for file in files], np.float64)
    middles = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    part = np.minimum((middles * max_parts).astype(int), max_parts - 1)
    return [[files[i] for i in np.flatnonzero(part == p).tolist()] for p in np.unique(part)]


def _sketch(
    first: Path, files: Sequence[Path], root: Path, want: Want, empty: RaceSketch
) -> tuple[int, dict[str, RaceSketch], Reading]:
    """Count rows, sketch clients and note what is left out; `first` says which columns are read."""
    source = open_files([first, *files], root, want, skip=1)
    rows: list[int] = []
    sketches = sketch_parts(source, empty, on_rows=rows.append)
    return sum(rows), sketches, source.reading
