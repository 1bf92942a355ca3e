"""Personal models from the global one, for many clients at once (needs PyTorch)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId
from fedcohort.simulate.jobs import Data
from fedcohort.simulate.trainer import Trainer

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
        Its `local` says how long, with which optimizer and learning rate.
    model : Tensor (size,)
        The global model.
    parts : mapping of str to int array
        The clients' rows of `data`.
    data : Data
        On the trainer's device.
    seed : int
        Of the order of batches, which differs from that of any federated round.

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
    jobs = [trainer.job(seed, -1, client, rows) for client, rows in parts.items()]
    return trainer.train(model, jobs, data).clone()


def accuracies(trainer: Trainer, models: Tensor, parts: Sequence[Rows], data: Data) -> Floats:
    """Accuracy of every model on every client's rows of `data`, (models, clients).

    Each model looks at each row once, however many clients share it.
    """
    rows, place = np.unique(np.concatenate(parts), return_inverse=True)
    at = torch.from_numpy(rows).to(trainer.device)
    sizes = np.array([len(part) for part in parts])
    if not sizes.all():
        raise ConfigError(f"accuracies: client {int(np.argmin(sizes))} has no test samples")
    out = np.empty((len(models), len(parts)))
    for i, hits in enumerate(_hits(trainer, models, at, data)):
        out[i] = np.add.reduceat(hits[place].astype(float), np.cumsum(sizes) - sizes) / sizes
    return out


def _hits(trainer: Trainer, models: Tensor, at: Tensor, data: Data) -> Iterable[NDArray[np.bool_]]:
    worker = trainer.worker
    worker.model.eval()
    with torch.no_grad():
        for model in models:
            worker.write(model)
            parts = [worker.forward(x).argmax(1) == y for x, y in worker.chunks(data, at)]
            yield torch.cat(parts).cpu().numpy()


def mixed(models: Tensor, weights: ArrayLike) -> Tensor:
    """Average models by weights that sum to one: (answers, clients) @ (clients, size)."""
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
