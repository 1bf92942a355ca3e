"""Fine-tune the global model on the data of many clients at once (needs PyTorch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.rounds import ClientId
from fedcohort.simulate.local import Data, Trainer, jobs


def finetune(
    trainer: Trainer,
    model: Tensor,
    parts: Mapping[ClientId, NDArray[np.int64]],
    data: Data,
    *,
    seed: int = 0,
) -> Tensor:
    """Fine-tune a model on each client's data, side by side (paper 0, section 5.4).

    `parts` are the rows of `data` that each client holds, `trainer.local` sets the training, and
    `seed` the batch order, which differs from that of every federated round. Returns a tensor
    (clients, size), in the order of `parts`.

    Examples
    --------
    >>> from fedcohort.simulate.local import LocalTraining
    >>> module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> trainer = Trainer(module, LocalTraining(epochs=5, batch_size=2, lr=0.5), device="cpu")
    >>> data = trainer.data(np.eye(4), np.array([0, 1, 1, 0]))
    >>> parts = {"ann": np.array([0, 1]), "bob": np.array([2, 3])}
    >>> finetune(trainer, trainer.flat(), parts, data).shape
    torch.Size([2, 10])
    """
    work = jobs(trainer, seed, -1, list(parts), list(parts.values()))
    return trainer.train(model, work, data).clone()


def named_arrays(flat: Tensor, module: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a flat model as the arrays that a registry stores, named as in the module."""
    parameters = dict(module.named_parameters())
    parts = torch.split(flat.detach().cpu(), [like.numel() for like in parameters.values()])
    pairs = zip(parameters.items(), parts, strict=True)
    return {name: part.view(like.shape).numpy() for (name, like), part in pairs}
