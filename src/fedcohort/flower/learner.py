"""One client's training and model-based answers, by the simulator's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcohort.datasets import Dataset, Federation
from fedcohort.flower.arrays import Flat
from fedcohort.flower.messages import Request
from fedcohort.rounds import ClientId
from fedcohort.simulate.clients import SimulatedClients
from fedcohort.simulate.engine.trainer import Trainer
from fedcohort.simulate.local import LocalTraining


class Learner:
    """Trains and measures with the simulator's own code, so that both give the same numbers.

    Parameters
    ----------
    client : str
    x, y : array
        The client's examples.
    model : nn.Module
        The architecture.
    local : LocalTraining
    loss, device
        As in `Trainer`.
    """

    def __init__(
        self,
        client: ClientId,
        x: NDArray[Any],
        y: NDArray[Any],
        model: torch.nn.Module,
        local: LocalTraining,
        loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "cross-entropy",
        device: str = "cpu",
    ) -> None:
        self.client = client
        self.trainer = Trainer(model, local, loss=loss, device=device)
        self.data = self.trainer.data(x, y)
        labels = np.asarray(y, np.int64)
        dataset = Dataset(client, x, labels, x[:0], labels[:0], int(labels.max()) + 1)
        self.federation = Federation(dataset, {client: np.arange(len(x))})

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.federation.parts[self.client])

    def train(self, start: Flat, request: Request) -> Flat:
        """Train a round from a flat model."""
        positions = self.federation.parts[self.client]
        job = self.trainer.job(request.seed, request.round, self.client, positions)
        lr = self.trainer.local.lr_at(request.round)
        trained = self.trainer.train(self._tensor(start), [job], self.data, lr)
        return np.array(trained[0].cpu().numpy(), np.float32)

    def clients(self, model: Flat, request: Request, held: Flat | None) -> SimulatedClients:
        """Return this client under a model; `held` is its model after its last training."""
        return SimulatedClients(
            (self.client,),
            self.trainer,
            self.data,
            self.federation,
            request.seed,
            request.round,
            self._tensor(model),
            held={} if held is None else {self.client: self._tensor(held)},
        )

    def _tensor(self, flat: Flat) -> torch.Tensor:
        return torch.from_numpy(np.array(flat)).to(self.trainer.device)
