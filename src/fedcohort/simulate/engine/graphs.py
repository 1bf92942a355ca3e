"""Driving a kernel on a GPU: one captured graph a step, replayed.

Launching a small model's operations one by one takes longer than computing them. A step is
therefore captured once, as a CUDA graph that reads its batch, weights and learning rates from
tables on the GPU, at the row where a clock on the GPU stands. A round fills the tables and replays
the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcohort.simulate.engine.jobs import Data, Lockstep
from fedcohort.simulate.engine.kernel import Kernel

AHEAD = 16  # steps whose batches are drawn and sent together, while the GPU works on earlier ones


class Tables:
    """A round's batches on the device.

    `index` and `weight` are (steps, clients, samples), `rate` is (steps, clients), `eps` (steps,);
    see `Step`, whose names these are. `clock` is the step at which they are read.
    """

    def __init__(self, steps: int, clients: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.clock = zeros(1, dtype=torch.int64)
        self.index = zeros(steps, clients, width, dtype=torch.int32)
        self.weight = zeros(steps, clients, width)
        self.rate, self.eps = zeros(steps, clients), zeros(steps)
        on_gpu = device.type == "cuda"
        shape = (AHEAD, clients, width)
        self.outbox = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self.sent = [event() if on_gpu else None for _ in range(2)]

    def begin(self, together: Lockstep) -> None:
        """Write a round but for its indices; clients and steps beyond it count as finished."""
        steps, clients = together.count.shape
        width, device = together.batch, self.weight.device
        self.clock.zero_()
        for table in (self.weight, self.rate, self.eps):
            table.zero_()
        self.rate[:steps, :clients] = torch.from_numpy(together.rate)
        self.eps[:steps] = torch.from_numpy(together.eps)
        count, scale = (
            torch.from_numpy(values).to(device).unsqueeze(2)
            for values in (together.count, together.scale)
        )
        real = torch.arange(width, device=device) < count
        torch.mul(real, scale, out=self.weight[:steps, :clients, :width])

    def send(self, together: Lockstep, first: int) -> None:
        """Write the indices of the next steps, without waiting for the device."""
        last = min(first + AHEAD, len(together.active))
        turn = first // AHEAD % 2
        event, box = self.sent[turn], self.outbox[turn]
        if event is not None:
            event.synchronize()
        index = together.index(first, last).transpose(1, 0, 2)
        box.numpy()[: last - first, : index.shape[1], : index.shape[2]] = index
        self.index[first:last].copy_(box[: last - first], non_blocking=True)
        if event is not None:
            event.record()


class GraphStepper:
    """Feeds a kernel its batches on a GPU; on a CPU the same without graphs, for tests."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.tables: Tables | None = None
        self.replays: dict[tuple[int, int], Callable[[], object]] = {}

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Make room and capture what is missing; the kernel's parameters are lost."""
        self._make_room(kernel, len(together.active), together.batch)
        for clients in {self._size(kernel, active) for active in together.active}:
            key = (id(kernel), clients)
            if key not in self.replays:
                step = self._step(kernel, clients)
                assert self.tables is not None
                self.replays[key] = _capture(step, self.tables.clock)

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; finished clients weigh nothing and have a learning rate of zero."""
        assert self.tables is not None
        self.tables.begin(together)
        for step, active in enumerate(together.active):
            if step % AHEAD == 0:
                self.tables.send(together, step)
            self.replays[id(kernel), self._size(kernel, active)]()

    def _make_room(self, kernel: Kernel, steps: int, width: int) -> None:
        """Grow the tables, which forgets what was captured on the old ones."""
        wanted = [1 << (steps - 1).bit_length(), kernel.clients, width]
        held = [0, 0, 0] if self.tables is None else list(self.tables.index.shape)
        larger = [max(pair) for pair in zip(wanted, held, strict=True)]
        if larger != held:
            self.replays.clear()
            self.tables = Tables(larger[0], larger[1], larger[2], self.data.x.device)

    @staticmethod
    def _size(kernel: Kernel, active: int) -> int:
        """Return how many clients to step: few sizes, none more than a quarter above `active`."""
        grain = 1 << max(0, (active - 1).bit_length() - 3)
        return min(-(-active // grain) * grain, kernel.clients)

    def _step(self, kernel: Kernel, clients: int) -> Callable[[], None]:
        """Return a step that reads its inputs from the tables and moves the clock."""
        tables = self.tables
        assert tables is not None
        x, y = self.data
        width = tables.index.shape[2]
        step = kernel.step(clients, width, self.data)
        clock = tables.clock
        weight = tables.weight[:, :clients].flatten(1)
        rate = tables.rate[:, :clients]

        def run() -> None:
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


def _capture(run: Callable[[], None], clock: Tensor) -> Callable[[], object]:
    """Return something to call in place of `run`: a replay of what it launches on a GPU.

    Each trial run starts the clock anew, which would otherwise walk off the tables.
    """
    device = clock.device
    if device.type != "cuda":
        return run
    side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose and load their kernels at first use
            clock.zero_()
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
