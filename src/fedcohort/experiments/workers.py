"""Run the parts of suites in several processes, on a GPU and on CPU cores, until a time limit.

Each worker has one device and one thread, and asks for the next part when it is free. GPU workers
run light parts first, as many at once as there are workers. Heavy parts ("gpu-heavy" in the suite's
file) begin when no light part is waiting, and at most `MOST_HEAVY` of them run at once: they slow
each other and light ones down until none ends. CPU workers run the parts that need no GPU.

At the limit, training runs are saved, and `--resume` continues them. Scripts begin again, so a
script is begun only if the fastest finished part of its setting would still fit. Busy workers are
asked to stop and leave the GPU in order: a process that is killed in the middle of a kernel can
take others on the same GPU with it.

If no worker of a device can train a small model there, the run ends with that one error. A worker
whose device fails later, or whose process ends, is started again. After two such failures in a row
it stops, and the other workers run its parts. A GPU that other processes use too may need half a
minute to recover, so its workers are more patient. A part whose process ended three times has
failed.
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

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import benchmark
from fedcohort.experiments.results import read_json
from fedcohort.experiments.suite import Part, Script

OnPart = Callable[[Part, str, float], None]
OnStop = Callable[[str], None]

MOST_FAILURES = {"cpu": 2, "cuda": 6}  # in a row, of a worker
MOST_ENDED = 3  # processes, by one part
MOST_HEAVY = 3  # parts at once on a GPU; of eleven CIFAR-10 parts, an H200 ended none in 9 minutes
ORDER = {  # in which a device runs parts, by `Part.runs_on`
    "cuda": ("gpu", "any", "cpu", "gpu-heavy"),
    "cpu": ("cpu", "any", "gpu", "gpu-heavy"),
}
GRACE = 30.0  # seconds that a worker has to stop
SAVING = 8.0  # seconds before the limit at which training runs are saved


@dataclass
class Outcome:
    """What a campaign left.

    Attributes
    ----------
    left : list of Part
        Parts that were not run.
    failed : dict
        Errors by the name of their part.
    stopped : list of str
        Why workers stopped, each reason once.
    """

    left: list[Part] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)


@dataclass
class _Worker:
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
    on_part: OnPart | None = None,
    on_stop: OnStop | None = None,
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
    on_stop : callable, optional
        Called with the reason when a worker stops, once per reason.

    Raises
    ------
    ConfigError
        If no worker of a device can start.
    """
    done, todo = benchmark.split_done(parts, folder, resume)
    campaign = _Campaign(todo, os.fspath(folder), time.monotonic() + seconds, on_part, on_stop)
    campaign.learn_durations(done)
    try:
        campaign.start(workers)
        while campaign.busy() and time.monotonic() < campaign.deadline:
            campaign.collect()
    finally:
        for worker in campaign.pool:
            worker.process.terminate()
        for worker in campaign.pool:
            _end(worker)
    unfinished = [w.part for w in campaign.pool if w.part is not None]
    campaign.outcome.left = [todo[i] for i in sorted([*unfinished, *campaign.waiting])]
    return campaign.outcome


