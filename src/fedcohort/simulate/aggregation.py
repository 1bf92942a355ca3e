"""Turn trained models into the next global model: FedAvg and server optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcohort.options import Configurable, Positive, ShareBelowOne


@lru_cache(maxsize=64)
def _factor(
    shares: tuple[float, ...], normalized: bool, device: torch.device
) -> tuple[Tensor, float]:
    """Return the clients' weights, often those of an earlier round, on a device; and their sum."""
    share = np.array(shares, np.float64)
    share = share / share.sum() if normalized else share
    return torch.as_tensor(share, dtype=torch.float32, device=device), float(share.sum())


class Mean(Configurable):
    """FedAvg with equal weights: the mean of the trained models.

    Other aggregations derive from it. A server optimizer defines `advance`, which takes the mean
    step, and `kept`, the names of the tensors that it remembers; a robust mean defines `step`.
    """

    weighted = False
    kept: tuple[str, ...] = ()

    def step(
        self,
        current: Tensor,
        updates: Tensor,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Return the next global model from trained ones, one row per client.

        Sizes are normalized to a sum of one. `weights` of a policy are used as they are:
        inverse-inclusion weights need not sum to one. `Mean` takes a leading axis of federations.
        """
        equal = [1.0] * updates.shape[-2]
        given = weights if weights is not None else sizes if self.weighted else equal
        factor, total = _factor(tuple(map(float, given)), weights is None, updates.device)
        # sum w_i (x_i - c) without a (clients x parameters) temporary.
        step = factor @ updates - total * current
        for name in self.kept:
            if getattr(self, name) is not None:  # a checkpoint's lies in main memory
                setattr(self, name, getattr(self, name).to(step.device))
        return current + self.advance(step)

    def advance(self, step: Tensor) -> Tensor:
        """Return how the global model moves, given the clients' mean step."""
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between rounds."""
        tensors = ((name, getattr(self, name)) for name in self.kept)
        return {name: None if t is None else t.cpu().numpy() for name, t in tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.kept:
            array = state[name]
            setattr(self, name, None if array is None else torch.from_numpy(array.copy()))


class WeightedMean(Mean):
    """FedAvg of McMahan et al. (2017): the mean, weighted by the number of examples."""

    weighted = True


class FedAvgM(WeightedMean):
    """FedAvg with server momentum (Hsu, Qi, Brown 2019); `lr` is the server's rate."""

    kept = ("velocity",)

    def __init__(self, lr: Positive = 1.0, momentum: ShareBelowOne = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: Tensor | None = None

    def advance(self, step: Tensor) -> Tensor:
        self.velocity = step if self.velocity is None else self.momentum * self.velocity + step
        return self.lr * self.velocity


class FedAdam(WeightedMean):
    """Adam at the server (Reddi et al. 2021, Algorithm 2, without bias correction as printed).

    `lr` is the server's rate, `tau` the degree of adaptivity.
    """

    kept = ("first", "second")

    def __init__(
        self,
        lr: Positive = 0.01,
        betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99),
        tau: Positive = 1e-3,
    ) -> None:
        self.lr, self.betas, self.tau = lr, tuple(betas), tau
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    def advance(self, step: Tensor) -> Tensor:
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(step), torch.full_like(step, self.tau**2)
        self.first = self.betas[0] * self.first + (1 - self.betas[0]) * step
        self.second = self.betas[1] * self.second + (1 - self.betas[1]) * step.square()
        return self.lr * self.first / (self.second.sqrt() + self.tau)


AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "mean": Mean,
    "size-weighted": WeightedMean,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
}
