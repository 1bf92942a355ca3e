"""Triton kernels of `recurrent`: a step of an LSTM of many models is one kernel.

It multiplies with the recurrent weights, then computes the gates. Offsets of clients are 64-bit
numbers. The kernels are in a file of their own because Triton has no types.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def _lstm_step(
    gates, weight, h, c, next_h, next_c, tanh_c, gate_stride, state_stride, tanh_stride,
    SAMPLES: tl.constexpr, BS: tl.constexpr, HIDDEN: tl.constexpr, BU: tl.constexpr,
    BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """The four gates are the first axis, so that each of four warps multiplies for one gate."""
    client = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BU + tl.arange(0, BU)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    gate = tl.arange(0, 4)[:, None, None]
    real = (sample < SAMPLES)[:, None] & (unit < HIDDEN)[None, :]
    into = weight + client * (4 * HIDDEN * HIDDEN) + gate * (HIDDEN * HIDDEN)
    into += unit[None, None, :] * HIDDEN
    from_h = h + client * state_stride + sample[:, None] * HIDDEN
    sums = tl.zeros((4, BS, BU), tl.float32)
    for turn in range(0, (HIDDEN + BK - 1) // BK):
        k = turn * BK + tl.arange(0, BK)
        live = (sample < SAMPLES)[:, None] & (k < HIDDEN)[None, :]
        fits = (k < HIDDEN)[None, :, None] & (unit < HIDDEN)[None, None, :] & (gate < 4)
        before = tl.load(from_h + k[None, :], mask=live, other=0.0)
        before = tl.broadcast_to(before[None, :, :], (4, BS, BK))
        w = tl.load(into + k[None, :, None], mask=fits, other=0.0)
        sums = tl.dot(before, w, sums, input_precision=ROUNDING)
    at = gates + client * gate_stride + gate * HIDDEN
    at += sample[None, :, None] * (4 * HIDDEN) + unit[None, None, :]
    sums += tl.load(at, mask=real[None, :, :], other=0.0)
    sums = tl.where(gate == 2, _tanh(sums), tl.sigmoid(sums))
    tl.store(at, sums, mask=real[None, :, :])
    i = tl.sum(tl.where(gate == 0, sums, 0.0), 0)
    f = tl.sum(tl.where(gate == 1, sums, 0.0), 0)
    g = tl.sum(tl.where(gate == 2, sums, 0.0), 0)
    o = tl.sum(tl.where(gate == 3, sums, 0.0), 0)
    state = client * state_stride + sample[:, None] * HIDDEN + unit[None, :]
    cell = f * tl.load(c + state, mask=real, other=0.0) + i * g
    squashed = _tanh(cell)
    tl.store(next_c + state, cell, mask=real)
    tl.store(next_h + state, o * squashed, mask=real)
    to = tanh_c + client * tanh_stride + sample[:, None] * HIDDEN + unit[None, :]
    tl.store(to, squashed, mask=real)


def _lstm_grid(clients, samples, hidden):
    bs = min(32, max(16, triton.next_power_of_2(samples)))  # 100 KiB of shared memory are enough
    return (triton.cdiv(hidden, 16), triton.cdiv(samples, bs), clients), bs


def lstm_step(gates, weight, h, c, next_h, next_c, tanh_c, rounding):
    """Add h times the weights to the sums in `gates`, then take the step.

    `gates` gets the activations; the new output, state and its tanh are written. All are (clients,
    samples, ...), contiguous but for the clients.
    """
    clients, samples, hidden = h.shape
    grid, bs = _lstm_grid(clients, samples, hidden)
    _lstm_step[grid](
        gates, weight, h, c, next_h, next_c, tanh_c, gates.stride(0), h.stride(0),
        tanh_c.stride(0), samples, bs, hidden, BU=16, BK=64, ROUNDING=rounding,
        num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _lstm_step_backward(
    later, grad_h, gates, weight, before, tanh_c, grad_c, gate_stride, state_stride, tanh_stride,
    LAST: tl.constexpr, SAMPLES: tl.constexpr, BS: tl.constexpr, HIDDEN: tl.constexpr,
    BU: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BU + tl.arange(0, BU)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    real = (sample < SAMPLES)[:, None] & (unit < HIDDEN)[None, :]
    at = (client * SAMPLES + sample[:, None]) * HIDDEN + unit[None, :]
    if LAST:
        dh = tl.load(grad_h + at, mask=real, other=0.0)
        dc = tl.zeros((BS, BU), tl.float32)
    else:
        dc = tl.load(grad_c + at, mask=real, other=0.0)
        of = tl.arange(0, 4)[:, None, None]
        into = weight + client * (4 * HIDDEN * HIDDEN) + of * (HIDDEN * HIDDEN)
        into += unit[None, None, :]
        above = later + client * gate_stride + of * HIDDEN + sample[None, :, None] * (4 * HIDDEN)
        each = tl.zeros((4, BS, BU), tl.float32)
        for turn in range(0, (HIDDEN + BK - 1) // BK):
            k = turn * BK + tl.arange(0, BK)
            live = (sample < SAMPLES)[None, :, None] & (k < HIDDEN)[None, None, :] & (of < 4)
            fits = (k < HIDDEN)[None, :, None] & (unit < HIDDEN)[None, None, :] & (of < 4)
            d = tl.load(above + k[None, None, :], mask=live, other=0.0)
            w = tl.load(into + k[None, :, None] * HIDDEN, mask=fits, other=0.0)
            each = tl.dot(d, w, each, input_precision=ROUNDING)
        dh = tl.sum(each, 0)
    gate = gates + client * gate_stride + sample[:, None] * (4 * HIDDEN) + unit[None, :]
    i = tl.load(gate, mask=real, other=0.0)
    f = tl.load(gate + HIDDEN, mask=real, other=0.0)
    g = tl.load(gate + 2 * HIDDEN, mask=real, other=0.0)
    o = tl.load(gate + 3 * HIDDEN, mask=real, other=0.0)
    of = tanh_c + client * tanh_stride + sample[:, None] * HIDDEN + unit[None, :]
    squashed = tl.load(of, mask=real, other=0.0)
    dc += dh * o * (1 - squashed * squashed)
    of = before + client * state_stride + sample[:, None] * HIDDEN + unit[None, :]
    tl.store(gate, dc * g * i * (1 - i), mask=real)
    tl.store(gate + HIDDEN, dc * tl.load(of, mask=real, other=0.0) * f * (1 - f), mask=real)
    tl.store(gate + 2 * HIDDEN, dc * i * (1 - g * g), mask=real)
    tl.store(gate + 3 * HIDDEN, dh * squashed * o * (1 - o), mask=real)
    tl.store(grad_c + at, dc * f, mask=real)


def lstm_step_backward(later, grad_h, gates, weight, before, tanh_c, grad_c, rounding):
    """Turn a step's activations in `gates` into gradients.

    `later` holds those gradients of the next step; it is None for the last step, where the output's
    gradient is `grad_h`. `before` is the state before the step. `grad_c` gets the gradient of the
    state before the step.
    """
    clients, samples, hidden = grad_c.shape
    grid, bs = _lstm_grid(clients, samples, hidden)
    _lstm_step_backward[grid](
        gates if later is None else later, grad_h, gates, weight, before, tanh_c, grad_c,
        gates.stride(0), before.stride(0), tanh_c.stride(0), later is None,
        samples, bs, hidden, BU=16, BK=64, ROUNDING=rounding, num_warps=4, num_stages=3,
    )  # fmt: skip