class _Campaign:
    """The workers, the parts that wait, and what came of those that were run."""

    def __init__(
        self,
        parts: Sequence[Part],
        folder: str,
        deadline: float,
        on_part: OnPart | None,
        on_stop: OnStop | None,
    ) -> None:
        self.parts, self.folder, self.deadline = parts, folder, deadline
        self.on_part: OnPart = on_part or (lambda part, device, seconds: None)
        self.on_stop: OnStop = on_stop or (lambda reason: None)
        self.pool: list[_Worker] = []
        self.outcome = Outcome()
        self.waiting = list(range(len(parts)))
        self.ended: Counter[int] = Counter()  # by part: how many processes ended while they ran it
        self.shortest: dict[tuple[str, str], float] = {}  # seconds, by device and setting

    def start(self, workers: Mapping[str, int]) -> None:
        """Start all processes."""
        for device in (d for d, n in workers.items() for _ in range(n)):
            self.pool.append(_Worker(device, *self._process(device)))

    def learn_durations(self, done: Sequence[Part]) -> None:
        """Read how long finished scripts took, on which device."""
        for part in done:
            if isinstance(part.experiment, Script):
                found = read_json(Path(self.folder, part.file_name))
                self._note(found["provenance"]["device"], part, found["seconds"])

    def _note(self, device: str, part: Part, seconds: float) -> None:
        """Remember the shortest duration; the others loaded data or shared the device."""
        key = device, part.setting
        self.shortest[key] = min(seconds, self.shortest.get(key, seconds))

    def busy(self) -> list[_Worker]:
        """Return the workers that will send something."""
        return [worker for worker in self.pool if not worker.idle]

    def collect(self) -> None:
        """Wait for the next workers that are done, and give the idle ones their next parts."""
        senders = {worker.pipe: worker for worker in self.busy()}
        left = self.deadline - time.monotonic()
        for pipe in wait(list(senders), None if left == float("inf") else max(left, 0.0)):
            self._receive(senders[pipe])  # type: ignore[index]
        for worker in [w for w in self.pool if w.idle]:
            self._give(worker)

    def _receive(self, worker: _Worker) -> None:
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

    def _finish(self, worker: _Worker, part: Part, error: str) -> None:
        worker.part, worker.failures = None, 0
        if error:
            self.outcome.failed[part.name] = error
            return
        seconds = time.monotonic() - worker.since
        self._note(worker.device, part, seconds)
        self.on_part(part, worker.device, seconds)

    def _fail(self, worker: _Worker, reason: str) -> None:
        """Take the part from a worker that failed, and start the worker again or stop it."""
        _end(worker)
        if worker.part is not None:
            self._put_back(worker.part, reason)
        worker.part, worker.failures = None, worker.failures + 1
        most = MOST_FAILURES[worker.device]
        if worker.failures < most:
            worker.process, worker.pipe = self._process(worker.device)
            return
        self.pool.remove(worker)
        if not worker.started and all(w.device != worker.device for w in self.pool):
            raise ConfigError(
                f"no {worker.device} worker can start: {reason}; repair the device or leave it out "
                "of --workers, and continue with --resume"
            )
        text = f"a {worker.device} worker stopped after {most} failures in a row: {reason}"
        if text not in self.outcome.stopped:
            self.outcome.stopped.append(text)
            self.on_stop(text)

    def _put_back(self, index: int, reason: str) -> None:
        self.ended[index] += 1
        if self.ended[index] < MOST_ENDED:
            self.waiting.append(index)
        else:
            self.outcome.failed[self.parts[index].name] = reason

    def _give(self, worker: _Worker) -> None:
        """Send the worker its next part; it stays idle if there is none for it now."""
        now = time.monotonic()
        room = worker.device == "cpu" or self._running_heavy() < MOST_HEAVY
        fits = [i for i in self.waiting if self._fits(i, worker.device, now)]
        ready = [i for i in fits if room or not self._heavy(i)]
        if not ready:
            return
        worker.part = min(ready, key=lambda i: self._order(i, worker.device))
        worker.since, worker.idle = now, False
        self.waiting.remove(worker.part)
        with suppress(OSError):  # it ended; `_receive` finds out why
            worker.pipe.send(worker.part)

    def _heavy(self, index: int) -> bool:
        return self.parts[index].runs_on == "gpu-heavy"

    def _running_heavy(self) -> int:
        on_gpu = [w.part for w in self.pool if w.device == "cuda" and w.part is not None]
        return sum(map(self._heavy, on_gpu))

    def _order(self, index: int, device: str) -> tuple[int, int, int, int]:
        """Parts that ended a process last; then by what the device is for; then by rank."""
        part = self.parts[index]
        return self.ended[index], ORDER[device].index(part.runs_on), part.rank, index

    def _fits(self, index: int, device: str, now: float) -> bool:
        """Whether the part is for this device and, if it is a script, ends in time.

        A training run is continued by the next call, so it may begin at any time.
        """
        part = self.parts[index]
        other = {"cpu": "cuda", "cuda": "cpu"}[device]
        only = {"any": device, "cpu": "cpu"}.get(part.runs_on, "cuda")
        if only == other and any(w.device == other for w in self.pool):
            return False
        script = isinstance(part.experiment, Script)
        need = self.shortest.get((device, part.setting), 0.0) if script else 0.0
        return now + need < self.deadline

    def _process(self, device: str) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        until = self.deadline - SAVING
        arguments = theirs, list(self.parts), self.folder, device, until
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _end(worker: _Worker) -> None:
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
        loaded = benchmark.Datasets()
        pipe.send(("", _broken(device) or (_untrained(device) if device == "cuda" else "")))
        while True:
            index = pipe.recv()
            try:
                benchmark.write_part(parts[index].on(device), folder, loaded, until)
            except benchmark.Unfinished:
                time.sleep(2 * SAVING + GRACE)  # until it is asked to stop
            except Exception:  # one part must not end the others; its traceback is reported
                pipe.send((traceback.format_exc(limit=-3), _broken(device)))
            else:
                pipe.send(("", ""))
            if device == "cuda":
                torch.cuda.empty_cache()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)  # the process is ending


def _broken(device: str) -> str:
    """Return why the device cannot compute; an empty text if it can."""
    import torch

    try:
        torch.ones(1, device=device).add(1).item()
    except Exception as error:  # an AssertionError where PyTorch is built without CUDA
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _untrained(device: str) -> str:
    """Return why a small model cannot be trained on the device; an empty text if it can.

    Where a compiler or a library is missing, simple sums still work, and every part would fail.
    """
    import numpy as np
    from torch import nn

    from fedcohort.simulate.local import LocalTraining, Trainer, jobs

    try:
        trainer = Trainer(nn.Linear(4, 2), LocalTraining(epochs=1, batch_size=2), device=device)
        data = trainer.data(np.eye(4), np.array([0, 1, 1, 0]))
        work = jobs(trainer, 0, 0, ("a", "b"), [np.arange(4)] * 2)
        trainer.train(trainer.flat(), work, data).sum().item()
    except Exception as error:  # of whatever kind, it is reported once
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
