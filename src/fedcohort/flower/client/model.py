"""One client's PyTorch model: measured in plain PyTorch, trained as the simulator trains.

The simulator's engines, which measure many clients at once, find the same numbers. A model is
measured as it evaluates: without dropout, and with the running statistics that it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.answer import Asked
from fedcohort.flower.wire import Flat
from fedcohort.rounds import stream
from fedcohort.signals.projection import Vectors
from fedcohort.simulate.local import LocalTraining, Trainer, config_errors, first_dense, jobs

SampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
BATCH = 256
cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="none")


class Measured(Asked):
    """A client whose app said what its model is, under the parameters of one message."""

    @cached_property
    def network(self) -> torch.nn.Module:
        """The app's model, in the state in which the app makes it."""
        assert self.answers.model is not None
        return self.answers.model(self.context).to(self.answers.device).eval()

    @property
    def model(self) -> torch.nn.Module:
        """The app's model, in the state that the server sent, whatever the app did to it since."""
        load(self.network.eval(), self.arrays)
        return self.network

    @cached_property
    def tensors(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The client's examples: tokens as whole numbers, other inputs as float32."""
        x, y = self.data.arrays()
        has_tokens = any(isinstance(m, torch.nn.Embedding) for m in self.network.modules())
        return x.astype(np.int64 if has_tokens else np.float32), y

    @cached_property
    def batches(self) -> Batches:
        return batches_of(*self.tensors, self.answers.device)

    @property
    def local(self) -> LocalTraining:
        return self.answers.local or LocalTraining()

    @cached_property
    def sample_loss(self) -> SampleLoss:
        """The loss of each sample: the app's, or the usual one."""
        if callable(self.answers.loss):
            return self.answers.loss
        with torch.no_grad():
            return usual_loss(self.network, self.network(next(iter(self.batches))[0]))

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        model, total = self.model, 0.0
        with torch.no_grad():
            for x, y in self.batches:
                total += float((self.sample_loss(model(x), y).double() ** power).sum())
        return np.array([total / len(self.tensors[1])])

    def features(self) -> NDArray[Any]:
        """Return the mean output, before the activation, of the first dense layer that runs."""
        with torch.no_grad(), config_errors(), first_dense(self.model) as output:
            sums = [output(x).double().flatten(1).sum(0) for x, _ in self.batches]
        means = torch.stack(sums).sum(0).cpu().numpy() / len(self.tensors[1])
        return np.asarray(means, np.float32)[None]

    def gradients(self) -> Vectors:
        """Return the full-batch gradient; parameters that are not used have gradient 0."""
        return Vectors(self._gradient(self.model, self.batches))

    def _gradient(self, model: torch.nn.Module, batches: Batches) -> NDArray[np.float32]:
        """Return the gradient of the mean loss over some batches."""
        n = 0
        model.zero_grad()
        for x, y in batches:
            self.sample_loss(model(x), y).sum().backward()  # type: ignore[no-untyped-call]
            n += len(y)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return (torch.cat([part.ravel() for part in parts]) / n).cpu().numpy()

    def gradient_spreads(self) -> NDArray[np.float64]:
        model, (x, y) = self.model, self.tensors
        rng = stream(self.request.seed, "gradient spread", self.request.round, self.ids[0])
        order = rng.permutation(len(y))
        batches = batches_of(x[order], y[order], self.answers.device, self.local.batch_size)
        rows = np.stack([self._gradient(model, [batch]) for batch in batches])
        distances = np.square(rows - rows.mean(axis=0), dtype=np.float64).sum(axis=1)
        return np.array([np.sqrt(distances.mean())])

    def expected_durations(self) -> NDArray[np.float64]:
        """Return the seconds of a round's training: those of one batch, times the batches."""
        x, y = self.tensors
        size, seconds = self.local.batch_size, 0.0
        batch = batches_of(x[:size], y[:size], self.answers.device, size)
        for _ in range(2):  # the first time includes what is set up once
            started = time.perf_counter()
            self._gradient(self.network, batch)
            seconds = time.perf_counter() - started
        steps = self.local.steps or self.local.epochs * -(-len(y) // size)
        return np.array([steps * seconds])

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, by our code where the app has no training."""
        if self.answers.own_train is not None or not fresh:
            return super().trained(fresh)
        return Vectors(self.train(f"query/{self.ids[0]}"))

    def train(self, batches_for: str | None = None, prox_mu: float = 0.0) -> Flat:
        """Train a round as the simulator does; `batches_for` names the draw of the batches."""
        model, (x, y) = self.model, self.tensors
        if any(buffer.is_floating_point() for buffer in model.buffers()):
            raise ConfigError(
                "our training does not keep a model's running statistics (batch norm): train in "
                "your own @app.train(), and attach after it"
            )
        local = replace(self.local, prox_mu=prox_mu) if prox_mu else self.local
        number, names = self.request.round, [batches_for or self.ids[0]]
        # the engine has kernels for the loss of that name
        loss = "cross-entropy" if self.sample_loss is cross_entropy else self.sample_loss
        with config_errors():
            trainer = Trainer(model, local, loss=loss, device=self.answers.device)
            work = jobs(trainer, self.request.seed, number, names, [np.arange(len(y))])
            start = torch.from_numpy(self.start.copy()).to(trainer.device)
            result = trainer.train(start, work, trainer.data(x, y), local.lr_at(number))
            return np.array(result[0].cpu().numpy(), np.float32)


def load(model: torch.nn.Module, arrays: ArrayRecord) -> None:
    """Give a model the state that a server sent: by names, or in order where names are numbers."""
    state = dict(arrays.to_torch_state_dict())
    names = list(model.state_dict())
    if not set(state) <= set(names):
        parameters = [name for name, _ in model.named_parameters()]
        order = names if len(names) == len(state) else parameters
        if len(order) != len(state):
            raise ConfigError(
                f"model={type(model).__name__} has {len(names)} arrays, the server's {len(state)}; "
                "give attach the architecture that the server trains"
            )
        state = dict(zip(order, state.values(), strict=True))
    model.load_state_dict(state, strict=False)


def batches_of(
    x: NDArray[Any], y: NDArray[Any], device: str | torch.device = "cpu", size: int = BATCH
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return arrays as batches of tensors: labels and tokens are int64, other numbers float32."""

    def tensors(values: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        return torch.split(tensor.to(device, kind), size)

    return list(zip(tensors(x), tensors(y), strict=True))


def usual_loss(model: torch.nn.Module, outputs: torch.Tensor) -> SampleLoss:
    """Return a classifier's loss of each sample: cross-entropy, binary for a single output."""
    if outputs.ndim > 1 and outputs.shape[-1] != 1:
        return cross_entropy
    is_probability = any(isinstance(m, torch.nn.Sigmoid) for m in model.modules()) or bool(
        ((outputs > 0) & (outputs < 1)).all()
    )
    entropy = torch.nn.functional.binary_cross_entropy
    if not is_probability:
        entropy = torch.nn.functional.binary_cross_entropy_with_logits

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = outputs.squeeze(-1) if outputs.ndim > y.ndim else outputs
        return entropy(flat, y.to(flat.dtype), reduction="none")

    return loss
