"""Train and evaluate many copies of a model, with the engine that suits it.

`Trainer` is the public face: training, gradients, losses, features, evaluation. `choose` picks the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from modelstack import stacked
from modelstack.batched import Batched
from modelstack.jobs import Augmented, Data, Job, check_plans
from modelstack.kernel import SampleLoss, Setup, row_numbers, sample_loss
from modelstack.switches import check_precision, precision
from modelstack.training import Ints, Training, Unsupported
from modelstack.worker import Doubles, Loop, Worker, write

ENGINES = ("auto", "loop", "stacked", "vmap")

# The engines of a device, the fastest first, and the layers that are fastest in a plain loop there.
# Both were measured once and are fixed, because engines round differently: choosing by the clock
# would make the result of a run depend on how busy the machine is.
FASTEST = {
    "cpu": (("stacked", "loop"), (nn.Conv2d, nn.RNNBase)),
    "cuda": (("stacked", "vmap", "loop"), ()),
}
TOGETHER = {"cuda"}  # devices that evaluate several models side by side


class Choice(NamedTuple):
    """An engine, and why it is not a faster one ("" if it is the fastest)."""

    engine: str
    reason: str = ""


def choose(engine: str, model: nn.Module, device: torch.device) -> Choice:
    """Return the engine to use: the one asked for, if the model allows it, or the fastest.

    Examples
    --------
    >>> choose("auto", nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), torch.device("cuda"))
    Choice(engine='vmap', reason="layer '1' (Softmax) has no stacked form")
    """
    if engine not in ENGINES:
        raise Unsupported(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    obstacles = {"stacked": stacked.obstacle(model, device), "vmap": _batch_norm(model), "loop": ""}
    if obstacles.get(engine):
        raise Unsupported(f"engine={engine!r}: {obstacles[engine]}; choose 'loop' or 'auto'")
    if engine != "auto":
        return Choice(engine)
    engines, slow = FASTEST.get(device.type, FASTEST["cuda"])
    names = sorted({type(m).__name__ for m in model.modules() if isinstance(m, slow)})
    if names:
        return Choice("loop", f"on a CPU, {'/'.join(names)} is fastest in a plain loop")
    reason = ""
    for name in engines:
        if not obstacles[name]:
            break
        reason = obstacles[name]
    return Choice(name, reason)


def _batch_norm(model: nn.Module) -> str:
    """Say which layer mixes the samples of a batch, "" if none does."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            kind = type(module).__name__
            return f"layer {name!r} ({kind}) would see padding when clients are batched"
    return ""


def check(model: nn.Module) -> None:
    """Refuse models without trainable parameters, or with state that averaging would lose."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise Unsupported(
                f"layer {name!r} ({type(module).__name__}) tracks running statistics, which are "
                "not parameters and would not be averaged: use nn.GroupNorm, or "
                "track_running_stats=False"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise Unsupported("the model has no trainable parameter")


def device_name(name: str) -> str:
    """Return the device to use."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise Unsupported(f"device={name!r}, but PyTorch sees no GPU: choose 'cpu' or 'auto'")
    try:
        torch.device(name)
    except RuntimeError:
        raise Unsupported(f"device={name!r} must be 'cpu', 'cuda' or 'auto'") from None
    return name


