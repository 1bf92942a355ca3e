"""Local training: what a client does with the model it receives.

`LocalTraining` holds the settings: epochs, batch size, optimizer, learning rate. `batch_plan` draws
the batches; their order depends only on (seed, round, client), so every engine, and a real client
elsewhere, trains on the same batches. `rates` are the factors of the learning rate per step.

Nothing here needs PyTorch, so settings can be read and checked without loading it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import ClientId, generator, stream_keys

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate per round.

    Parameters
    ----------
    gamma : float
        The factor is multiplied by gamma every round, or at every milestone if there are any.
    milestones : tuple of int
        Round numbers; the first round is 0.

    Examples
    --------
    >>> halve = Schedule(0.5, (150, 300))
    >>> halve(149), halve(150), halve(300)
    (1.0, 0.5, 0.25)
    >>> Schedule(0.5)(3)
    0.125
    """

    gamma: float = 1.0
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(0 < self.gamma <= 1, "Schedule", "gamma", self.gamma, "in (0, 1]")
        rising = list(self.milestones) == sorted(set(self.milestones))
        _require(rising, "Schedule", "milestones", self.milestones, "strictly rising")

    def __call__(self, round_number: int) -> float:
        """Return the factor of a round."""
        if not self.milestones:
            return self.gamma**round_number
        return self.gamma ** sum(round_number >= m for m in self.milestones)


@dataclass(frozen=True)
class LocalTraining:
    """How a selected client trains.

    Parameters
    ----------
    epochs : int
        Passes over the client's data.
    steps : int, optional
        Optimizer steps per round, instead of `epochs`. Batches run through the shuffled data, which
        is shuffled again after each pass.
    batch_size : int
        The last batch of a pass is smaller if the data do not divide evenly.
    optimizer : {"sgd", "adam"}
        Restarted every round.
    lr : float
        Learning rate.
    momentum : float
        Momentum of SGD.
    weight_decay : float
        Factor of the L2 term that is added to the gradient.
    betas, eps : tuple of float, float
        Parameters of Adam.
    prox_mu : float
        FedProx: mu * (w - w_global) is added to the gradient.
    schedule : callable, optional
        Round number -> factor of `lr`, for example a `Schedule`; in TOML a table with its
        `gamma` and `milestones`.
    epoch_decay : float
        `lr` is multiplied by it after every local epoch. The next round begins again with `lr`
        times the factor of its `schedule`.
    augment : {"crop-flip"}, optional
        Images are shifted by up to four pixels, and half of them mirrored; drawn again in
        every round.

    Examples
    --------
    >>> LocalTraining(epochs=3, lr=0.005, schedule=Schedule(0.5, (150, 300))).lr_at(150)
    0.0025
    >>> LocalTraining(batch_size=0)
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.ConfigError: LocalTraining: batch_size=0 must be at least 1
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
    schedule: Callable[[int], float] | None = None
    epoch_decay: float = 1.0
    augment: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for field in ("epochs", "batch_size"):
            self._check(field, getattr(self, field) >= 1, "at least 1")
        self._check("steps", self.steps is None or self.steps >= 1, "at least 1, or None")
        self._check("optimizer", self.optimizer in ("sgd", "adam"), "'sgd' or 'adam'")
        for field in ("lr", "eps"):
            value = getattr(self, field)
            self._check(field, math.isfinite(value) and value > 0, "above 0")
        for field in ("weight_decay", "prox_mu"):
            value = getattr(self, field)
            self._check(field, math.isfinite(value) and value >= 0, "at least 0")
        self._check("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        plain = self.optimizer == "sgd" or self.momentum == 0
        self._check("momentum", plain, "0 with Adam, which has betas")
        in_range = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._check("betas", in_range, "two numbers in [0, 1)")
        self._check("epoch_decay", 0 < self.epoch_decay <= 1, "in (0, 1]")
        self._check("augment", self.augment in (None, "crop-flip"), "'crop-flip', or None")

    def _check(self, field: str, holds: bool, rule: str) -> None:
        _require(holds, "LocalTraining", field, getattr(self, field), rule)

    def lr_at(self, round_number: int) -> float:
        """Return the learning rate of a round's first epoch."""
        return self.lr * (1.0 if self.schedule is None else self.schedule(round_number))


