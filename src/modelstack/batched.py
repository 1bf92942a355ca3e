"""The engine that trains clients side by side, in groups that fit the memory.

`Stepper` feeds a kernel its batches on a CPU, `GraphStepper` on a GPU. There, launching the
operations of a small model takes longer than computing them. A step is therefore captured once as a
CUDA graph, which reads its batch, weights and learning rates from tables on the GPU at the row that
a clock on the GPU points to. A round fills the tables and replays the graph.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from modelstack.jobs import Data, Job, Lockstep, Timetable, by_length, lockstep, sweep
from modelstack.kernel import Kernel, Setup, row_numbers
from modelstack.switches import runs_triton, seeded

UNROLLED = 8  # steps in one graph, which saves the time to launch seven
SHORT = 0.002  # seconds to launch a step, up to which it is worth it
GRAPHS = {"cuda"}  # devices whose steps read tables and are captured
AHEAD = 16  # steps whose batches are drawn and sent together, while the GPU works on earlier ones
Replay = tuple[int, Callable[[], object]]  # a number of steps, and a call that takes them
_CAPTURE = threading.Lock()  # CUDA captures one graph at a time


class Stepper:
    """Feeds a kernel its batches on a CPU, gathered into memory that is reused."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.x, self.y = data.x.numpy(), data.y.numpy()

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Do nothing: each step is prepared when it is first taken."""

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; clients that have finished are not touched."""
        times = together.times
        table = np.empty((len(times.active), len(together.jobs), times.batch), np.int64)
        together.write_index(0, table)
        for t, (clients, samples) in enumerate(zip(times.active, times.width, strict=True)):
            # Few sizes, so that each prepared step is reused often.
            even = times.even[t]
            width = samples if even else times.batch
            step = kernel.step(clients, width, self.data)
            index = table[t, :clients, :width].ravel()
            # The default mode copies twice.
            np.take(self.x, index, axis=0, out=step.x.flatten(0, 1).numpy(), mode="clip")
            np.take(self.y, index, axis=0, out=step.y.flatten(0, 1).numpy(), mode="clip")
            scale = times.scale[t, :clients]
            if even:
                step.weight.fill_(float(scale[0]))
            else:
                real = np.arange(width) < times.count[t, :clients, None]
                np.multiply(scale[:, None], real, out=step.weight.numpy())
            step.rate.numpy()[:] = times.rate[t, :clients]
            step.eps.fill_(float(times.eps[t]))
            step.run()


