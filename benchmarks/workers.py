"""Run the parts of suites in several processes, on a GPU and on CPU cores, until a time limit.

Each worker has one device and one thread, and gets the next part when it is free. GPU workers run
light parts first; heavy ones ("gpu-heavy" in the suite's file) begin when no light part is waiting,
and at most `MAX_HEAVY` of them run at once. CPU workers run the parts that need no GPU. At the
limit, training runs are saved, and `--resume` continues them; scripts begin again. Busy workers are
asked to stop and leave the GPU in order: a process that is killed in the middle of a kernel can
take others on the same GPU with it.

A worker whose device fails, or whose process ends, is started again; after `MAX_FAILURES` in a row
it stops, and the other workers run its parts. If no worker of a device can train a small model
there, the run ends with that error. A part whose process ended three times has failed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from parts import Datasets, Unfinished, split_done, write_part
from suite import Part

from fedcohort.exceptions import ConfigError

OnPart = Callable[[Part, str, float], None]
OnStop = Callable[[str], None]

MAX_FAILURES = {"cpu": 2, "cuda": 6}  # in a row; a GPU shared with others may need half a minute
MAX_ENDED = 3  # processes, by one part
MAX_HEAVY = 3  # parts at once on a GPU; of eleven CIFAR-10 parts, an H200 ended none in 9 minutes
ORDER = {  # in which a device runs parts, by `Part.runs_on`
    "cuda": ("gpu", "any", "cpu", "gpu-heavy"),
    "cpu": ("cpu", "any", "gpu", "gpu-heavy"),
}
GRACE = 30.0  # seconds that a worker has to stop
SAVING = 8.0  # seconds before the limit at which training runs are saved


@dataclass
class Outcome:
    """What was left: parts not run, errors by the name of their part, why workers stopped."""

    left: list[Part] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A process with one device. `part` is what it runs, None while it starts or is idle."""

    device: str
    process: BaseProcess
    pipe: Connection
    part: int | None = None
    since: float = 0.0
    idle: bool = False
    started: bool = False  # whether its device has ever worked
    failures: int = 0


def parse_workers(text: str) -> dict[str, int]:
    """How many workers each device has, from a text such as cuda=5,cpu=9."""
    try:
        counts = {d.strip(): int(n) for d, _, n in (w.partition("=") for w in text.split(","))}
    except ValueError:
        counts = {}
    if not counts or any(d not in ORDER or n < 0 for d, n in counts.items()):
        raise ConfigError(f"workers {text!r} must look like cuda=5,cpu=9")
    return counts