class Trainer:
    """Trains many copies of a model at once.

    Parameters
    ----------
    model : nn.Module
        The architecture. Its parameters are read by `flat` and never changed.
    training : Training
    loss : "cross-entropy" or callable
        callable(outputs, y) returns one loss per sample.
    device : str
        "auto" uses a GPU if there is one.
    engine : {"auto", "loop", "stacked", "vmap"}
        One job after the other, or side by side. All give the same result up to rounding, except
        for dropout masks; "auto" takes the fastest.
    max_memory : int, optional
        Bytes for jobs side by side; more train in several groups. By default the size of a CPU's
        cache, or a quarter of a GPU's memory.
    precision : {"float32", "tf32"}
        How products are rounded: "tf32" (GPU only) is faster and less exact.

    Attributes
    ----------
    engine, reason : str
        The engine in use, and which layer or operation prevents a faster one.
    random : bool
        Whether jobs need seeds of their own: any forward may call F.dropout.

    Examples
    --------
    >>> from modelstack import BatchPlan
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> trainer = Trainer(model, Training(batch_size=2), device="cpu")
    >>> data = trainer.data(np.eye(4), np.array([0, 1, 0, 1]))
    >>> job = Job(0, np.arange(3), BatchPlan(3, batch_size=2))
    >>> trainer.train(trainer.flat(), [job], data).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        training: Training | None = None,
        *,
        loss: str | SampleLoss = "cross-entropy",
        device: str = "auto",
        engine: str = "auto",
        max_memory: int | None = None,
        precision: str = "float32",
    ) -> None:
        if max_memory is not None and max_memory < 1:
            raise Unsupported(f"max_memory={max_memory} must be at least 1 byte, or None")
        self.training = Training() if training is None else training
        self.device = torch.device(device_name(device))
        self.precision = check_precision(precision, self.device)
        check(model)
        setup = Setup(model, self.training, sample_loss(loss), self.device, precision)
        self.worker = Worker(setup)
        self._setup = setup._replace(model=self.worker.model)
        self.size = sum(p.numel() for p in self.worker.params)
        self._initial = self.flat(model)
        self._asked = engine
        self.engine, self.reason = choose(engine, model, self.device)
        self._augmented = None if self.training.augment is None else Augmented()
        parts = stacked.stackable(model, self.device) if self.engine == "stacked" else None
        drops = parts is None or any(isinstance(part, nn.Dropout) for _, part in parts)
        self.random = drops or self._augmented is not None
        self.max_memory = max_memory or 2**24
        if max_memory is None and self.device.type != "cpu":
            total = torch.cuda.get_device_properties(self.device).total_memory
            self.max_memory = int(total) // 4
        self._engine = self._make()
        self._probed = self.engine != "vmap"
        self._out = torch.empty(0, self.size, device=self.device)
        self._evaluator: stacked.Stacked | None = None

    def _make(self) -> Loop | Batched:
        if self.engine == "loop":
            return Loop(self.worker, self.training)
        if self.engine == "stacked":
            kind: Any = stacked.Stacked
        else:
            from modelstack.vmapped import Vmapped as kind
        return Batched(kind, self._setup, self.max_memory)

    def _probe(self, data: Data) -> None:
        """Find out once whether torch.func can batch the model."""
        from modelstack.vmapped import obstacle

        self._probed, reason = True, obstacle(self._setup, data)
        if reason and self._asked == "vmap":
            raise Unsupported(f"engine='vmap': {reason}; choose engine='loop'")
        if reason:
            self.engine, self.reason = "loop", reason
            self._engine = self._make()

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

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`, (models, size) or (size,) for one model.

        Returns (jobs, size), which the next call overwrites: reduce or clone it before.
        """
        with self._ready(params, jobs, data) as rows:
            if len(self._out) < len(jobs):
                self._out = rows.new_empty(len(jobs), self.size)
            out = self._out[: len(jobs)]
            if jobs:
                check_plans(jobs, self.training)
                if self._augmented is not None:
                    jobs, data = self._augmented.transform(jobs, data)
                self._engine.train(rows, jobs, data, self.training.lr if lr is None else lr, out)
        return out

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Tensor:
        """Return the gradient of each job's mean loss, (jobs, size), without dropout."""
        with self._ready(params, jobs, data) as rows:
            out = rows.new_empty(len(jobs), self.size)
            if jobs:
                self._engine.gradients(rows, jobs, data, out)
        return out

    def losses(
        self, params: Tensor, jobs: Sequence[Job], data: Data, *, power: float = 1.0
    ) -> Doubles:
        """Return the mean of loss ** power over each job's samples, under its row of `params`."""
        with self._ready(params, jobs, data) as rows:
            return self.worker.mean_losses(rows, jobs, data, power)

    def features(self, params: Tensor, jobs: Sequence[Job], data: Data) -> NDArray[np.float32]:
        """Return the mean output of the first dense layer that runs, for each job's samples."""
        with self._ready(params, jobs, data) as rows:
            return self.worker.mean_features(rows, jobs, data).astype(np.float32)

    def embeddings(self, params: Tensor, positions: Ints, data: Data) -> Tensor:
        """Return that layer's output at each position in `data`, under one flat model."""
        at = torch.from_numpy(np.asarray(positions, np.int64)).to(data.x.device)
        with self._ready(params, (), data) as (row,):
            return self.worker.embeddings(row, at, data)

    def evaluate(self, params: Tensor, data: Data) -> tuple[Doubles, Doubles]:
        """Return accuracy and mean loss of every row of `params`."""
        accuracy, loss = self.scores(params, data).cpu().numpy().T
        return accuracy, loss

    def scores(self, params: Tensor, data: Data) -> Tensor:
        """Do the same without waiting for a GPU: one row (accuracy, loss) per row of `params`."""
        with self._ready(params, (), data) as rows:
            return self.worker.scores(rows, data, self._together(rows))

    def _together(self, rows: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return how all rows are evaluated at once, None if one by one is better."""
        if self.device.type not in TOGETHER or (len(rows) == 1 and not self.worker.images):
            return None
        if self.engine != "stacked":
            if len(rows) == 1:
                return None
            from modelstack.vmapped import forward_rows  # slow to import

            return partial(forward_rows, self.worker.model, rows)
        if self._evaluator is None or self._evaluator.clients != len(rows):
            self._evaluator = stacked.Stacked(self._setup, len(rows), learns=False)
        self._evaluator.load(rows, row_numbers(tuple(range(len(rows))), rows.device))
        return self._evaluator.outputs

    @contextmanager
    def _ready(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Iterator[Tensor]:
        """Check what was given, probe the model, set the precision; the rows of `params`."""
        rows = self._rows(params, jobs)
        self.worker.probe(data)
        if jobs and not self._probed:
            self._probe(data)
        with precision(self.device, self.precision):
            yield rows

    def _rows(self, params: Tensor, jobs: Sequence[Job]) -> Tensor:
        rows = params.detach().unsqueeze(0) if params.dim() == 1 else params.detach()
        if rows.dim() != 2 or rows.shape[1] != self.size:
            raise Unsupported(
                f"params of shape {tuple(params.shape)}: the model has {self.size} parameters"
            )
        models = len(rows)
        for i, job in enumerate(jobs):
            if not 0 <= job.row < models:
                raise Unsupported(f"job {i}: row={job.row}, but there are {models} models")
            if not len(job.positions):
                raise Unsupported(f"job {i} has no samples")
        return rows


def _tensor(values: Any, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values)
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.to(device=device, dtype=kind).contiguous()
