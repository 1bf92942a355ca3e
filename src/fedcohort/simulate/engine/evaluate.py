"""Forward passes: accuracy, losses by client, and features by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.engine.jobs import Data, Job
from fedcohort.simulate.engine.worker import Worker

Doubles = NDArray[np.float64]


def accuracy_and_loss(worker: Worker, params: Tensor, data: Data) -> tuple[Doubles, Doubles]:
    """Return test accuracy and mean loss of every row of `params`.

    Accuracy is NaN where labels are not whole numbers. A single output is a logit: class 1 above 0.
    """
    worker.model.eval()
    totals = torch.zeros(len(params), 2, dtype=torch.float64, device=worker.device)
    with torch.no_grad():
        if len(params) > 1 and worker.device.type == "cuda":
            _add_together(worker, params, data, totals)
        else:
            _add_one_by_one(worker, params, data, totals)
    accuracy, loss = (totals / len(data.y)).cpu().numpy().T
    return accuracy, loss


def _add_one_by_one(worker: Worker, params: Tensor, data: Data, totals: Tensor) -> None:
    for row, total in zip(params, totals, strict=True):
        worker.write(row)
        for x, y in worker.chunks(data, None):
            outputs = worker.forward(x)
            total[0] += _hits(outputs, y)
            total[1] += worker.loss(outputs, y).sum(dtype=torch.float64)


def _add_together(worker: Worker, params: Tensor, data: Data, totals: Tensor) -> None:
    """Evaluate all rows side by side: on a GPU a row alone leaves it idle."""
    from fedcohort.simulate.engine.vmapped import forward_rows  # torch.func costs time to import

    for x, y in worker.chunks(data, None):
        outputs = forward_rows(worker.model, params, x)
        losses = worker.loss(outputs.flatten(0, 1), y.repeat(len(params)))
        totals[:, 0] += torch.stack([torch.as_tensor(_hits(o, y)) for o in outputs])
        totals[:, 1] += losses.view(len(params), -1).sum(dim=1, dtype=torch.float64)


def _hits(outputs: Tensor, y: Tensor) -> Tensor | float:
    if y.is_floating_point():
        return float("nan")
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return ((outputs.flatten() > 0) == y.flatten()).sum()
    return (outputs.argmax(1) == y).sum()


def mean_losses(worker: Worker, params: Tensor, jobs: Sequence[Job], data: Data) -> Doubles:
    """Return the mean loss of each job's samples under its row of `params`."""
    return _means(worker, params, jobs, data, lambda x, y: worker.loss(worker.forward(x), y))


def mean_features(worker: Worker, params: Tensor, jobs: Sequence[Job], data: Data) -> Doubles:
    """Return the mean output, before the activation, of `feature_layer` for each job's samples."""
    seen: list[Tensor] = []
    layer = feature_layer(worker.model)
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))

    def feature(x: Tensor, y: Tensor) -> Tensor:
        worker.forward(x)
        return seen.pop().clone()

    try:
        return _means(worker, params, jobs, data, feature)
    finally:
        hook.remove()


def feature_layer(model: nn.Module) -> nn.Module:
    """Return the layer named `fc1`, else the first `nn.Linear`.

    Examples
    --------
    >>> feature_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    Linear(in_features=4, out_features=3, bias=True)
    """
    named: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in named.items():
        if name.rpartition(".")[2] == "fc1":
            return module
    for module in named.values():
        if isinstance(module, nn.Linear):
            return module
    raise ConfigError("the model has no nn.Linear: name the layer whose output is wanted `fc1`")


def _means(
    worker: Worker,
    params: Tensor,
    jobs: Sequence[Job],
    data: Data,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Doubles:
    """Average what `measure` returns for each sample over the samples of each job.

    The jobs of one row are measured together, cut into chunks without regard to who owns what.
    """
    worker.model.eval()
    result: list[Doubles] = [np.empty(0)] * len(jobs)
    with torch.no_grad():
        for row in sorted({job.row for job in jobs}):
            mine = [i for i, job in enumerate(jobs) if job.row == row]
            worker.write(params[row])
            sizes = np.array([len(jobs[i].positions) for i in mine])
            positions = np.concatenate([jobs[i].positions for i in mine])
            at = torch.from_numpy(positions).to(worker.device)
            parts = [measure(x, y).double() for x, y in worker.chunks(data, at)]
            sums = np.add.reduceat(torch.cat(parts).cpu().numpy(), np.cumsum(sizes) - sizes)
            for i, total, size in zip(mine, sums, sizes, strict=True):
                result[i] = total / size
    return np.array(result)