def run_parts(
    parts: Sequence[Part],
    folder: str | os.PathLike[str],
    workers: Mapping[str, int],
    *,
    resume: bool = False,
    seconds: float = float("inf"),
    on_part: OnPart = lambda part, device, seconds: None,
    on_stop: OnStop = lambda reason: None,
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
    on_part, on_stop : callable, optional
        Called with each finished part, its device and its seconds, and with the reason when a
        worker stops, once per reason.
    """
    todo = split_done(parts, folder, resume)[1]
    campaign = Campaign(todo, os.fspath(folder), time.monotonic() + seconds, on_part, on_stop)
    try:
        for device in (d for d, n in workers.items() for _ in range(n)):
            campaign.pool.append(Worker(device, *campaign.process(device)))
        campaign.run()
    finally:
        for worker in campaign.pool:
            worker.process.terminate()
        for worker in campaign.pool:
            _end(worker)
    unfinished = [w.part for w in campaign.pool if w.part is not None]
    campaign.outcome.left = [todo[i] for i in sorted([*unfinished, *campaign.waiting])]
    return campaign.outcome


class Campaign:
    """The workers, the parts that wait, and what came of those that were run."""

    def __init__(
        self, parts: list[Part], folder: str, deadline: float, on_part: OnPart, on_stop: OnStop
    ) -> None:
        self.parts, self.folder, self.deadline = parts, folder, deadline
        self.on_part, self.on_stop = on_part, on_stop
        self.pool: list[Worker] = []
        self.outcome = Outcome()
        self.waiting = list(range(len(parts)))
        self.ended: Counter[int] = Counter()  # by part: how many processes ended while they ran it

    def run(self) -> None:
        """Hear from workers and give them parts until all are idle or the time is over."""
        while (busy := {w.pipe: w for w in self.pool if not w.idle}) and self._time_left() > 0:
            left = self._time_left()
            for pipe in wait(list(busy), None if left == float("inf") else left):
                self._receive(busy[pipe])  # type: ignore[index]
            for worker in (w for w in self.pool if w.idle):
                self.give(worker)

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _receive(self, worker: Worker) -> None:
        """Note what came of a start or of a part."""
        try:
            error, broken = worker.pipe.recv()
        except (EOFError, OSError):  # out of memory, most likely
            worker.process.join()
            error, broken = "", f"its process ended with {worker.process.exitcode}"
        if broken:
            self._fail(worker, broken)
            return
        if worker.part is not None:
            self._finish(worker, self.parts[worker.part], error)
        worker.idle = worker.started = True

    def _finish(self, worker: Worker, part: Part, error: str) -> None:
        worker.part, worker.failures = None, 0
        if error:
            self.outcome.failed[part.name] = error
        else:
            self.on_part(part, worker.device, time.monotonic() - worker.since)

    def _fail(self, worker: Worker, reason: str) -> None:
        """Take the part from a worker that failed, and start the worker again or stop it."""
        _end(worker)
        if worker.part is not None:
            self.ended[worker.part] += 1
            if self.ended[worker.part] < MAX_ENDED:
                self.waiting.append(worker.part)
            else:
                self.outcome.failed[self.parts[worker.part].name] = reason
        worker.part, worker.failures = None, worker.failures + 1
        allowed = MAX_FAILURES[worker.device]
        if worker.failures < allowed:
            worker.process, worker.pipe = self.process(worker.device)
            return
        self.pool.remove(worker)
        if not worker.started and all(w.device != worker.device for w in self.pool):
            raise ConfigError(
                f"no {worker.device} worker can start: {reason}; repair the device or leave it out "
                "of --workers, and continue with --resume"
            )
        text = f"a {worker.device} worker stopped after {allowed} failures in a row: {reason}"
        if text not in self.outcome.stopped:
            self.outcome.stopped.append(text)
            self.on_stop(text)

    def give(self, worker: Worker) -> None:
        """Send the worker its next part; it stays idle if there is none for it now."""
        ready = [i for i in self.waiting if self._is_for(self.parts[i], worker.device)]
        if not ready or self._time_left() <= 0:
            return
        worker.part = min(ready, key=lambda i: self._order(i, worker.device))
        worker.since, worker.idle = time.monotonic(), False
        self.waiting.remove(worker.part)
        with suppress(OSError):  # it ended; `_receive` finds out why
            worker.pipe.send(worker.part)

    def _order(self, index: int, device: str) -> tuple[int, int, int, int]:
        """Parts that ended a process last; then by what the device is for; then by rank."""
        part = self.parts[index]
        return self.ended[index], ORDER[device].index(part.runs_on), part.rank, index

    def _is_for(self, part: Part, device: str) -> bool:
        """A part may run on the other device where there is no worker of its own."""
        if device == "cuda" and part.runs_on == "gpu-heavy":
            running = [w.part for w in self.pool if w.device == "cuda" and w.part is not None]
            if sum(self.parts[i].runs_on == "gpu-heavy" for i in running) >= MAX_HEAVY:
                return False
        wanted = {"any": device, "cpu": "cpu"}.get(part.runs_on, "cuda")
        return wanted == device or all(w.device != wanted for w in self.pool)

    def process(self, device: str) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = theirs, list(self.parts), self.folder, device, self.deadline - SAVING
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _end(worker: Worker) -> None:
    """Ask a process to stop, and wait until it has left the GPU."""
    worker.process.terminate()
    worker.process.join(GRACE)
    worker.pipe.close()


class _Stopped(BaseException):
    """The process was asked to stop; not an error of the part that it was running."""


def _stop_here(*_: object) -> None:
    signal.alarm(1)  # again, because callbacks from C swallow exceptions
    raise _Stopped


def _stop_with_parent() -> None:
    """Ask this process to stop when the one that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def _work(pipe: Connection, parts: Sequence[Part], folder: str, device: str, until: float) -> None:
    """Run the parts whose number comes through the pipe.

    Answers, first to the start and then to each part: its error, and what is wrong with the device;
    both are empty if all is well.
    """
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _stop_here)  # Python handles it between calls, not inside one
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with suppress(_Stopped):
        import torch

        torch.set_num_threads(1)
        loaded = Datasets()
        pipe.send(("", why_broken(device)))
        while True:
            index = pipe.recv()
            try:
                write_part(parts[index].on(device), Path(folder), loaded, until)
            except Unfinished:
                time.sleep(2 * SAVING + GRACE)  # until it is asked to stop
            except Exception:  # one part must not end the others; its traceback is reported
                pipe.send((traceback.format_exc(limit=-3), why_broken(device)))
            else:
                pipe.send(("", ""))
            if device == "cuda":
                torch.cuda.empty_cache()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)  # the process is ending


def why_broken(device: str) -> str:
    """Why a small model cannot be trained on the device; an empty text if it can.

    Where a compiler or a library is missing, simple sums still work, and every part would fail.
    """
    from fedcohort.datasets import federate, load
    from fedcohort.simulate import Simulation, build

    try:
        clients = federate(load("digits"), "shards", clients=4, seed=0)
        model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
        Simulation(clients, model, "uniform", cohort_size=2, device=device).step()
    except Exception as error:  # of whatever kind, it is reported once
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
