"""Projections of models that live on a GPU, without moving the models."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcohort.signals.projection import Projection

MOST_BYTES = 2**30
BLOCK = 65536


def project(projection: Projection, models: Tensor) -> NDArray[np.float64]:
    """Project the rows of `models`, (m, dim).

    On a GPU whose memory can hold it, the matrix is kept there in float32 and reused; elsewhere
    the projection's own loops, which store no matrix, are faster than moving it about.
    """
    small = 4 * projection.k * projection.dim <= MOST_BYTES
    if models.device.type == "cpu" or not small:
        return projection.apply(models.cpu().numpy())
    matrix = _matrix(projection, str(models.device))
    return (models @ matrix.T).double().cpu().numpy()


@lru_cache(maxsize=4)
def _matrix(projection: Projection, device: str) -> Tensor:
    matrix = torch.empty(projection.k, projection.dim, device=device)
    for start in range(0, projection.dim, BLOCK):
        stop = min(start + BLOCK, projection.dim)
        columns = projection.columns(start, stop).astype(np.float32)
        matrix[:, start:stop] = torch.from_numpy(columns)
    return matrix