def _require(holds: bool, owner: str, field: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{owner}: {field}={value!r} must be {rule}")


class BatchPlan(NamedTuple):
    """The batches of one client in one round: batch t is `order[bounds[t]:bounds[t + 1]]`.

    Nothing is drawn before it is asked for; `engine.jobs` draws the batches of many plans at once.

    Parameters
    ----------
    n, batch_size : int
        The client's number of samples, and the samples per batch.
    passes : int
        Passes over the samples, unless `steps` is given.
    steps : int, optional
        The number of batches.
    key : bytes, optional
        Of the stream that shuffles each pass (see `rounds.generator`); None keeps the order of the
        samples.
    """

    n: int
    batch_size: int
    passes: int = 1
    steps: int | None = None
    key: bytes | None = None

    @property
    def length(self) -> int:
        """The number of batches."""
        return -(-self.n // self.batch_size) * self.passes if self.steps is None else self.steps

    @property
    def bounds(self) -> Ints:
        """Where each batch begins and ends in `order`."""
        return _cuts(self.n, self.batch_size, self.passes, self.steps)[0]

    @property
    def epochs(self) -> Ints:
        """The pass that each batch belongs to."""
        return _cuts(self.n, self.batch_size, self.passes, self.steps)[1]

    @property
    def order(self) -> Ints:
        """The samples of all batches, numbered from 0, one batch after the other."""
        passes, samples = int(self.epochs[-1]) + 1, int(self.bounds[-1])
        if self.key is None:
            return np.tile(np.arange(self.n), passes)[:samples]
        rng = generator(self.key)
        return np.concatenate([rng.permutation(self.n) for _ in range(passes)])[:samples]

    def batches(self) -> list[Ints]:
        """Return the batches one by one."""
        order = self.order
        return [order[a:b] for a, b in pairwise(self.bounds.tolist())]


@lru_cache(maxsize=65536)
def _cuts(n: int, batch_size: int, passes: int, steps: int | None) -> tuple[Ints, Ints]:
    """Return bounds and epochs, which depend only on the sizes."""
    per_pass = -(-n // batch_size)
    total = passes * per_pass if steps is None else steps
    step = np.arange(total)
    starts = step // per_pass * n + step % per_pass * batch_size
    last = total // per_pass * n + total % per_pass * batch_size
    bounds = np.append(starts, last)
    bounds.flags.writeable = False
    which = step // per_pass
    which.flags.writeable = False
    return bounds, which


def batch_plan(
    seed: int, round_number: int, client: ClientId, n: int, local: LocalTraining
) -> BatchPlan:
    """Return the batches of one round for a client with n samples.

    Examples
    --------
    >>> plan = batch_plan(0, 3, "ann", 5, LocalTraining(epochs=2, batch_size=2))
    >>> [len(batch) for batch in plan.batches()], plan.epochs.tolist()
    ([2, 2, 1, 2, 2, 1], [0, 0, 0, 1, 1, 1])
    """
    return batch_plans(seed, round_number, [client], [n], local)[0]


def batch_plans(
    seed: int,
    round_number: int,
    clients: Sequence[ClientId],
    sizes: Sequence[int],
    local: LocalTraining,
) -> list[BatchPlan]:
    """Return the batches of one round for several clients; see `batch_plan`."""
    for client, n in zip(clients, sizes, strict=True):
        if n < 1:
            raise ConfigError(f"client {client!r} has {n} samples: it cannot train")
    size, epochs, steps = local.batch_size, local.epochs, local.steps
    # Where every batch holds all samples, nothing is shuffled.
    shuffled = [client for client, n in zip(clients, sizes, strict=True) if n > size]
    keys = iter(stream_keys(seed, "batches", round_number, ends=shuffled))
    return [BatchPlan(n, size, epochs, steps, next(keys) if n > size else None) for n in sizes]


def rates(local: LocalTraining, step: int) -> tuple[float, float]:
    """Return the factor of the learning rate and the epsilon at a step counted from 0.

    They contain Adam's two bias corrections:
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
