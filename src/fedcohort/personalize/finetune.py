"""Fine-tune the global model on the data of many clients at once (needs PyTorch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId
from fedcohort.simulate.local import Data, Trainer, jobs

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def finetune(
    trainer: Trainer,
    model: Tensor,
    parts: Mapping[ClientId, Rows],
    data: Data,
    *,
    seed: int = 0,
) -> Tensor:
    """Fine-tune a model on each client's data, side by side (paper 0, section 5.4).

    Parameters
    ----------
    trainer : Trainer
        Its `local` sets the epochs, the optimizer and the learning rate.
    model : Tensor (size,)
        The global model.
    parts : mapping of str to int array
        The rows of `data` that each client holds.
    data : Data
        On the trainer's device.
    seed : int
        Seed of the batch order, which differs from that of every federated round.

    Returns
    -------
    Tensor (clients, size)
        In the order of `parts`.

    Examples
    --------
    >>> from fedcohort.simulate.local import LocalTraining
    >>> module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> trainer = Trainer(module, LocalTraining(epochs=5, batch_size=2, lr=0.5), device="cpu")
    >>> data = trainer.data(np.eye(4), np.array([0, 1, 1, 0]))
    >>> parts = {"ann": np.array([0, 1]), "bob": np.array([2, 3])}
    >>> personal = finetune(trainer, trainer.flat(), parts, data)
    >>> accuracies(trainer, personal, list(parts.values()), data).diagonal().tolist()
    [1.0, 1.0]
    """
    if model.dim() != 1:
        raise ConfigError(f"finetune: a model of shape {tuple(model.shape)} is not one flat model")
    work = jobs(trainer, seed, -1, list(parts), list(parts.values()))
    return trainer.train(model, work, data).clone()


def accuracies(trainer: Trainer, models: Tensor, parts: Sequence[Rows], data: Data) -> Floats:
    """Return the accuracy of every model on every client's rows of `data`, (models, clients).

    Each model classifies each row once, even when several clients share it.
    """
    rows, place = np.unique(np.concatenate(parts), return_inverse=True)
    sizes = np.array([len(part) for part in parts])
    if not sizes.all():
        raise ConfigError(f"accuracies: client {int(np.argmin(sizes))} has no samples")
    hits = trainer.hits_of_each(models, [rows] * len(models), data).reshape(-1, len(rows))
    first = np.cumsum(sizes) - sizes
    return np.array([np.add.reduceat(right[place], first, dtype=float) / sizes for right in hits])


def own_accuracies(trainer: Trainer, models: Tensor, parts: Sequence[Rows], data: Data) -> Floats:
    """Return the accuracy of model i on the rows of client i."""
    hits = trainer.hits_of_each(models, parts, data)
    ends = np.cumsum([len(part) for part in parts])
    return np.array([own.mean() for own in np.split(hits, ends[:-1])])


def mixed(models: Tensor, weights: ArrayLike) -> Tensor:
    """Average models with weights that sum to one: (answers, clients) @ (clients, size)."""
    share = torch.as_tensor(np.atleast_2d(np.asarray(weights, np.float32)), device=models.device)
    return share @ models


def named_arrays(flat: Tensor, module: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a flat model as the arrays that a registry stores, named as in the module.

    Examples
    --------
    >>> named_arrays(torch.arange(3.0), nn.Linear(2, 1))
    {'weight': array([[0., 1.]], dtype=float32), 'bias': array([2.], dtype=float32)}
    """
    values = flat.detach().cpu().numpy()
    out, end = {}, 0
    for name, parameter in module.named_parameters():
        start, end = end, end + parameter.numel()
        out[name] = values[start:end].reshape(tuple(parameter.shape))
    return out
