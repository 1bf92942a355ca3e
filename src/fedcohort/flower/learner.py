"""One client's training and model-based answers, by the simulator's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedcohort.datasets import Dataset, Federation
from fedcohort.exceptions import ConfigError
from fedcohort.flower.arrays import Flat, flatten
from fedcohort.flower.messages import Request
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import Clients
from fedcohort.signals.projection import Vectors
from fedcohort.simulate.clients import SimulatedClients
from fedcohort.simulate.local import Data, LocalTraining, Trainer, jobs, sample_loss


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
        self.client, self.model = client, model
        x = np.asarray(x, np.float32)
        if loss == "cross-entropy" and (binary := binary_loss(model, x)) is not None:
            loss = binary
        self.loss, self.x, self.y, self.device = sample_loss(loss), x, np.asarray(y), device
        self.local = local
        labels = np.asarray(y, np.int64)
        dataset = Dataset(client, x, labels, x[:0], labels[:0], int(labels.max()) + 1)
        self.federation = Federation(dataset, {client: np.arange(len(x))})

    @cached_property
    def trainer(self) -> Trainer:
        """The simulator's trainer."""
        return Trainer(self.model, self.local, loss=self.loss, device=self.device)

    @cached_property
    def data(self) -> Data:
        """The client's examples on the device."""
        return self.trainer.data(self.x, self.y)

    @property
    def stateful(self) -> bool:
        """Whether the model has running statistics beside its parameters."""
        return any(buffer.is_floating_point() for buffer in self.model.buffers())

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.federation.parts[self.client])

    def train(self, start: Flat, request: Request) -> Flat:
        """Train a round from a flat model."""
        if self.stateful:
            raise ConfigError(
                "our training does not keep a model's running statistics (batch norm): train in "
                "your own @app.train(), and attach after it"
            )
        positions = self.federation.parts[self.client]
        work = jobs(self.trainer, request.seed, request.round, [self.client], [positions])
        lr = self.local.lr_at(request.round)
        trained = self.trainer.train(self._tensor(start), work, self.data, lr)
        return np.array(trained[0].cpu().numpy(), np.float32)

    def clients(self, arrays: ArrayRecord, request: Request, held: Flat | None) -> Clients:
        """Return this client under a model; `held` is its model after its last training."""
        if self.stateful:
            return StatefulClient(self, arrays)
        return SimulatedClients(
            (self.client,),
            self.trainer,
            self.data,
            self.federation,
            request.seed,
            request.round,
            self._tensor(flatten(arrays)),
            held={} if held is None else {self.client: self._tensor(held)},
        )

    def _tensor(self, flat: Flat) -> torch.Tensor:
        return torch.from_numpy(np.array(flat)).to(self.trainer.device)


class StatefulClient(Clients):
    """One client under a model with running statistics, measured as the model evaluates.

    Batch norm's statistics are part of the state, so the whole state is loaded.
    """

    def __init__(self, learner: Learner, arrays: ArrayRecord) -> None:
        self.ids, self.learner = (learner.client,), learner
        state = arrays.to_torch_state_dict()
        self.model = learner.model
        self.model.load_state_dict(state)
        self.model.to(learner.device).eval()

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of examples."""
        return np.array([self.learner.size], np.int64)

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power."""
        with torch.no_grad():
            total = sum(
                float((self.learner.loss(self.model(x), y).double() ** power).sum())
                for x, y in self._batches()
            )
        return np.array([total / self.learner.size])

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        dense = next((m for m in self.model.modules() if isinstance(m, torch.nn.Linear)), None)
        if dense is None:
            raise ConfigError("a feature profile needs a dense layer, and this model has none")
        sums: list[torch.Tensor] = []
        hook = dense.register_forward_hook(lambda m, i, out: sums.append(out.double().sum(0)))
        try:
            with torch.no_grad():
                for x, _ in self._batches():
                    self.model(x)
        finally:
            hook.remove()
        mean = torch.stack(sums).sum(0) / self.learner.size
        return mean.cpu().numpy().astype(np.float32)[None]

    def gradients(self) -> Vectors:
        """Return the full-batch gradient of the parameters."""
        self.model.zero_grad()
        for x, y in self._batches():
            (self.learner.loss(self.model(x), y).sum() / self.learner.size).backward()  # type: ignore[no-untyped-call]
        parts = [p.grad.ravel() for p in self.model.parameters() if p.grad is not None]
        return Vectors(torch.cat(parts).cpu().numpy()[None])

    def _batches(self, size: int = 256) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        own = self.learner
        for start in range(0, own.size, size):
            x, y = (part[start : start + size] for part in (own.x, own.y))
            yield torch.from_numpy(x).to(own.device), torch.from_numpy(y).to(own.device)


def binary_loss(
    model: torch.nn.Module, x: NDArray[np.float32]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the loss of a classifier with one output, None for one with an output per class.

    The softmax of one output is always 1, so cross-entropy would report a loss of 0. An output that
    went through a sigmoid is a probability; any other one is a logit.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(torch.from_numpy(x[:64]))
    model.train(was_training)
    if outputs.ndim > 1 and outputs.shape[-1] != 1:
        return None
    probability = any(isinstance(m, torch.nn.Sigmoid) for m in model.modules())
    probability = probability or bool(((outputs > 0) & (outputs < 1)).all())
    function = torch.nn.functional
    entropy = function.binary_cross_entropy
    if not probability:
        entropy = function.binary_cross_entropy_with_logits

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = outputs.squeeze(-1) if outputs.ndim > y.ndim else outputs
        return entropy(flat, y.to(flat.dtype), reduction="none")

    return loss
