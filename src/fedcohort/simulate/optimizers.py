"""SGD and Adam on lists of tensors, in place.

Written out here because torch.optim costs a second of imports at its first use, and because stacked
clients need a learning rate each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedcohort.simulate.local import LocalTraining


class Optimizer:
    """One optimizer of one client, or of stacked clients whose first axis is the client.

    Gradients are gathered in `targets`, which become `beta * target + alpha * gradient`; then
    `update` moves the parameters. For plain SGD the parameters are the targets themselves: the
    caller multiplies the gradient by the learning rate and nothing is left to update.

    Parameters
    ----------
    local : LocalTraining
    params : sequence of Tensor
        Changed in place.
    """

    def __init__(self, local: LocalTraining, params: Sequence[Tensor]) -> None:
        self.local, self.params = local, list(params)
        self.adam = local.optimizer == "adam"
        self.direct = not (self.adam or local.momentum or local.weight_decay or local.prox_mu)
        empty = [] if self.direct else [torch.zeros_like(p) for p in self.params]
        self.targets = self.params if self.direct else empty
        self.first = [torch.zeros_like(p) for p in empty] if self.adam else []
        self.second = [torch.zeros_like(p) for p in empty] if self.adam else []
        self.start = [torch.empty_like(p) for p in empty] if local.prox_mu else []
        self.beta = 1.0 if self.direct else local.momentum
        self.alpha = -1.0 if self.direct else 1.0

    @property
    def copies(self) -> int:
        """How many numbers are kept for each parameter."""
        return 1 + sum(map(bool, (not self.direct, self.first, self.second, self.start)))

    def restart(self) -> None:
        """Forget the last round; the present parameters are the global model."""
        for group in ([] if self.direct else self.targets), self.first, self.second:
            for tensor in group:
                tensor.zero_()
        for anchor, param in zip(self.start, self.params, strict=False):
            anchor.copy_(param)

    def add(self, grads: Sequence[Tensor], scale: float = 1.0, active: int | None = None) -> None:
        """Gather gradients that were computed elsewhere, times `scale`."""
        targets = _heads(self.targets, active)
        if self.beta != 1.0:
            torch._foreach_mul_(targets, self.beta)
        torch._foreach_add_(targets, list(grads), alpha=self.alpha * scale)

    def update(self, rate: Tensor | float, eps: Tensor | float, active: int | None = None) -> None:
        """Move the (first `active`) clients by the gathered gradients.

        `rate` and `eps` are what `rates` returned for the step.
        """
        if self.direct:
            return
        params, grads = _heads(self.params, active), _heads(self.targets, active)
        if self.local.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.local.weight_decay)
        if self.local.prox_mu:
            torch._foreach_add_(grads, params, alpha=self.local.prox_mu)
            torch._foreach_sub_(grads, _heads(self.start, active), alpha=self.local.prox_mu)
        if self.adam:
            grads = self._adam(grads, eps, active)
        for param, grad in zip(params, grads, strict=True):
            if isinstance(rate, float):
                param.sub_(grad, alpha=rate)
            else:
                param.addcmul_(grad, rate.view(-1, *[1] * (param.dim() - 1)), value=-1.0)

    def _adam(self, grads: list[Tensor], eps: Tensor | float, active: int | None) -> list[Tensor]:
        beta1, beta2 = self.local.betas
        first, second = _heads(self.first, active), _heads(self.second, active)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        return [m.div(v.sqrt().add_(eps)) for m, v in zip(first, second, strict=True)]


def _heads(tensors: list[Tensor], active: int | None) -> list[Tensor]:
    return tensors if active is None else [tensor[:active] for tensor in tensors]


def rates(local: LocalTraining, step: int) -> tuple[float, float]:
    """Return the factor of the learning rate and the epsilon at a step counted from 0.

    Adam's two bias corrections, moved out of the tensors:
    with r = sqrt(1-b2^t), (m/(1-b1^t)) / (sqrt(v)/r + eps) = [r/(1-b1^t)] m / (sqrt(v) + eps r).

    Examples
    --------
    >>> rates(LocalTraining(), 0)
    (1.0, 0.0)
    """
    if local.optimizer != "adam":
        return 1.0, 0.0
    beta1, beta2 = local.betas
    root = math.sqrt(1 - beta2 ** (step + 1))
    return root / (1 - beta1 ** (step + 1)), local.eps * root
