"""Train the clients of a round on several devices of one machine.

Each device has a trainer, a copy of the data and a thread. Clients are dealt to the devices like
cards, those with most steps first, and their models come back in the order of the jobs. A client's
batches, dropout masks and start do not depend on the device, nor on the clients beside it. Only the
order of sums can: where clients train side by side, padding and kernels depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from modelstack.jobs import Data, Job, by_length
from modelstack.trainer import Trainer
from modelstack.training import Training
from modelstack.worker import Doubles

T = TypeVar("T")


class MultiDeviceTrainer(Trainer):
    """A `Trainer` whose `device` names several devices, separated by commas.

    Training, gradients, losses and evaluation run on all of them, everything else on the first. A
    device may be named twice.

    Parameters
    ----------
    model, local, options
        As in `Trainer`. `max_memory` is that of each device.
    device : str
        For example "cuda:0,cuda:1".

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
        self, model: nn.Module, local: Training | None = None, *, device: str, **options: Any
    ) -> None:
        first, *rest = (name.strip() for name in device.split(","))
        super().__init__(model, local, device=first, **options)
        self.trainers = [Trainer(model, local, device=name, **options) for name in (first, *rest)]
        self._copies: list[tuple[Data, list[Data]]] = []
        self._threads = ThreadPoolExecutor(len(self.trainers), thread_name_prefix="device")

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`; see `Trainer.train`."""
        rows = self._rows(params, jobs)

        def train(trainer: Trainer, mine: list[int], held: Data) -> Tensor:
            own = rows.to(trainer.device)
            return trainer.train(own, [jobs[i] for i in mine], held, lr).to(self.device)

        return self._gathered(jobs, data, train)

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Tensor:
        """Return the gradient of each job's mean loss; see `Trainer.gradients`."""
        rows = self._rows(params, jobs)

        def gradients(trainer: Trainer, mine: list[int], held: Data) -> Tensor:
            own = rows.to(trainer.device)
            return trainer.gradients(own, [jobs[i] for i in mine], held).to(self.device)

        return self._gathered(jobs, data, gradients)

    def losses(
        self, params: Tensor, jobs: Sequence[Job], data: Data, *, power: float = 1.0
    ) -> Doubles:
        """Return the mean of loss ** power over each job's samples; see `Trainer.losses`."""
        rows = self._rows(params, jobs)

        def losses(trainer: Trainer, mine: list[int], held: Data) -> Doubles:
            return trainer.losses(
                rows.to(trainer.device), [jobs[i] for i in mine], held, power=power
            )

        dealt = self._dealt(range(len(jobs)))
        out = np.empty(len(jobs))
        for mine, found in zip(dealt, self._on_each(dealt, data, losses), strict=True):
            out[mine] = found
        return out

    def scores(self, params: Tensor, data: Data) -> Tensor:
        """Return accuracy and mean loss of every row of `params`; see `Trainer.scores`."""
        rows = self._rows(params, ())

        def scores(trainer: Trainer, mine: list[int], held: Data) -> Tensor:
            return trainer.scores(rows[mine].to(trainer.device), held).to(self.device)

        dealt = self._dealt(range(len(rows)))
        out = torch.empty(len(rows), 2, dtype=torch.float64, device=self.device)
        for mine, found in zip(dealt, self._on_each(dealt, data, scores), strict=True):
            out[mine] = found
        return out

    def _gathered(
        self, jobs: Sequence[Job], data: Data, work: Callable[[Trainer, list[int], Data], Tensor]
    ) -> Tensor:
        dealt = self._dealt(by_length(jobs) if all(job.plan for job in jobs) else range(len(jobs)))
        out = torch.empty(len(jobs), self.size, device=self.device)
        for mine, found in zip(dealt, self._on_each(dealt, data, work), strict=True):
            out[mine] = found
        return out

    def _dealt(self, ranked: Sequence[int]) -> list[list[int]]:
        """Deal numbers to the devices; those without any are left out."""
        count = len(self.trainers)
        return [list(ranked[first::count]) for first in range(min(count, len(ranked)))]

    def _on_each(
        self, dealt: list[list[int]], data: Data, work: Callable[[Trainer, list[int], Data], T]
    ) -> list[T]:
        """Do each device's share in its thread, with one setting of PyTorch's precision."""
        copies = self._copies_of(data)

        def run(number: int) -> T:
            trainer = self.trainers[number]
            result = work(trainer, dealt[number], copies[number])
            if trainer.device.type == "cuda":  # the first device reads it on a stream of its own
                torch.cuda.current_stream(trainer.device).synchronize()
            return result

        with self._guard():
            return list(self._threads.map(run, range(len(dealt))))

    def _copies_of(self, data: Data) -> list[Data]:
        """Return the data on each device, copied once."""
        for known, copies in self._copies:
            if known is data:
                return copies
        copies = [
            data if data.x.device == trainer.device else trainer.data(data.x, data.y)
            for trainer in self.trainers
        ]
        self._copies.append((data, copies))
        return copies
