"""Triton kernel for dropout masks: the same bits as `dropout.fill_mask` without Triton."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors

BLOCK = 1024


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _fill(
    words, step, position, mask, ENTRIES, THRESHOLD, SCALE,
    PLACE: tl.constexpr, POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    first = tl.load(words + 2 * client).to(tl.uint32)
    first = _mix(_mix(first + tl.load(step).to(tl.uint32) * 0x9E3779B9) + PLACE)
    second = _mix(first ^ tl.load(words + 2 * client + 1).to(tl.uint32))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = at
    if POSITION:
        where = tl.load(position + at, mask=at < ENTRIES, other=0)
    word = _mix(_mix((where.to(tl.uint32) * 0x9E3779B9) ^ first) + second)
    kept = (word >> 8).to(tl.int32) < THRESHOLD
    tl.store(mask + client * ENTRIES + at, tl.where(kept, SCALE, 0.0), mask=at < ENTRIES)


def fill(words, step, place, keep, mask):
    """Write 1 / keep to the kept entries of a contiguous mask (clients, entries), 0 elsewhere."""
    clients, entries = mask.shape
    grid = (triton.cdiv(entries, BLOCK), clients)
    _fill[grid](
        words, step, mask, mask,
        entries, round(keep * (1 << 24)), 1 / max(keep, 1e-30),
        PLACE=place * 0x85EBCA6B & 0xFFFFFFFF, POSITION=False, BLOCK=BLOCK,
    )  # fmt: skip
