"""Which engine and device suit a model.

Training a cohort, or the cohorts of several seeds, with the engine that suits the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId
from fedcohort.simulate.engine import stacked
from fedcohort.simulate.engine.batched import Batched
from fedcohort.simulate.engine.jobs import Data, Job
from fedcohort.simulate.engine.kernel import SampleLoss, sample_loss
from fedcohort.simulate.engine.switches import precision
from fedcohort.simulate.engine.worker import (
    Doubles,
    Loop,
    Worker,
    accuracy_and_loss,
    hits,
    mean_features,
    mean_losses,
    write,
)
from fedcohort.simulate.local import Ints, LocalTraining, batch_plan

ENGINES = ("auto", "loop", "stacked", "vmap")


def choose(engine: str, model: nn.Module, device: torch.device) -> str:
    """Return the engine to use: the one asked for, if the model allows it, or the fastest.

    Examples
    --------
    >>> choose("auto", nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.device("cpu"))
    'stacked'
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    mixes = any(isinstance(module, _NormBase) for module in model.modules())
    stackable = stacked.modules(model) is not None
    if engine == "stacked" and not stackable:
        raise ConfigError(
            "engine='stacked' needs an nn.Sequential of Flatten, Linear, Conv2d, MaxPool2d, "
            "LocalResponseNorm, Dropout, ReLU, Tanh and Sigmoid layers: choose 'vmap', 'loop' or "
            "'auto'"
        )
    if engine == "vmap" and mixes:
        raise ConfigError("batch norm sees padding when clients are batched: choose engine='loop'")
    if engine != "auto":
        return engine
    if device.type == "cpu":  # batched convolutions and recurrences lose to the loop there
        images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        return "stacked" if stackable and not images else "loop"
    return "loop" if mixes else "stacked" if stackable else "vmap"


def check(model: nn.Module) -> None:
    """Refuse models that have nothing to train, or state that federated averaging would lose."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise ConfigError(
                f"layer {name!r} ({type(module).__name__}) tracks running statistics, which are no "
                "parameters and would not be averaged: use nn.GroupNorm, or "
                "track_running_stats=False"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameter")


def room(device: torch.device) -> int:
    """Return the bytes for clients side by side: what a CPU's cache holds, a quarter of a GPU."""
    if device.type == "cpu":
        return 2**24
    return int(torch.cuda.get_device_properties(device).total_memory) // 4


def device_name(name: str) -> str:
    """Return the device to use."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but PyTorch sees no GPU: choose 'cpu' or 'auto'")
    return name


class Engine(Protocol):
    """What trains clients."""

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float, out: Tensor
    ) -> None:
        """Write each job's trained parameters to its row of `out`."""

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data, out: Tensor) -> None:
        """Write the gradient of each job's mean loss to its row of `out`."""


