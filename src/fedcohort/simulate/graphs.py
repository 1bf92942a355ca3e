"""Driving a kernel on a GPU: one captured graph a step, replayed.

Launching a small model's operations one by one takes longer than computing them. A step is
therefore captured once, as a CUDA graph that reads its batch, weights and learning rates from
tables on the GPU, at the row where a clock on the GPU stands. A round fills the tables and replays
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcohort.simulate.jobs import Data, Lockstep
from fedcohort.simulate.kernel import Kernel


@dataclass(frozen=True, eq=False)
class Tables:
    """A round's batches on the device.

    `index` and `weight` are (clients, steps, samples), `rate` is (clients, steps), `eps` (steps,);
    see `Step`, whose names these are. `clock` is the step at which they are read.
    """

    clock: Tensor
    index: Tensor
    weight: Tensor
    rate: Tensor
    eps: Tensor

    @staticmethod
    def empty(clients: int, steps: int, width: int, device: torch.device) -> Tables:
        """Return tables in which every client has finished."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return Tables(
            zeros(1, dtype=torch.int64),
            zeros(clients, steps, width, dtype=torch.int32),
            zeros(clients, steps, width),
            zeros(clients, steps),
            zeros(steps),
        )

    def fill(self, together: Lockstep) -> None:
        """Write a round; clients and steps beyond it count as finished."""
        steps, clients, width = together.index.shape
        self.clock.zero_()
        for table in (self.weight, self.rate, self.eps):
            table.zero_()
        index = together.index.transpose(1, 0, 2).astype(np.int32)
        _put(self.index[:clients, :steps, :width], index)
        _put(self.rate[:clients, :steps], together.rate.T)
        _put(self.eps[:steps], together.eps)
        count, scale = (
            torch.from_numpy(np.ascontiguousarray(values.T)).to(self.weight.device).unsqueeze(2)
            for values in (together.count, together.scale)
        )
        real = torch.arange(width, device=self.weight.device) < count
        torch.mul(real, scale, out=self.weight[:clients, :steps, :width])


def _put(table: Tensor, values: NDArray[np.generic]) -> None:
    table.copy_(torch.from_numpy(np.ascontiguousarray(values)))


class GraphStepper:
    """Feeds a kernel its batches on a GPU; on a CPU the same without graphs, for tests."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.tables: Tables | None = None
        self.replays: dict[tuple[int, int], Callable[[], object]] = {}

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Make room and capture what is missing; the kernel's parameters are lost."""
        steps, _, width = together.index.shape
        self._make_room(kernel, steps, width)
        for clients in {self._size(kernel, active) for active in together.active}:
            key = (id(kernel), clients)
            if key not in self.replays:
                step = self._step(kernel, clients)
                assert self.tables is not None
                self.replays[key] = _capture(step, self.tables.clock)

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; finished clients weigh nothing and have a learning rate of zero."""
        assert self.tables is not None
        self.tables.fill(together)
        for active in together.active:
            self.replays[id(kernel), self._size(kernel, active)]()

    def _make_room(self, kernel: Kernel, steps: int, width: int) -> None:
        """Grow the tables, which forgets what was captured on the old ones."""
        wanted = [kernel.clients, 1 << (steps - 1).bit_length(), width]
        held = [0, 0, 0] if self.tables is None else list(self.tables.index.shape)
        larger = [max(pair) for pair in zip(wanted, held, strict=True)]
        if larger != held:
            self.replays.clear()
            self.tables = Tables.empty(larger[0], larger[1], larger[2], self.data.x.device)

    @staticmethod
    def _size(kernel: Kernel, active: int) -> int:
        """Return how many clients to step: all, or half, a quarter, ... where fewer are active."""
        size = kernel.clients
        while (size + 1) // 2 >= active and size > 1:
            size = (size + 1) // 2
        return size

    def _step(self, kernel: Kernel, clients: int) -> Callable[[], None]:
        """Return a step that reads its inputs from the tables and moves the clock."""
        tables = self.tables
        assert tables is not None
        x, y = self.data
        width = tables.index.shape[2]
        step = kernel.step(clients, width, self.data)
        clock = tables.clock

        def run() -> None:
            at = tables.index[:clients].index_select(1, clock).flatten()
            torch.index_select(x, 0, at, out=step.x.flatten(0, 1))
            torch.index_select(y, 0, at, out=step.y.flatten(0, 1))
            torch.index_select(tables.weight[:clients], 1, clock, out=step.weight.unsqueeze(1))
            if not kernel.sink.direct:
                torch.index_select(tables.rate[:clients], 1, clock, out=step.rate.unsqueeze(1))
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
