"""One client's PyTorch model: measured by `simulate.measuring`, trained as the simulator trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.wire import Flat, Request, flatten
from fedcohort.rounds import ClientId, stream
from fedcohort.signals.catalog import Clients
from fedcohort.signals.projection import Vectors
from fedcohort.simulate import measuring
from fedcohort.simulate.local import LocalTraining, Trainer, config_errors, jobs


class ModelClient(Clients):
    """A client under the model of one message.

    `model` is the architecture, which is changed, `arrays` its state; `held` is the client's model
    after its last training, where the server asks for that one.
    """

    def __init__(
        self,
        client: ClientId,
        x: NDArray[Any],
        y: NDArray[Any],
        model: torch.nn.Module,
        arrays: ArrayRecord,
        request: Request,
        local: LocalTraining,
        loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "cross-entropy",
        device: str = "cpu",
        held: Flat | None = None,
    ) -> None:
        if any(isinstance(module, torch.nn.Embedding) for module in model.modules()):
            x = x.astype(np.int64)  # tokens, which `Examples` reads as numbers
        self.ids, self.x, self.y, self.model = (client,), x, y, model.to(device)
        self.request, self.local, self.device, self.held = request, local, device, held
        self.loss = loss if callable(loss) else None
        self.start = flatten(arrays)
        load(model, arrays)

    @cached_property
    def batches(self) -> measuring.Batches:
        """The client's examples on the device."""
        return measuring.batches_of(self.x, self.y, self.device)

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power."""
        return np.array([measuring.mean_loss(self.model, self.batches, self.loss, power)])

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        return measuring.mean_profile(self.model, self.batches)[None]

    def gradients(self) -> Vectors:
        """Return the full-batch gradient."""
        return Vectors(measuring.full_gradient(self.model, self.batches, self.loss))

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of the client's batches, in a random order."""
        rng = stream(self.request.seed, "gradient spread", self.request.round, self.ids[0])
        order = rng.permutation(len(self.y))
        rows = np.stack(
            [
                measuring.full_gradient(self.model, [batch], self.loss)
                for batch in measuring.batches_of(
                    self.x[order], self.y[order], self.device, self.local.batch_size
                )
            ]
        )
        distances = np.square(rows - rows.mean(axis=0), dtype=np.float64).sum(axis=1)
        return np.array([np.sqrt(distances.mean())])

    def expected_durations(self) -> NDArray[np.float64]:
        """Return the seconds of a round's training: those of one batch, times the batches."""
        size, seconds = self.local.batch_size, 0.0
        batch = measuring.batches_of(self.x[:size], self.y[:size], self.device, size)
        for _ in range(2):  # the first time includes what is set up once
            started = time.perf_counter()
            measuring.full_gradient(self.model, batch, self.loss)
            seconds = time.perf_counter() - started
        steps = self.local.steps or self.local.epochs * -(-len(self.y) // size)
        return np.array([steps * seconds])

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, or after the client's last training."""
        if not fresh:
            return Vectors(self.start if self.held is None else self.held)
        return Vectors(self.train(f"query/{self.ids[0]}"))

    def train(self, batches_for: str | None = None) -> Flat:
        """Train a round as the simulator does; `batches_for` names the draw of the batches."""
        if any(buffer.is_floating_point() for buffer in self.model.buffers()):
            raise ConfigError(
                "our training does not keep a model's running statistics (batch norm): train in "
                "your own @app.train(), and attach after it"
            )
        with torch.no_grad():
            outputs = self.model.eval()(next(iter(self.batches))[0])
        loss = self.loss or measuring.usual_loss(self.model, outputs)
        multiclass = self.loss is None and outputs.ndim > 1 and outputs.shape[-1] > 1
        given = "cross-entropy" if multiclass else loss
        request, parts = self.request, [np.arange(len(self.y))]
        with config_errors():
            trainer = Trainer(self.model, self.local, loss=given, device=self.device)
            work = jobs(trainer, request.seed, request.round, [batches_for or self.ids[0]], parts)
            start = torch.from_numpy(self.start.copy()).to(trainer.device)
            data, lr = trainer.data(self.x, self.y), self.local.lr_at(request.round)
            return np.array(trainer.train(start, work, data, lr)[0].cpu().numpy(), np.float32)


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
