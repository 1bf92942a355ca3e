"""Triton kernels of `sketch_gpu`, in a file of their own because Triton has no types."""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ROWS, TILE_SAMPLES = 128, 16


@triton.jit
def _pair_stage(x, M: tl.constexpr):
    """One stage of butterflies on neighbors; the lowest bit of the index becomes the highest."""
    low, high = tl.split(tl.reshape(x, (M // 2, 2)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (1, 0)), (M,))


@triton.jit
def _quad_stage(x, M: tl.constexpr):
    """Two such stages at once."""
    even, odd = tl.split(tl.reshape(x, (M // 4, 2, 2)))
    p0, p1 = tl.split(even + odd)
    q0, q1 = tl.split(even - odd)
    sums = tl.join(p0 + p1, q0 + q1)
    gaps = tl.join(p0 - p1, q0 - q1)
    return tl.reshape(tl.permute(tl.join(sums, gaps), (2, 1, 0)), (M,))


@triton.jit
def _hadamard(x, M: tl.constexpr, LOG: tl.constexpr):
    """Stages 1, 2, 4, ...; after all of them every index is back in its place."""
    for _ in tl.static_range(LOG // 2):
        x = _quad_stage(x, M)
    if LOG % 2 == 1:
        x = _pair_stage(x, M)
    return x


@triton.jit
def _planes(
    x_ptr, first_ptr, second_ptr, third_ptr, out_ptr, dim, total, used,
    K: tl.constexpr, M: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Write the sign of projection p of sample i to out[i, p]; one program per sample."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, M)
    x = tl.load(x_ptr + i * dim + j, mask=j < dim, other=0).to(tl.float32)
    spread = _hadamard(x * tl.load(first_ptr + j), M, LOG)
    for k in range(K):
        turned = _hadamard(spread * tl.load(second_ptr + k * M + j), M, LOG)
        turned = _hadamard(turned * tl.load(third_ptr + k * M + j), M, LOG)
        p = k * used + j
        inside = (j < used) & (p < total)
        tl.store(out_ptr + i * total + p, (turned > 0).to(tl.int8), mask=inside)


@triton.jit
def _count(
    planes_ptr, owners_ptr, counts_ptr, n, rows, total,
    BITS: tl.constexpr, BUCKETS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add one to the bucket of every sample and row of a tile, for the sample's owner."""
    r = (tl.program_id(1) * R + tl.arange(0, R))[None, :]
    i = (tl.program_id(0) * S + tl.arange(0, S)).to(tl.int64)[:, None]
    inside = (i < n) & (r < rows)
    code = tl.zeros((S, R), tl.int32)
    for b in tl.static_range(BITS):
        bit = tl.load(planes_ptr + i * total + b * rows + r, mask=inside, other=0)
        code += bit.to(tl.int32) << b
    owner = tl.load(owners_ptr + i, mask=i < n, other=0)
    tl.atomic_add(counts_ptr + (owner * rows + r) * BUCKETS + code, 1, mask=inside, sem="relaxed")


def count(
    x: torch.Tensor,
    owners: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    used: int,
    counts: torch.Tensor,
) -> None:
    """Add the hash of x[i] to counts[owners[i]]; counts are int32 (clients, rows, buckets)."""
    _, rows, buckets = counts.shape
    bits = buckets.bit_length() - 1
    total = rows * bits
    n, m = len(x), len(first)
    planes = torch.empty((n, total), dtype=torch.int8, device=x.device)
    if n == 0:
        return
    _planes[(n,)](
        x, first, second, third, planes, x.shape[1], total, used,
        K=len(second), M=m, LOG=m.bit_length() - 1, num_warps=max(1, m // 1024),
    )  # fmt: skip
    grid = triton.cdiv(n, TILE_SAMPLES), triton.cdiv(rows, TILE_ROWS)
    _count[grid](
        planes,
        owners,
        counts,
        n,
        rows,
        total,
        BITS=bits,
        BUCKETS=buckets,
        R=TILE_ROWS,
        S=TILE_SAMPLES,
    )
