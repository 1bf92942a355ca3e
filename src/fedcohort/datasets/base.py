"""The shape that every data set comes in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError

Array: TypeAlias = NDArray[Any]

#: Mean and standard deviation of the training pixels, as published or as in the README of the data.
CONSTANTS: dict[str, tuple[Any, Any]] = {
    "digits": (0.3056, 0.3763),
    "mnist": (0.1307, 0.3081),
    "fashion-mnist": (0.2860, 0.3530),
    "femnist": (0.9615, 0.1642),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
Pixels: TypeAlias = Literal["float32", "uint8"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, labels and, where the data brings them along, clients.

    Parameters
    ----------
    name : str
    x, x_test : array (samples, ...)
        Images are float32 in [0, 1] of shape (samples, channels, height, width), tables float32 of
        shape (samples, features), texts integer tokens of shape (samples, window).
    y, y_test : int64 array (samples,)
        Labels from 0 to classes - 1.
    classes : int
    client_ids, test_client_ids : array of str (samples,), optional
        The natural client of each sample; None if the data has none.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 1])
    >>> Dataset("toy", x, y, x[:1], y[:1], classes=2)
    Dataset('toy', 3 + 1 samples of shape (2,), 2 classes)
    """

    name: str
    x: Array
    y: NDArray[np.int64]
    x_test: Array
    y_test: NDArray[np.int64]
    classes: int
    client_ids: Array | None = None
    test_client_ids: Array | None = None

    def __post_init__(self) -> None:
        self._check_part("", self.x, self.y, self.client_ids)
        self._check_part("_test", self.x_test, self.y_test, self.test_client_ids)
        if len(self.y) == 0:
            raise DataError(f"{self.name}: there are no training samples")
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: samples of x have shape {self.x.shape[1:]}, "
                f"those of x_test {self.x_test.shape[1:]}"
            )

    def _check_part(self, part: str, x: Array, y: NDArray[np.int64], ids: Array | None) -> None:
        if len(x) != len(y) or (ids is not None and len(ids) != len(y)):
            clients = "" if ids is None else f", client ids {len(ids)}"
            raise DataError(
                f"{self.name}: unequal lengths: x{part} {len(x)}, y{part} {len(y)}{clients}"
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise DataError(
                f"{self.name}: y{part} has labels from {y.min()} to {y.max()}; "
                f"with {self.classes} classes they must be from 0 to {self.classes - 1}"
            )

    def standardized(self, mean: ArrayLike | None = None, std: ArrayLike | None = None) -> Dataset:
        """Return the same samples with (x - mean) / std, by constants that are public.

        Parameters
        ----------
        mean, std : number or one a channel, optional
            By default the published ones of the data set (`CONSTANTS`). Constants measured on the
            clients' own data would not be public.

        Examples
        --------
        >>> from fedcohort.datasets import load
        >>> abs(float(load("digits").standardized().x.mean())) < 0.01
        True
        """
        if mean is None or std is None:
            if self.name not in CONSTANTS:
                known = ", ".join(CONSTANTS)
                raise ConfigError(f"{self.name}: no published mean and std; give them ({known})")
            mean, std = CONSTANTS[self.name]
        if self.x.dtype.kind != "f":
            raise ConfigError(f"{self.name}: only float samples can be standardized")
        shape = (-1, *[1] * (self.x.ndim - 2))
        shift, scale = (np.asarray(v, np.float32) for v in (mean, std))
        if shift.ndim:
            shift, scale = shift.reshape(shape), scale.reshape(shape)
        x, x_test = (self.x - shift) / scale, (self.x_test - shift) / scale
        return dataclasses.replace(self, x=x, x_test=x_test)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def __repr__(self) -> str:
        clients = "" if self.client_ids is None else ", with natural clients"
        return (
            f"Dataset({self.name!r}, {len(self.y)} + {len(self.y_test)} samples of shape "
            f"{self.sample_shape}, {self.classes} classes{clients})"
        )


def pixels(images: NDArray[np.uint8], dtype: Pixels) -> Array:
    """Scale bytes to [0, 1] as float32, or keep them."""
    if dtype == "uint8":
        return np.require(images, requirements=["C", "W"])  # bytes of a file are read-only
    if dtype == "float32":
        return images / np.float32(255)
    raise ConfigError(f'dtype={dtype!r} must be "float32" (scaled to [0, 1]) or "uint8" (bytes)')


def holdout(groups: ArrayLike, fraction: float, rng: Generator) -> NDArray[np.bool_]:
    """Mark a random fraction of each group, rounded, but never the whole group.

    Examples
    --------
    >>> import numpy as np
    >>> mask = holdout(["a"] * 10 + ["b"], 0.2, np.random.default_rng(0))
    >>> int(mask[:10].sum()), bool(mask[10])
    (2, False)
    """
    group, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    take = np.minimum(np.floor(sizes * fraction + 0.5).astype(np.int64), sizes - 1)
    shuffled = rng.permutation(group.size)
    order = shuffled[np.argsort(group[shuffled], kind="stable")]
    rank = np.arange(group.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(group.size, dtype=np.bool_)
    mask[order] = rank < np.repeat(take, sizes)
    return mask
