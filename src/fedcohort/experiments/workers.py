"""Run the parts of suites in several processes, on a GPU and on CPU cores, until a time limit.

Each worker has one device and one thread. It asks for the next part when it is free, so GPU and CPU
workers share one ordered list. A part that would not be finished before the limit, judged by the
latest finished part of its setting on the same kind of device, is not begun. Workers that are still
busy at the limit are stopped. Nothing is lost but their unfinished parts, which `--resume` runs.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import benchmark
from fedcohort.experiments.suite import Part


@dataclass
class Outcome:
    """What a campaign left: parts that were not run, and errors by the name of their part."""

    left: list[Part] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Worker:
    device: str
    process: BaseProcess
    pipe: Connection
    part: int | None = None
    since: float = 0.0


def parse_workers(text: str) -> dict[str, int]:
    """Read how many workers each device has.

    Examples
    --------
    >>> parse_workers("cuda=5,cpu=9")
    {'cuda': 5, 'cpu': 9}
    """
    try:
        counts = {d.strip(): int(n) for d, _, n in (w.partition("=") for w in text.split(","))}
    except ValueError:
        counts = {}
    if not counts or any(d not in ("cuda", "cpu") or n < 0 for d, n in counts.items()):
        raise ConfigError(f"workers {text!r} must look like cuda=5,cpu=9")
    return counts


def run_parts(
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    workers: Mapping[str, int],
    *,
    resume: bool = False,
    seconds: float = float("inf"),
    on_part: Callable[[Part, str, float], None] | None = None,
) -> Outcome:
    """Run all parts whose result the folder does not hold, in order, and return what is left.

    Parameters
    ----------
    parts : sequence of Part
        What to run, the important ones first.
    folder : path
        One file per part goes there.
    workers : mapping of str to int
        Processes by device, "cuda" or "cpu".
    resume : bool, default=False
        Go on in a folder that holds parts already.
    seconds : float, optional
        When to stop.
    on_part : callable, optional
        Called with each finished part, its device and its seconds.
    """
    _, todo = benchmark.split_done(parts, folder, resume)
    plan = _Plan(todo, gpu=workers.get("cuda", 0) > 0, deadline=time.monotonic() + seconds)
    context = multiprocessing.get_context("spawn")
    pool = [
        _start(context, todo, folder, device) for device, n in workers.items() for _ in range(n)
    ]
    outcome = Outcome()
    try:
        for worker in pool:
            plan.give(worker)
        while any(w.part is not None for w in pool) and time.monotonic() < plan.deadline:
            _collect(pool, plan, outcome, on_part)
    finally:
        for worker in pool:
            worker.process.terminate()
            worker.process.join()
    unfinished = [w.part for w in pool if w.part is not None]
    outcome.left = [todo[i] for i in sorted([*unfinished, *plan.waiting])]
    return outcome


class _Plan:
    """Which part each worker gets next."""

    def __init__(self, parts: Sequence[Part], gpu: bool, deadline: float) -> None:
        self.parts, self.gpu, self.deadline = parts, gpu, deadline
        self.waiting = list(range(len(parts)))
        self.latest: dict[tuple[str, str], float] = {}

    def give(self, worker: _Worker) -> None:
        """Send the worker its next part, or none if nothing fits."""
        now = time.monotonic()
        fits = [i for i in self.waiting if self._fits(i, worker.device, now)]
        worker.part = min(fits, key=lambda i: self._order(i, worker.device), default=None)
        if worker.part is not None:
            self.waiting.remove(worker.part)
            worker.since = now
            worker.pipe.send(worker.part)

    def _order(self, index: int, device: str) -> tuple[int, bool, int]:
        """By rank; on a GPU, parts that need one come first among equals."""
        part = self.parts[index]
        return part.rank, device == "cuda" and not part.needs_gpu, index

    def _fits(self, index: int, device: str, now: float) -> bool:
        part = self.parts[index]
        if part.needs_gpu and self.gpu and device == "cpu":
            return False
        return now + self.latest.get((device, part.setting), 0.0) < self.deadline

    def finished(self, worker: _Worker, part: Part) -> float:
        """Note how long a part took, and return it."""
        seconds = time.monotonic() - worker.since
        self.latest[worker.device, part.setting] = seconds  # the first ones load data too
        return seconds


def _collect(
    pool: Sequence[_Worker],
    plan: _Plan,
    outcome: Outcome,
    on_part: Callable[[Part, str, float], None] | None,
) -> None:
    """Wait for the next worker that is done, and give it its next part."""
    busy = {worker.pipe: worker for worker in pool if worker.part is not None}
    left = plan.deadline - time.monotonic()
    for pipe in wait(list(busy), None if left == float("inf") else max(left, 0.0)):
        worker = busy[pipe]  # type: ignore[index]
        assert worker.part is not None
        part = plan.parts[worker.part]
        try:
            error = worker.pipe.recv()
        except EOFError:  # out of memory, most likely
            outcome.failed[part.name] = f"its process ended with {worker.process.exitcode}"
            worker.part = None
            continue
        if error:
            outcome.failed[part.name] = error
        else:
            seconds = plan.finished(worker, part)
            if on_part is not None:
                on_part(part, worker.device, seconds)
        plan.give(worker)


def _start(
    context: multiprocessing.context.SpawnContext,
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    device: str,
) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_work, args=(theirs, list(parts), os.fspath(folder), device), daemon=True
    )
    process.start()
    theirs.close()
    return _Worker(device, process, ours)


def _work(pipe: Connection, parts: Sequence[Part], folder: str, device: str) -> None:
    """Run the parts whose number comes through the pipe; answer with an error, or nothing."""
    import torch

    torch.set_num_threads(1)
    loaded = benchmark.Datasets()
    while True:
        index = pipe.recv()
        try:
            benchmark.write_part(parts[index].on(device), folder, loaded)
        except Exception:  # one part must not end the others; it is reported with its traceback
            pipe.send(traceback.format_exc(limit=-3))
        else:
            pipe.send("")
        if device == "cuda":
            torch.cuda.empty_cache()