class Trainer:
    """Trains many clients at once.

    Parameters
    ----------
    model : nn.Module
        The architecture; its parameters are read by `flat` and never changed.
    local : LocalTraining
    loss : "cross-entropy" or callable
        callable(outputs, y) returns one loss a sample.
    device : str
        "auto" takes a GPU where there is one.
    engine : {"auto", "loop", "stacked", "vmap"}
        How the clients of a cohort train: one after the other, or side by side. All give the same
        result up to rounding; "auto" takes the fastest. Dropout's masks depend on the engine.
    memory : int, optional
        Bytes for clients side by side; a cohort that needs more trains in several groups.
    tf32 : bool
        Let a GPU round what it multiplies to 10 bits of mantissa, for speed.

    Examples
    --------
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> trainer = Trainer(model, LocalTraining(batch_size=2), device="cpu")
    >>> data = trainer.data(np.eye(4), np.array([0, 1, 0, 1]))
    >>> job = trainer.job(seed=0, round_number=0, client="ann", positions=np.arange(3))
    >>> trained = trainer.train(trainer.flat(), [job], data)
    >>> before, after = (trainer.losses(p, [job], data)[0] for p in (trainer.flat(), trained))
    >>> trained.shape, bool(after < before)
    (torch.Size([1, 10]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        local: LocalTraining | None = None,
        *,
        loss: str | SampleLoss = "cross-entropy",
        device: str = "auto",
        engine: str = "auto",
        memory: int | None = None,
        tf32: bool = False,
    ) -> None:
        self.local = LocalTraining() if local is None else local
        self.device = torch.device(device_name(device))
        self.tf32 = tf32
        check(model)
        self.worker = Worker(model, sample_loss(loss), self.device)
        self.size = sum(p.numel() for p in self.worker.params)
        self._initial = self.flat(model)
        self.engine = choose(engine, model, self.device)
        drops = any(isinstance(module, nn.Dropout) for module in model.modules())
        self._random = self.engine != "stacked" or drops  # any forward may call F.dropout
        self._engine = self._make(memory or room(self.device))
        self._out = torch.empty(0, self.size, device=self.device)

    def _make(self, memory: int) -> Engine:
        if self.engine == "loop":
            return Loop(self.worker, self.local)
        if self.engine == "stacked":
            kind: Any = stacked.Stacked
        else:
            from fedcohort.simulate.engine.vmapped import Vmapped as kind
        worker = self.worker
        return Batched(kind, worker.model, self.local, worker.loss, self.device, memory)

    def data(self, x: Any, y: Any) -> Data:
        """Move samples and labels (arrays or tensors) to the device."""
        return Data(_tensor(x, self.device), _tensor(y, self.device))

    def flat(self, model: nn.Module | None = None) -> Tensor:
        """Return a model's parameters (by default the given model's) as one vector."""
        if model is None:
            return self._initial.clone()
        parts = [p.detach().reshape(-1) for p in model.parameters()]
        return torch.cat(parts).to(self.device, torch.float32)

    def load(self, flat: Tensor, model: nn.Module) -> nn.Module:
        """Write a flat vector into a model of the same architecture and return the model."""
        write(flat, list(model.parameters()))
        return model

    def job(
        self, seed: int, round_number: int, client: ClientId, positions: Ints, row: int = 0
    ) -> Job:
        """Return a client's training in a round, with its batches."""
        positions = np.asarray(positions, np.int64)
        plan = batch_plan(seed, round_number, client, len(positions), self.local)
        if not self._random:
            return Job(row, positions, plan)
        text = f"dropout/{seed}/{round_number}/{client}".encode()
        masks = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")
        return Job(row, positions, plan, masks)

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`.

        Parameters
        ----------
        params : Tensor
            (seeds, size), or (size,) for one seed.
        jobs : sequence of Job
        data : Data
        lr : float, optional
            Learning rate of the round, by default `local.lr`.

        Returns
        -------
        Tensor
            (jobs, size). The next call writes to the same memory: reduce or clone it before.
        """
        rows = self._rows(params, jobs)
        if len(self._out) < len(jobs):
            self._out = rows.new_empty(len(jobs), self.size)
        out = self._out[: len(jobs)]
        if jobs:
            with precision(self.device, self.tf32):
                self._engine.train(rows, jobs, data, self.local.lr if lr is None else lr, out)
        return out

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Tensor:
        """Return the gradient of each job's mean loss, (jobs, size), without dropout."""
        rows = self._rows(params, jobs)
        out = rows.new_empty(len(jobs), self.size)
        if jobs:
            with precision(self.device, self.tf32):
                self._engine.gradients(rows, jobs, data, out)
        return out

    def losses(
        self, params: Tensor, jobs: Sequence[Job], data: Data, *, power: float = 1.0
    ) -> Doubles:
        """Return the mean of loss ** power over each job's samples, under its row of `params`.

        The square root of the result with ``power=2`` is the root mean square that Oort uses.
        """
        rows = self._rows(params, jobs)
        with precision(self.device, self.tf32):
            return mean_losses(self.worker, rows, jobs, data, power)

    def features(self, params: Tensor, jobs: Sequence[Job], data: Data) -> NDArray[np.float32]:
        """Return the mean output of the layer `fc1` (else the first nn.Linear) for each job."""
        rows = self._rows(params, jobs)
        with precision(self.device, self.tf32):
            return mean_features(self.worker, rows, jobs, data).astype(np.float32)

    def evaluate(self, params: Tensor, data: Data) -> tuple[Doubles, Doubles]:
        """Return accuracy and mean loss of every row of `params`."""
        with precision(self.device, self.tf32):
            return accuracy_and_loss(self.worker, self._rows(params, ()), data)

    def hits(self, params: Tensor, positions: Ints, data: Data) -> NDArray[np.bool_]:
        """Return for each position in `data` whether one flat model classifies it correctly."""
        (row,) = self._rows(params, ())
        at = torch.from_numpy(np.asarray(positions, np.int64)).to(data.x.device)
        with precision(self.device, self.tf32):
            return hits(self.worker, row, at, data)

    def _rows(self, params: Tensor, jobs: Sequence[Job]) -> Tensor:
        rows = params.detach().unsqueeze(0) if params.dim() == 1 else params.detach()
        if rows.dim() != 2 or rows.shape[1] != self.size:
            raise ConfigError(
                f"params of shape {tuple(params.shape)}: the model has {self.size} parameters"
            )
        models = len(rows)
        for i, job in enumerate(jobs):
            if not 0 <= job.row < models:
                raise ConfigError(f"job {i}: row={job.row}, but there are {models} models")
            if not len(job.positions):
                raise ConfigError(f"job {i} has no samples")
        return rows


def _tensor(values: Any, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values)
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.to(device=device, dtype=kind).contiguous()
