"""Runs of a comparison or a sweep as Ray tasks, one per setting with all its seeds.

A task does what a local run does, in the same folder, so the files are the same byte for byte. A
task whose worker or node died is started again elsewhere and continues from its checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcohort.datasets import Dataset
from fedcohort.distribute.cluster import cluster_error, gpus_for, need_ray
from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.experiments.compare import OnRound, Setting
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.run import dataset_of, run
from fedcohort.experiments.summary import Summary
from fedcohort.simulate.history import record_from

POLL_SECONDS = 0.3


def run_all(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    retries: int = 3,
) -> list[list[Summary]]:
    """Run settings on the cluster that this program is connected to (see `cluster`).

    Parameters
    ----------
    settings : sequence of Setting
        Each runs in the folder of its name under `folder`.
    folder : path
        On a file system that all nodes share.
    resume : bool, default=False
        Continue what an interrupted call left.
    on_round : callable, optional
        Called with the name and the records of every round that appears in a folder.
    retries : int, default=3
        How often a run is restarted after its worker or node died.

    Raises
    ------
    FedcohortError
        If runs failed permanently, after all others have ended.
    """
    root = Path(folder).resolve()
    root.mkdir(parents=True, exist_ok=True)
    _refuse_used(settings, root, resume)
    names = _submit(settings, root, retries)
    tails = {name: _Tail(root / name, len(e.seeds)) for name, e in settings}
    done: dict[str, list[Summary]] = {}
    failed: dict[str, Exception] = {}
    while names:
        ready, _ = need_ray().wait(list(names), timeout=POLL_SECONDS)
        for task in ready:
            _settle(task, names.pop(task), done, failed)
        for name, tail in tails.items():
            for records in tail.rounds():
                if on_round is not None:
                    on_round(name, records)
    _raise_failed(failed, len(settings))
    return [done[name] for name, _ in settings]


def _refuse_used(settings: Sequence[Setting], root: Path, resume: bool) -> None:
    """Refuse folders of earlier runs here: tasks always resume, since they may be retried."""
    for name, _ in settings:
        if not resume and (root / name / "config.json").exists():
            raise ConfigError(f"{root / name} holds a run already: continue it with --resume")


def _submit(settings: Sequence[Setting], root: Path, retries: int) -> dict[Any, str]:
    """Start one task per setting; each data set goes to the object store once."""
    ray = need_ray()
    stored: dict[Any, Any] = {}
    names = {}
    for name, experiment in settings:
        source = experiment.data.source
        if source not in stored:
            stored[source] = ray.put(dataset_of(experiment.data))
        task = ray.remote(_run).options(
            name=name,
            num_cpus=1,
            num_gpus=gpus_for(experiment.device),
            max_retries=retries,
            retry_exceptions=[OSError],
        )
        names[task.remote(experiment, root / name, stored[source])] = name
    return names


def _run(experiment: Experiment, folder: Path, dataset: Dataset) -> list[Summary]:
    """Run one setting on a worker."""
    if not folder.parent.is_dir():
        raise ConfigError(
            f"{folder.parent} is not there on node {os.uname().nodename}: choose an --out on a "
            "file system that all nodes of the cluster share"
        )
    with _alone(folder):
        return run(experiment, folder, resume=True, dataset=dataset)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process works in the folder: a lost node's may live a little longer."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _settle(
    task: Any, name: str, done: dict[str, list[Summary]], failed: dict[str, Exception]
) -> None:
    ray = need_ray()
    try:
        done[name] = ray.get(task)
    except ray.exceptions.RayError as error:
        failed[name] = cluster_error(error, f"run {name}")


def _raise_failed(failed: dict[str, Exception], total: int) -> None:
    if not failed:
        return
    first = next(iter(failed.values()))
    if len(failed) == 1:
        raise first
    names = ", ".join(failed)
    raise FedcohortError(f"{len(failed)} of {total} runs failed ({names}); the first: {first}")


class _Tail:
    """The rounds that a run has written since the last look.

    A retried run writes the same bytes again, so a position in the file keeps its meaning.
    """

    def __init__(self, folder: Path, seeds: int) -> None:
        self.path, self.seeds, self.position = folder / "rounds.jsonl", seeds, 0

    def rounds(self) -> Iterator[list[Any]]:
        """Yield the records of each whole round."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.position)
            lines = file.read().splitlines(keepends=True)
        while len(lines) >= self.seeds and lines[self.seeds - 1].endswith(b"\n"):
            whole, lines = lines[: self.seeds], lines[self.seeds :]
            self.position += sum(map(len, whole))
            yield [record_from(json.loads(line)) for line in whole]
