"""Local training: what a client does with the model it receives, on which batches.

The order of the batches depends only on (seed, round, client): every engine, and a real client
elsewhere, trains on the same. This module is also the one door to `modelstack`; names that need
PyTorch are loaded on first use, so that settings can be checked without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import modelstack
from fedcohort.exceptions import ConfigError
from fedcohort.options import Range, check_fields
from fedcohort.rounds import ClientId, generator, stream, stream_keys
from modelstack import BatchPlan, Ints, Training, Unsupported

if TYPE_CHECKING:
    from modelstack import Data as Data
    from modelstack import Job as Job
    from modelstack import Trainer as Trainer
    from modelstack import by_length as by_length
    from modelstack import device_name as device_name
    from modelstack import first_dense as first_dense
    from modelstack import seeded as seeded


def __getattr__(name: str) -> Any:
    return getattr(modelstack, name)


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn what `modelstack` refuses into a ConfigError."""
    try:
        yield
    except Unsupported as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate, by the number of rounds before.

    It is multiplied by `gamma` every round, or after each number of rounds in `milestones`.

    Examples
    --------
    >>> halve = Schedule(0.5, (150, 300))
    >>> halve(149), halve(150), halve(300)
    (1.0, 0.5, 0.25)
    """

    gamma: Annotated[float, Range(0, 1, above=True)] = 1.0
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "Schedule")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"Schedule: milestones={self.milestones} must be strictly rising")

    def __call__(self, round_number: int) -> float:
        """Return the factor of a round."""
        if not self.milestones:
            return self.gamma**round_number
        return self.gamma ** sum(round_number >= m for m in self.milestones)


@dataclass(frozen=True)
class LocalTraining(Training):
    """How a selected client trains; the optimizer starts again in every round.

    Parameters
    ----------
    epochs, steps, batch_size, optimizer, momentum, betas, eps, weight_decay, prox_mu, augment
        As in `modelstack.Training`.
    lr : float
        The learning rate.
    epoch_decay : float
        `lr` is multiplied by it after every local epoch. The next round begins again with `lr`
        times the factor of its `schedule`.
    schedule : callable, optional
        Round number -> factor of `lr`, for example a `Schedule`; in TOML a table with its
        `gamma` and `milestones`.

    Examples
    --------
    >>> LocalTraining(epochs=3, lr=0.005, schedule=Schedule(0.5, (150, 300))).lr_at(150)
    0.0025
    """

    schedule: Callable[[int], float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        with config_errors():
            super().__post_init__()

    def lr_at(self, round_number: int) -> float:
        """Return the learning rate of a round's first epoch."""
        return self.lr * (1.0 if self.schedule is None else self.schedule(round_number))


def batch_plans(
    seed: int, round_number: int, clients: Sequence[ClientId], sizes: Sequence[int], local: Training
) -> list[BatchPlan]:
    """Return the batches of one round for several clients."""
    for client, n in zip(clients, sizes, strict=True):
        if n < 1:
            raise ConfigError(f"client {client!r} has {n} samples: it cannot train")
    size, epochs, steps = local.batch_size, local.epochs, local.steps
    # Where every batch holds all samples, nothing is shuffled.
    shuffled = [client for client, n in zip(clients, sizes, strict=True) if n > size]
    keys = iter(stream_keys(seed, "batches", round_number, ends=shuffled))
    return [
        BatchPlan(n, size, epochs, steps, partial(generator, next(keys)) if n > size else None)
        for n in sizes
    ]


def jobs(
    trainer: Trainer,
    seed: int,
    round_number: int,
    clients: Sequence[ClientId],
    parts: Sequence[Ints],
    rows: Sequence[int] | None = None,
) -> list[Job]:
    """Return what clients train in a round: their parts, in batches, from the models of `rows`."""
    from modelstack import Job

    plans = batch_plans(seed, round_number, clients, [len(p) for p in parts], trainer.training)
    masks = [_mask_seed(seed, round_number, c) if trainer.random else 0 for c in clients]
    augment = trainer.training.augment is not None
    starts = [0] * len(clients) if rows is None else rows
    return [
        Job(row, part, plan, mask, partial(stream, mask, "augment") if augment else None)
        for row, part, plan, mask in zip(starts, parts, plans, masks, strict=True)
    ]


def lr_at(trainer: Trainer, round_number: int) -> float:
    """Return the learning rate with which a trainer's clients begin a round."""
    local = trainer.training
    return local.lr_at(round_number) if isinstance(local, LocalTraining) else local.lr


def _mask_seed(seed: int, round_number: int, client: ClientId) -> int:
    text = f"dropout/{seed}/{round_number}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")