class Tables:
    """The batches of a round on the device, by step; the names are those of `Step`.

    `clock` holds the number of the step to read.
    """

    def __init__(self, steps: int, clients: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.clock = zeros(1, dtype=torch.int64)
        self.index = zeros(steps, clients, width, dtype=torch.int32)
        self.weight = zeros(steps, clients, width)
        self.rate, self.eps = zeros(steps, clients), zeros(steps)
        self.times: Timetable | None = None  # what `weight`, `rate` and `eps` hold
        on_gpu = device.type == "cuda"
        shape = (AHEAD, clients, width)
        self.outbox = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self.sent = [event() if on_gpu else None for _ in range(2)]

    def begin(self, times: Timetable) -> None:
        """Write all of a round but its indices; clients and steps beyond it count as finished."""
        self.clock.zero_()
        if self.times is times:
            return
        self.times = times
        steps, clients = times.count.shape
        width, device = times.batch, self.weight.device
        for table in (self.weight, self.rate, self.eps):
            table.zero_()
        self.rate[:steps, :clients] = torch.from_numpy(times.rate)
        self.eps[:steps] = torch.from_numpy(times.eps)
        count, scale = (
            torch.from_numpy(values).to(device).unsqueeze(2)
            for values in (times.count, times.scale)
        )
        real = torch.arange(width, device=device) < count
        torch.mul(real, scale, out=self.weight[:steps, :clients, :width])

    def send(self, together: Lockstep, first: int, last: int) -> None:
        """Write the indices of steps first to last - 1, without waiting for the device."""
        self.outbox.reverse()
        self.sent.reverse()
        event, box = self.sent[0], self.outbox[0][: last - first]
        if event is not None:
            event.synchronize()
        together.write_index(first, box.numpy())
        self.index[first:last].copy_(box, non_blocking=True)
        if event is not None:
            event.record()


class GraphStepper:
    """Feeds a kernel its batches on a GPU; tests run it on a CPU, without graphs."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.tables: Tables | None = None
        self.replays: dict[tuple[int, int], list[Replay]] = {}

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Grow the tables and capture missing steps; this overwrites the kernel's parameters."""
        times = together.times
        self._make_room(kernel, len(times.active), times.batch)
        for clients in {self._size(kernel, active) for active in times.active}:
            key = (id(kernel), clients)
            if key not in self.replays:
                step = self._step(kernel, clients)
                assert self.tables is not None
                self.replays[key] = _capture(step, self.tables.clock)

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; clients that have finished have zero weights and learning rates."""
        assert self.tables is not None
        self.tables.begin(together.times)
        sizes = [self._size(kernel, active) for active in together.times.active]
        # Few steps first, so that the GPU starts early.
        starts = [0, *range(UNROLLED, len(sizes), AHEAD), len(sizes)]
        for first, last in pairwise(starts):
            self.tables.send(together, first, last)
            for clients, same in groupby(sizes[first:last]):
                self._replay((id(kernel), clients), len(list(same)))

    def _replay(self, key: tuple[int, int], steps: int) -> None:
        for length, replay in self.replays[key]:
            for _ in range(steps // length):
                replay()
            steps %= length

    def _make_room(self, kernel: Kernel, steps: int, width: int) -> None:
        """Grow the tables, which discards the steps captured on the old ones."""
        wanted = [1 << (steps - 1).bit_length(), kernel.clients, width]
        held = [0, 0, 0] if self.tables is None else list(self.tables.index.shape)
        larger = [max(pair) for pair in zip(wanted, held, strict=True)]
        if larger != held:
            self.replays.clear()
            self.tables = Tables(larger[0], larger[1], larger[2], self.data.x.device)

    @staticmethod
    def _size(kernel: Kernel, active: int) -> int:
        """Return how many clients to step: few sizes, at most a quarter above `active`."""
        grain = 1 << max(0, (active - 1).bit_length() - 3)
        return min(-(-active // grain) * grain, kernel.clients)

    def _step(self, kernel: Kernel, clients: int) -> Callable[[], None]:
        """Return a step that reads its inputs from the tables and advances the clock."""
        tables = self.tables
        assert tables is not None
        x, y = self.data
        width = tables.index.shape[2]
        step = kernel.step(clients, width, self.data)
        clock = tables.clock
        weight = tables.weight[:, :clients].flatten(1)
        rate = tables.rate[:, :clients]
        fetch: Callable[..., None] | None = None
        if runs_triton(x.device) and y.dim() == 1:
            from modelstack._triton_dense import fetch  # one kernel in place of four

        def run() -> None:
            if fetch is not None:
                batch = (step.x, step.y, step.weight)
                fetch(clock, tables.index, x, y, tables.weight, *batch)
            else:
                at = tables.index.index_select(0, clock)[0, :clients].flatten()
                torch.index_select(x, 0, at, out=step.x.flatten(0, 1))
                torch.index_select(y, 0, at, out=step.y.flatten(0, 1))
                torch.index_select(weight, 0, clock, out=step.weight.view(1, -1))
            if not kernel.sink.direct:
                torch.index_select(rate, 0, clock, out=step.rate.view(1, -1))
                torch.index_select(tables.eps, 0, clock, out=step.eps.view(1))
            step.run()
            clock.add_(1)

        return run


def _capture(run: Callable[[], None], clock: Tensor) -> list[Replay]:
    """Return what to call instead of `run`: on a GPU, replays of what `run` launches.

    Each trial run restarts the clock, which would otherwise run past the tables.
    """
    device = clock.device
    if device.type != "cuda":
        return [(1, run)]
    with _CAPTURE, torch.cuda.device(device):
        return _captured(run, clock)


def _captured(run: Callable[[], None], clock: Tensor) -> list[Replay]:
    """Capture one step; of a step that is launched quickly, also several steps as one graph."""
    device = clock.device
    side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose and load their kernels at first use
            clock.zero_()
            start = time.perf_counter()
            run()
            launching = time.perf_counter() - start
    torch.cuda.current_stream(device).wait_stream(side)
    # The graphs replay one after the other and keep nothing, so that they can share memory.
    pool = torch.cuda.graph_pool_handle()
    replays: list[Replay] = []
    for length in (UNROLLED, 1) if launching < SHORT else (1,):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for _ in range(length):
                run()
        replays.append((length, graph.replay))
    return replays


class Batched:
    """Stacks models and steps them together, in groups of at most `memory` bytes.

    `kind` is `Stacked` or `Vmapped`.
    """

    def __init__(self, kind: type[Kernel], setup: Setup, memory: int) -> None:
        self.kind, self.setup, self.memory = kind, setup, memory
        self.device, self.training = setup.device, setup.training
        self.kernels: dict[bool, Kernel] = {}
        self.steppers: dict[Kernel, Stepper | GraphStepper] = {}
        self.client_bytes = 0

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float, out: Tensor
    ) -> None:
        """Write each job's trained parameters to its row of `out`."""
        for rows in self._groups(by_length(jobs), data):
            group = [jobs[i] for i in rows]
            kernel = self._kernel(len(rows), learns=True)
            together = lockstep(group, self.training, lr, kernel.sink.direct)
            with seeded([job.seed for job in group], self.device, kernel.random):
                self._run(kernel, together, params, data)
            kernel.store(out, [rows[i] for i in together.order])

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data, out: Tensor) -> None:
        """Write the gradient of each job's mean loss to its row of `out`."""
        ranked = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].positions))
        for rows in self._groups(ranked, data):
            group = [jobs[i] for i in rows]
            kernel = self._kernel(len(rows), learns=False)
            together = sweep(group, 64)
            self._run(kernel, together, params, data)
            kernel.store(out, [rows[i] for i in together.order])

    def _run(self, kernel: Kernel, together: Lockstep, params: Tensor, data: Data) -> None:
        stepper = self.steppers.get(kernel)
        if stepper is None or stepper.data is not data:
            kind = GraphStepper if self.device.type in GRAPHS else Stepper
            stepper = self.steppers[kernel] = kind(data)
        stepper.prepare(kernel, together)
        kernel.load(params, row_numbers(tuple(job.row for job in together.jobs), self.device))
        if kernel.drops:
            kernel.masks.restart([job.seed for job in together.jobs])
        stepper.run(kernel, together)

    def _kernel(self, clients: int, learns: bool) -> Kernel:
        """Return the kernel used before, if it is large enough; one that learns and one not."""
        before = self.kernels.get(learns)
        if before is not None and before.clients >= clients:
            return before
        if before is not None:
            self.steppers.pop(before, None)
        kernel = self.kernels[learns] = self.kind(self.setup, clients, learns)
        return kernel

    def _groups(self, ranked: list[int], data: Data) -> Iterator[list[int]]:
        """Cut the jobs, sorted by length, into groups that fit the memory."""
        if not self.client_bytes:
            one = self.kind(self.setup, 1)
            self.client_bytes = one.footprint(self.training.batch_size, data)
        clients = max(1, self.memory // self.client_bytes)
        size = -(-len(ranked) // -(-len(ranked) // clients))  # groups of one size
        for start in range(0, len(ranked), size):
            yield ranked[start : start + size]
