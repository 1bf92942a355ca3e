"""Sketch vectors that are already on a GPU, with the same counts as on the CPU, bit for bit.

The transform runs in float64, one correctly rounded operation after the other, and the fast
Hadamard transform only adds and subtracts in a fixed order. A CPU and a GPU therefore compute the
same floating-point numbers. On CUDA devices a Triton kernel keeps the whole rotation of a sample in
registers; for very long vectors, plain torch operations do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcohort.sketch.hashing import SRP, MinHash, Rotations, rotations
from fedcohort.sketch.race import RaceSketch, token_sets
from fedcohort.sketch.transforms import Transform

LARGEST_IN_REGISTERS = 4096
SCRATCH = 1 << 28  # numbers held at a time
Method = Literal["auto", "torch", "triton"]
Counts = NDArray[np.int64]


def federation_counts(
    empty: RaceSketch,
    x: Tensor,
    parts: Sequence[NDArray[np.int64]],
    labels: Tensor | None = None,
    method: Method = "auto",
) -> Iterator[Counts]:
    """Yield the counts (rows, buckets) of each client's sketch, in the order of `parts`.

    On a CUDA device, all clients are hashed together there. On a CPU, and for sketches that have an
    embedding or hash otherwise than by SRP, each client is hashed by `RaceSketch.add`. The counts
    are the same.

    Parameters
    ----------
    empty : RaceSketch
        Says which hash functions and which transform to use. It is not changed.
    x : Tensor (samples, ...)
        The data of all clients, on any device.
    parts : sequence of int array
        The rows of `x` that each client holds.
    labels : Tensor (samples,), optional
        Needed if the transform hashes labels.
    method : {"auto", "torch", "triton"}
        "torch" and "triton" skip the CPU's own way of hashing.

    Examples
    --------
    >>> empty = RaceSketch.srp(dim=2, rows=4, bits=2)
    >>> x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]])
    >>> ann, bob = federation_counts(empty, x, [np.array([0, 2]), np.array([1])])
    >>> ann.sum(axis=1).tolist(), bob.sum(axis=1).tolist()
    ([2, 2, 2, 2], [1, 1, 1, 1])
    """
    family, transform = empty.family, empty.transform
    x = x.flatten(1)
    plain = isinstance(transform, Transform) and transform.embedding is None
    if method == "auto" and not (x.is_cuda and plain and isinstance(family, SRP)):
        yield from _by_race_sketch(empty, x, parts, labels)
        return
    if not (isinstance(family, SRP) and isinstance(transform, Transform)):
        raise ValueError(f"method={method!r} hashes vectors by SRP only; choose method='auto'")
    used = labels if transform.classes else None
    size = max(1, SCRATCH // (family.rows * family.buckets))  # clients counted at a time
    for first in range(0, len(parts), size):
        group = parts[first : first + size]
        at = torch.from_numpy(np.concatenate(group)).to(x.device)
        owners = torch.arange(len(group)).repeat_interleave(torch.tensor([*map(len, group)]))
        counts = _count(x, at, owners.to(x.device), len(group), family, transform, used, method)
        yield from counts.cpu().numpy().astype(np.int64)


def _by_race_sketch(
    empty: RaceSketch, x: Tensor, parts: Sequence[NDArray[np.int64]], labels: Tensor | None
) -> Iterator[Counts]:
    rows = x.cpu().numpy()
    y = None if labels is None else labels.cpu().numpy()
    sets = token_sets(rows) if isinstance(empty.family, MinHash) else None
    for part in parts:
        sketch = empty.empty_like()
        own = rows[part] if sets is None else [sets[i] for i in part]
        sketch.add(own, None if y is None else y[part])
        yield sketch.counts


def hash_counts(x: Tensor, family: SRP, method: Method = "auto") -> Tensor:
    """Return the counts (rows, buckets) of vectors x (n, dim), on x's device.

    Parameters
    ----------
    x : Tensor (n, dim)
        Any real dtype, finite.
    family : SRP
        Hash functions.
    method : {"auto", "torch", "triton"}
        "auto" uses Triton on CUDA devices for vectors of up to 4096 padded entries.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]])
    >>> sketch = RaceSketch.srp(dim=3, rows=4, bits=2)
    >>> sketch.add(x.numpy())
    >>> bool((hash_counts(x, sketch.family) == torch.from_numpy(sketch.counts)).all())
    True
    """
    if x.ndim != 2:
        raise ValueError(f"hash_counts: data of shape {tuple(x.shape)} for dim={family.dim}")
    at = torch.arange(len(x), device=x.device)
    counts = _count(x, at, torch.zeros_like(at), 1, family, Transform(), None, method)
    return counts[0].to(torch.int64)


def _count(
    x: Tensor,
    at: Tensor,
    owners: Tensor,
    clients: int,
    family: SRP,
    transform: Transform,
    labels: Tensor | None,
    method: Method,
) -> Tensor:
    """Count row at[i] of x for client owners[i]: int32 (clients, rows, buckets)."""
    if x.shape[1] + transform.classes != family.dim:
        raise ValueError(f"data of shape {tuple(x.shape)} for dim={family.dim}")
    turns = rotations(family.seed, family.name, family.dim, family.rows, family.bits, "f4")
    fits = turns.size <= LARGEST_IN_REGISTERS
    triton = method == "triton" or (method == "auto" and x.is_cuda and fits)
    shape = (clients, family.rows, family.buckets)
    counts = torch.zeros(shape, dtype=torch.int32, device=x.device)
    widest = max(family.rows * family.bits // 4 if triton else turns.used * len(turns.second), 1)
    step = max(1, min(SCRATCH // 8 // max(turns.size, widest), 2**31 - 1))
    for lo in range(0, len(at), step):
        rows = at[lo : lo + step]
        part = x.index_select(0, rows)
        part = apply(transform, part, None if labels is None else labels.index_select(0, rows))
        part = scaled(part, rows)
        (_add_by_triton if triton else _add_by_torch)(
            part, owners[lo : lo + step], family, turns, counts
        )
    return counts


def apply(transform: Transform, x: Tensor, y: Tensor | None) -> Tensor:
    """Transform vectors as `Transform.apply` does, to the last bit.

    Constants are tensors with an axis: PyTorch multiplies by the reciprocal of a number on a GPU.
    """
    if transform.center != 0.0 or transform.scale != 1.0:
        center, scale = (
            torch.tensor(np.atleast_1d(np.asarray(c, np.float64)), device=x.device)
            for c in (transform.center, transform.scale)
        )
        x = (x.double() - center) / scale
    if transform.unit:
        x = _unit_length(x.double())
    if not transform.classes:
        return x
    if y is None:
        raise ValueError(f"this sketch hashes {transform.classes} labels too: pass labels")
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < transform.classes):
        raise ValueError(f"labels must be whole numbers from 0 to {transform.classes - 1}")
    classes = torch.arange(transform.classes, device=x.device)
    chosen = (y[:, None] == classes).double() * transform.label_weight
    return torch.cat([x.double(), chosen], dim=1)


def _unit_length(x: Tensor) -> Tensor:
    """Divide each row by its length, as `transforms.unit_length` does."""
    peak = x.abs().amax(dim=1, keepdim=True)
    x = x / torch.where(peak > 0, peak, 1.0)
    squares = x * x
    while squares.shape[1] > 1:
        half = (squares.shape[1] + 1) // 2
        rest = squares[:, half:]
        squares = squares[:, :half].clone()
        squares[:, : rest.shape[1]] += rest
    length = squares.sqrt()
    return x / torch.where(length > 0, length, 1.0)


def scaled(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return x such that float32 sums cannot overflow, by the rule of `sketch.hashing`.

    `rows` are the numbers that an error calls the rows by.
    """
    if x.dtype in (torch.uint8, torch.int8, torch.int16, torch.bool) or not len(x):
        return x
    peak = x.abs().amax(dim=1).double()
    if not bool(torch.isfinite(peak).all()):
        row = int(torch.nonzero(~torch.isfinite(peak))[0])
        name = row if rows is None else int(rows[row])
        raise ValueError(f"row {name} of the data holds a number that is not finite")
    far = (peak > 2.0**40) | ((peak < 2.0**-40) & (peak > 0))
    if not bool(far.any()):
        return x.float()
    exponent = torch.where(far, torch.frexp(peak).exponent, 0)
    return torch.ldexp(x.double(), -exponent[:, None]).float()


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform along the last axis; the order of `hashing.rotation.hadamard`."""
    m, h = x.shape[-1], 1
    while h < m:
        low, high = x.reshape(*x.shape[:-1], m // (2 * h), 2, h).unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).reshape(x.shape)
        h *= 2
    return x


def _signs_of(turns: Rotations, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = map(torch.from_numpy, (turns.first, turns.second, turns.third))
    return first.to(device), second.to(device), third.to(device)


def _add_by_torch(x: Tensor, owners: Tensor, family: SRP, turns: Rotations, counts: Tensor) -> None:
    rows, bits = family.rows, family.bits
    first, second, third = _signs_of(turns, x.device)
    wide = torch.nn.functional.pad(x.float(), (0, turns.size - family.dim))
    spread = hadamard(wide * first)
    turned = [hadamard(hadamard(spread * s) * t) for s, t in zip(second, third, strict=True)]
    planes = torch.cat([t[:, : turns.used] for t in turned], dim=1)[:, : rows * bits] > 0
    weights = 2 ** torch.arange(bits, device=x.device)
    codes = (planes.reshape(-1, bits, rows) * weights[:, None]).sum(dim=1)
    cells = (owners[:, None] * rows + torch.arange(rows, device=x.device)) * family.buckets
    flat = counts.view(-1)
    at = (codes + cells).flatten()
    flat.scatter_add_(0, at, torch.ones_like(at, dtype=flat.dtype))


def _add_by_triton(
    x: Tensor, owners: Tensor, family: SRP, turns: Rotations, counts: Tensor
) -> None:
    kernels: Any = _triton_kernels()
    signs = _signs_of(turns, x.device)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():  # Triton's current device
        kernels.count(x.contiguous(), owners, *signs, turns.used, counts)


def _triton_kernels() -> Any:
    from fedcohort.simulate import _sketch_triton

    return _sketch_triton
