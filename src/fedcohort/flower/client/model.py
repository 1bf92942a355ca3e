"""One client's PyTorch model: measured by `simulate.measuring`, trained as the simulator trains."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
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
from fedcohort.simulate import measuring
from fedcohort.simulate.local import LocalTraining, Trainer, config_errors, jobs


class Measured(Asked):
    """A client whose app said what its model is, under the parameters of one message."""

    @cached_property
    def network(self) -> torch.nn.Module:
        """The app's model, in the state in which the app makes it."""
        assert self.answers.model is not None
        return self.answers.model(self.context).to(self.answers.device)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The app's model, in the state that the server sent."""
        load(self.network, self.arrays)
        return self.network

    @cached_property
    def tensors(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The client's examples: tokens as whole numbers, other inputs as float32."""
        x, y = self.data.arrays()
        has_tokens = any(
            isinstance(module, torch.nn.Embedding) for module in self.network.modules()
        )
        return x.astype(np.int64 if has_tokens else np.float32), y

    @cached_property
    def batches(self) -> measuring.Batches:
        """The client's examples on the device."""
        return measuring.batches_of(*self.tensors, self.answers.device)

    @property
    def local(self) -> LocalTraining:
        """How our training goes."""
        return self.answers.local or LocalTraining()

    @property
    def sample_loss(self) -> measuring.SampleLoss | None:
        """The app's loss of each sample, None for the usual one."""
        return self.answers.loss if callable(self.answers.loss) else None

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power."""
        return np.array([measuring.mean_loss(self.model, self.batches, self.sample_loss, power)])

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        return measuring.mean_profile(self.model, self.batches)[None]

    def gradients(self) -> Vectors:
        """Return the full-batch gradient."""
        return Vectors(measuring.full_gradient(self.model, self.batches, self.sample_loss))

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of the client's batches, in a random order."""
        x, y = self.tensors
        rng = stream(self.request.seed, "gradient spread", self.request.round, self.ids[0])
        order = rng.permutation(len(y))
        batches = measuring.batches_of(
            x[order], y[order], self.answers.device, self.local.batch_size
        )
        loss = self.sample_loss
        rows = np.stack([measuring.full_gradient(self.model, [batch], loss) for batch in batches])
        distances = np.square(rows - rows.mean(axis=0), dtype=np.float64).sum(axis=1)
        return np.array([np.sqrt(distances.mean())])

    def expected_durations(self) -> NDArray[np.float64]:
        """Return the seconds of a round's training: those of one batch, times the batches."""
        x, y = self.tensors
        size, seconds = self.local.batch_size, 0.0
        batch = measuring.batches_of(x[:size], y[:size], self.answers.device, size)
        for _ in range(2):  # the first time includes what is set up once
            started = time.perf_counter()
            measuring.full_gradient(self.network, batch, self.sample_loss)
            seconds = time.perf_counter() - started
        steps = self.local.steps or self.local.epochs * -(-len(y) // size)
        return np.array([steps * seconds])

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, by our code where the app has no training."""
        if self.answers.train is not None or not fresh:
            return super().trained(fresh)
        return Vectors(self.train(f"query/{self.ids[0]}"))

    def train(self, batches_for: str | None = None, prox_mu: float = 0.0) -> Flat:
        """Train a round as the simulator does.

        `batches_for` names the draw of the batches; `prox_mu` is FedProx's.
        """
        model, (x, y) = self.model, self.tensors
        if any(buffer.is_floating_point() for buffer in model.buffers()):
            raise ConfigError(
                "our training does not keep a model's running statistics (batch norm): train in "
                "your own @app.train(), and attach after it"
            )
        with torch.no_grad():
            outputs = model.eval()(next(iter(self.batches))[0])
        loss = self.sample_loss or measuring.usual_loss(model, outputs)
        multiclass = self.sample_loss is None and outputs.ndim > 1 and outputs.shape[-1] > 1
        local = replace(self.local, prox_mu=prox_mu) if prox_mu else self.local
        number, names = self.request.round, [batches_for or self.ids[0]]
        with config_errors():
            trainer = Trainer(
                model,
                local,
                loss="cross-entropy" if multiclass else loss,
                device=self.answers.device,
            )
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
