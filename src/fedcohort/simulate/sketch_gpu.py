"""Count the hashes of vectors that already lie on a GPU, by the same rotations as on the CPU.

The fast Hadamard transform only adds and subtracts in a fixed order, so the counts equal those of
`RaceSketch.add` bit for bit. On CUDA devices a Triton kernel keeps a sample's whole rotation in
registers; elsewhere, and for very long vectors, plain torch operations do the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.hashing.base import Rotations, rotations

LARGEST_IN_REGISTERS = 4096
SCRATCH = 1 << 28  # numbers held at a time
Method = Literal["auto", "torch", "triton"]


def hash_counts(x: Tensor, family: SRP, method: Method = "auto") -> Tensor:
    """Return the counts (rows, buckets) of vectors x (n, dim), on x's device.

    Parameters
    ----------
    x : Tensor (n, dim)
        Any real dtype, finite.
    family : SRP
        Hash functions of the fast family.
    method : {"auto", "torch", "triton"}
        "auto" takes Triton on CUDA devices for vectors of up to 4096 padded entries.

    Examples
    --------
    >>> from fedcohort.sketch.race import RaceSketch
    >>> x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]])
    >>> sketch = RaceSketch.srp(dim=3, rows=4, bits=2)
    >>> sketch.add(x.numpy())
    >>> bool((hash_counts(x, sketch.family) == torch.from_numpy(sketch.counts)).all())
    True
    """
    if family.family != "fast":
        raise ValueError("hash_counts: only the fast family; use RaceSketch.add for the dense one")
    if x.ndim != 2 or x.shape[1] != family.dim:
        raise ValueError(f"hash_counts: data of shape {tuple(x.shape)} for dim={family.dim}")
    turns = rotations(family.seed, family.name, family.dim, family.rows, family.bits, "f4")
    fits = turns.size <= LARGEST_IN_REGISTERS
    if method == "triton" or (method == "auto" and x.is_cuda and fits):
        return _by_triton(x, family, turns)
    return _by_torch(x, family, turns)


def tame(x: Tensor) -> Tensor:
    """Return x such that float32 sums cannot overflow; the rule is that of `hashing.srp.tame`."""
    if x.dtype in (torch.uint8, torch.int8, torch.int16, torch.bool) or not len(x):
        return x
    peak = x.abs().amax(dim=1).double()
    if not bool(torch.isfinite(peak).all()):
        row = int(torch.nonzero(~torch.isfinite(peak))[0])
        raise ValueError(f"row {row} of the data holds a number that is not finite")
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


def _by_torch(x: Tensor, family: SRP, turns: Rotations) -> Tensor:
    rows, bits = family.rows, family.bits
    first, second, third = _signs_of(turns, x.device)
    cells = torch.arange(rows, device=x.device) * family.buckets
    counts = torch.zeros(rows * family.buckets, dtype=torch.int64, device=x.device)
    step = max(1, SCRATCH // 8 // max(turns.size, turns.used * len(second)))
    for lo in range(0, len(x), step):
        part = tame(x[lo : lo + step]).float()
        wide = torch.nn.functional.pad(part, (0, turns.size - family.dim))
        spread = hadamard(wide * first)
        turned = [hadamard(hadamard(spread * s) * t) for s, t in zip(second, third, strict=True)]
        planes = torch.cat([t[:, : turns.used] for t in turned], dim=1)[:, : rows * bits] > 0
        weights = 2 ** torch.arange(bits, device=x.device)
        codes = (planes.reshape(-1, bits, rows) * weights[:, None]).sum(dim=1)
        counts += torch.bincount((codes + cells).flatten(), minlength=len(counts))
    return counts.reshape(rows, family.buckets)


def _by_triton(x: Tensor, family: SRP, turns: Rotations) -> Tensor:
    from fedcohort.simulate import _sketch_triton

    signs = _signs_of(turns, x.device)
    total = family.rows * family.bits
    counts = torch.zeros((family.rows, family.buckets), dtype=torch.int32, device=x.device)
    out = torch.zeros_like(counts, dtype=torch.int64)
    step = max(1, min(SCRATCH * 4 // total, 2**31 - 1))
    for lo in range(0, len(x), step):
        part = tame(x[lo : lo + step]).contiguous()
        _sketch_triton.count(part, *signs, turns.used, counts)
        out += counts
        counts.zero_()
    return out
