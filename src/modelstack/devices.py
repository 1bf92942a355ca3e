"""Train the clients of a round on several devices of one machine.

Each device has a trainer, a copy of the data and a thread. Clients are dealt to the devices like
cards, those with most steps first, and their models come back in the order of the jobs. A client's
batches, dropout masks and start do not depend on the device, nor on the clients beside it. Only the
order of sums can: where clients train side by side, padding and kernels depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelstack.jobs import Data, Job, by_length
from modelstack.trainer import Trainer
from modelstack.training import Training
from modelstack.worker import Doubles


class MultiDeviceTrainer(Trainer):
    """A `Trainer` whose `device` names several devices, separated by commas: "cuda:0,cuda:1".

    Training, gradients, losses and evaluation run on all of them, everything else on the first. A
    device may be named twice. `max_memory` is that of each device.

    Examples
    --------
    >>> from modelstack import BatchPlan
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> trainer = MultiDeviceTrainer(model, Training(batch_size=2), device="cpu,cpu")
    >>> data = trainer.data(np.eye(4), np.array([0, 1, 0, 1]))
    >>> jobs = [Job(0, np.arange(3), BatchPlan(3, 2)) for _ in range(3)]
    >>> trained = trainer.train(trainer.flat(), jobs, data)
    >>> alone = Trainer(model, Training(batch_size=2), device="cpu")
    >>> bool((trained == alone.train(trainer.flat(), jobs, data)).all())
    True
    """

    def __init__(
        self, model: nn.Module, training: Training | None = None, *, device: str, **options: Any
    ) -> None:
        first, *rest = (name.strip() for name in device.split(","))
        super().__init__(model, training, device=first, **options)
        names = (first, *rest)
        self.trainers = [Trainer(model, training, device=name, **options) for name in names]
        self._copies: list[tuple[Data, list[Data]]] = []
        self._threads = ThreadPoolExecutor(len(self.trainers), thread_name_prefix="device")

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`; see `Trainer.train`."""
        rows, order = self._rows(params, jobs), by_length(jobs)
        out = torch.empty(len(jobs), self.size, device=self.device)
        return self._dealt(order, data, out, lambda trainer, mine, held: trainer.train(
            rows.to(trainer.device), [jobs[i] for i in mine], held, lr
        ))  # fmt: skip

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Tensor:
        """Return the gradient of each job's mean loss; see `Trainer.gradients`."""
        rows, order = self._rows(params, jobs), range(len(jobs))
        out = torch.empty(len(jobs), self.size, device=self.device)
        return self._dealt(order, data, out, lambda trainer, mine, held: trainer.gradients(
            rows.to(trainer.device), [jobs[i] for i in mine], held
        ))  # fmt: skip

    def losses(
        self, params: Tensor, jobs: Sequence[Job], data: Data, *, power: float = 1.0
    ) -> Doubles:
        """Return the mean of loss ** power over each job's samples; see `Trainer.losses`."""
        rows, order = self._rows(params, jobs), range(len(jobs))
        out = torch.empty(len(jobs), dtype=torch.float64)
        self._dealt(order, data, out, lambda trainer, mine, held: torch.from_numpy(trainer.losses(
            rows.to(trainer.device), [jobs[i] for i in mine], held, power=power
        )))  # fmt: skip
        return np.asarray(out.numpy())

    def scores(self, params: Tensor, data: Data) -> Tensor:
        """Return accuracy and mean loss of every row of `params`; see `Trainer.scores`."""
        rows = self._rows(params, ())
        out = torch.empty(len(rows), 2, dtype=torch.float64, device=self.device)
        return self._dealt(range(len(rows)), data, out, lambda trainer, mine, held: trainer.scores(
            rows[mine].to(trainer.device), held
        ))  # fmt: skip

    def _dealt(
        self,
        ranked: Sequence[int],
        data: Data,
        out: Tensor,
        work: Callable[[Trainer, list[int], Data], Tensor],
    ) -> Tensor:
        """Deal rows to the devices, let each do its share in its thread, and gather the results."""
        copies, count = self._copies_of(data), len(self.trainers)
        shares = [list(ranked[first::count]) for first in range(min(count, len(ranked)))]

        def run(number: int) -> Tensor:
            trainer = self.trainers[number]
            result = work(trainer, shares[number], copies[number]).to(out.device)
            if trainer.device.type == "cuda":  # the first device reads it on a stream of its own
                torch.cuda.current_stream(trainer.device).synchronize()
            return result

        with self._guard():  # one setting of PyTorch's precision for all threads
            for mine, result in zip(
                shares, self._threads.map(run, range(len(shares))), strict=True
            ):
                out[mine] = result
        return out

    def _copies_of(self, data: Data) -> list[Data]:
        """Return the data on each device, copied once."""
        for held, copies in self._copies:
            if held is data:
                return copies
        copies = [
            data if data.x.device == trainer.device else trainer.data(data.x, data.y)
            for trainer in self.trainers
        ]
        self._copies.append((data, copies))
        return copies
