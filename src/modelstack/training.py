"""How a copy of the model trains: its settings, its batches, its learning rates (no PyTorch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Unsupported(ValueError):
    """A model, a device or an option that cannot be used; it names the culprit and the remedy."""


@dataclass(frozen=True)
class Training:
    """How each copy of a model trains on its own data.

    Parameters
    ----------
    epochs, steps : int
        Passes over the data, shuffled anew for each, or a number of optimizer steps instead.
    batch_size : int
        The last batch of a pass is smaller if the data do not divide evenly.
    optimizer : {"sgd", "adam"}
        Starts anew in each call.
    lr : float
        Learning rate.
    momentum : float
        Of SGD.
    betas, eps : float
        Of Adam.
    weight_decay : float
        Factor of the L2 term that is added to the gradient.
    prox_mu : float
        FedProx: mu * (w - w_start) is added to the gradient.
    epoch_decay : float
        `lr` is multiplied by it after every pass.
    augment : {"crop-flip"}, optional
        Images are shifted by up to four pixels, and half of them mirrored, anew in each call.

    Examples
    --------
    >>> Training(batch_size=0)
    Traceback (most recent call last):
    modelstack.training.Unsupported: Training: batch_size=0 must be at least 1
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    prox_mu: float = 0.0
    epoch_decay: float = 1.0
    augment: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        rules = (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("steps", self.steps is None or self.steps >= 1, "at least 1, or None"),
            ("optimizer", self.optimizer in ("sgd", "adam"), "'sgd' or 'adam'"),
            ("lr", 0 < self.lr < math.inf, "above 0"),
            ("eps", 0 < self.eps < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("prox_mu", 0 <= self.prox_mu < math.inf, "at least 0"),
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("momentum", self.optimizer == "sgd" or not self.momentum, "0 with Adam (see betas)"),
            (
                "betas",
                len(self.betas) == 2 and 0 <= min(self.betas) <= max(self.betas) < 1,
                "two numbers in [0, 1)",
            ),
            ("epoch_decay", 0 < self.epoch_decay <= 1, "in (0, 1]"),
            ("augment", self.augment in (None, "crop-flip"), "'crop-flip', or None"),
        )
        for field, holds, rule in rules:
            if not holds:
                value = getattr(self, field)
                raise Unsupported(f"{type(self).__name__}: {field}={value!r} must be {rule}")

    def rates(self, step: int) -> tuple[float, float]:
        """Return the factor of the learning rate and the epsilon at a step counted from 0.

        They contain Adam's two bias corrections: with r = sqrt(1-b2^t),
        (m/(1-b1^t)) / (sqrt(v)/r + eps) = [r/(1-b1^t)] m / (sqrt(v) + eps r).
        """
        if self.optimizer != "adam":
            return 1.0, 0.0
        beta1, beta2 = self.betas
        root = math.sqrt(1 - beta2 ** (step + 1))
        return root / (1 - beta1 ** (step + 1)), self.eps * root


class BatchPlan(NamedTuple):
    """The batches of one job: batch t is `order[bounds[t]:bounds[t + 1]]`.

    There are `passes` over `n` samples, or so many `steps`. `shuffle` returns a new generator whose
    permutations order the passes; None keeps the order. Nothing is drawn before it is asked for.
    """

    n: int
    batch_size: int
    passes: int = 1
    steps: int | None = None
    shuffle: Callable[[], Generator] | None = None

    @property
    def length(self) -> int:
        """The number of batches."""
        return -(-self.n // self.batch_size) * self.passes if self.steps is None else self.steps

    @property
    def bounds(self) -> Ints:
        """Where each batch begins and ends in `order`."""
        return cuts((self.n,), self.batch_size, self.passes, self.steps)[0][:, 0]

    @property
    def epochs(self) -> Ints:
        """The pass that each batch belongs to."""
        return cuts((self.n,), self.batch_size, self.passes, self.steps)[1][:, 0]

    @property
    def order(self) -> Ints:
        """The samples of all batches, numbered from 0, one batch after the other."""
        draw = self.drawing()
        passes, samples = int(self.epochs[-1]) + 1, int(self.bounds[-1])
        return np.concatenate([draw() for _ in range(passes)])[:samples]

    def drawing(self) -> Callable[[], Ints]:
        """Return a function that gives the order of the first pass, of the second, and so on."""
        if self.shuffle is None:
            return lambda: np.arange(self.n)
        rng = self.shuffle()
        return lambda: rng.permutation(self.n)

    def batches(self) -> list[Ints]:
        """Return the batches one by one."""
        order = self.order
        return [order[a:b] for a, b in pairwise(self.bounds.tolist())]


def cuts(
    sizes: Sequence[int], batch_size: int, passes: int, steps: int | None
) -> tuple[Ints, Ints]:
    """Return where batches of each size begin, (steps + 1, sizes), and their pass, (steps, sizes).

    After the last batch of a size, its end is repeated.
    """
    n = np.array(sizes)
    per_pass = -(-n // batch_size)
    total = passes * per_pass if steps is None else np.full_like(n, steps)
    step = np.minimum(np.arange(total.max() + 1)[:, None], total)
    which, batch = np.divmod(step, per_pass)
    return which * n + batch * batch_size, which[:-1]
