"""Triton kernels for dense layers of many models, and for a step's inputs and loss.

Activations are (clients, samples, features), weights (clients, outputs, inputs), all contiguous. A
small model's step takes as long as its kernels need to start, so each does as much as it can: a
layer forward is one kernel, and so are its gradients and the update of its weights, which reads the
weights once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _dense(
    x, weight, bias, out, SAMPLES, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr,
    BS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    x += client * SAMPLES * INPUTS
    weight += client * (OUTPUTS * INPUTS)
    total = tl.zeros((BS, BO), tl.float32)
    for turn in range(0, (INPUTS + BK - 1) // BK):
        k = turn * BK + tl.arange(0, BK)
        here = (s < SAMPLES)[:, None]
        there = (o < OUTPUTS)[:, None]
        if INPUTS % BK != 0:
            here = here & (k < INPUTS)[None, :]
            there = there & (k < INPUTS)[None, :]
        a = tl.load(x + s[:, None] * INPUTS + k[None, :], mask=here, other=0.0)
        b = tl.load(weight + o[:, None] * INPUTS + k[None, :], mask=there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=ROUNDING)
    if BIAS:
        total += tl.load(bias + client * OUTPUTS + o, mask=o < OUTPUTS, other=0.0)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # keeps NaN
    to = out + client * SAMPLES * OUTPUTS + s[:, None] * OUTPUTS + o[None, :]
    tl.store(to, total, mask=(s < SAMPLES)[:, None] & (o < OUTPUTS)[None, :])


def dense(x, weight, bias, out, relu, rounding):
    """Write x @ weight.T + bias to `out`, after ReLU if wanted."""
    clients, samples, inputs = x.shape
    outputs = weight.shape[1]
    bs, bo = (max(16, min(64, triton.next_power_of_2(size))) for size in (samples, outputs))
    while clients * triton.cdiv(samples, bs) * triton.cdiv(outputs, bo) < 132 and max(bs, bo) > 16:
        bs, bo = (bs // 2, bo) if bs > bo else (bs, bo // 2)  # one per processor
    grid = (triton.cdiv(outputs, bo), triton.cdiv(samples, bs), clients)
    _dense[grid](
        x, weight, bias, out, samples, inputs, outputs, bias is not None, relu,
        BS=bs, BO=bo, BK=64, ROUNDING=rounding, num_warps=4 if bs * bo > 512 else 2, num_stages=3,
    )  # fmt: skip


@triton.jit
def _dense_backward(
    x, y, grad, weight, target, bias_target, below, alpha, beta, SAMPLES,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    BELOW: tl.constexpr, SAME: tl.constexpr,
    BS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """One block of inputs k: all its weights, which no other program touches."""
    client = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    s = tl.arange(0, BS)
    at = client * SAMPLES * INPUTS + s[:, None] * INPUTS + k[None, :]
    real = (s < SAMPLES)[:, None] & (k < INPUTS)[None, :]
    a = tl.load(x + at, mask=real, other=0.0)
    total = tl.zeros((BS, BK), tl.float32)
    grad += client * SAMPLES * OUTPUTS
    y += client * SAMPLES * OUTPUTS
    start = client * (OUTPUTS * INPUTS)
    for turn in range(0, (OUTPUTS + BO - 1) // BO):
        o = turn * BO + tl.arange(0, BO)
        of = s[:, None] * OUTPUTS + o[None, :]
        here = (s < SAMPLES)[:, None] & (o < OUTPUTS)[None, :]
        g = tl.load(grad + of, mask=here, other=0.0)
        if RELU:
            g = tl.where(tl.load(y + of, mask=here, other=0.0) > 0, g, 0.0)
        there = (o < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
        place = start + o[:, None] * INPUTS + k[None, :]
        if BELOW or SAME:
            w = tl.load(weight + place, mask=there, other=0.0)
        if BELOW:
            total = tl.dot(g, w, total, input_precision=ROUNDING)
        change = tl.dot(tl.trans(g), a, input_precision=ROUNDING)
        if not SAME:
            w = tl.load(target + place, mask=there, other=0.0)
        tl.store(target + place, beta * w + alpha * change, mask=there)
        if BIAS:  # noqa: SIM102 (Triton knows BIAS when it compiles)
            if tl.program_id(0) == 0:
                to = bias_target + client * OUTPUTS + o
                old = tl.load(to, mask=o < OUTPUTS, other=0.0)
                tl.store(to, beta * old + alpha * tl.sum(g, 0), mask=o < OUTPUTS)
    if BELOW:
        tl.store(below + at, total, mask=real)


def backward_tile(clients, samples, inputs, outputs, rounding):
    """Return a program's samples, step in outputs and inputs, its warps and its loads' stages.

    Measured on an H200.
    """
    bs = max(16, triton.next_power_of_2(samples))
    if bs == 16 and outputs >= 64 and clients * triton.cdiv(inputs, 128) >= 264:
        return (bs, 64, 128, 4, 2) if rounding == "tf32x3" else (bs, 128, 64, 4, 1)
    bo = max(16, min(64, triton.next_power_of_2(outputs)))
    bk = 64 if clients * triton.cdiv(inputs, 64) >= 132 and bs <= 64 else 32
    return bs, bo, bk, 4, 2


def dense_backward(x, y, grad, weight, target, bias_target, below, alpha, beta, relu, rounding):
    """Add the gradients of weight and bias to their targets; write that of x to `below`.

    A target becomes beta * target + alpha * gradient, and may be the weight itself. `y` is the
    layer's output, which `relu` needs. At most 128 samples. `below` may be None.
    """
    clients, samples, inputs = x.shape
    outputs = weight.shape[1]
    bs, bo, bk, warps, stages = backward_tile(clients, samples, inputs, outputs, rounding)
    grid = (triton.cdiv(inputs, bk), clients)
    same = target.data_ptr() == weight.data_ptr()
    _dense_backward[grid](
        x, y, grad, weight, target, bias_target, below, alpha, beta, samples, inputs, outputs,
        bias_target is not None, relu, below is not None, same,
        BS=bs, BO=bo, BK=bk, ROUNDING=rounding, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _loss_gradient(
    outputs, labels, weight, rows, CLASSES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    inside = (row < rows)[:, None] & (c < CLASSES)[None, :]
    at = row[:, None].to(tl.int64) * CLASSES + c[None, :]
    value = tl.load(outputs + at, mask=inside, other=float("-inf"))
    value = tl.where((row < rows)[:, None], value, 0.0)
    power = tl.exp(value - tl.max(value, 1)[:, None])
    share = power / tl.sum(power, 1)[:, None]
    label = tl.load(labels + row, mask=row < rows, other=0)
    share -= tl.where(c[None, :] == label[:, None], 1.0, 0.0)
    each = tl.load(weight + row, mask=row < rows, other=0.0)
    tl.store(outputs + at, share * each[:, None], mask=inside)


def loss_gradient(outputs, labels, weight):
    """Replace logits by the gradient of the weighted sum of their cross-entropies."""
    classes = outputs.shape[-1]
    rows = labels.numel()
    bc = triton.next_power_of_2(classes)
    br = max(1, min(64, 2048 // bc))
    _loss_gradient[(triton.cdiv(rows, br),)](outputs, labels, weight, rows, classes, BR=br, BC=bc)


@triton.jit
def _fetch(
    clock, index, x, y, weight, to_x, to_y, to_weight, clients, table_clients,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    step = tl.load(clock)
    at = (step * table_clients + slot // WIDTH) * WIDTH + slot % WIDTH
    sample = tl.load(index + at).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + sample * SIZE + n, mask=n < SIZE, other=0)
    tl.store(to_x + slot.to(tl.int64) * SIZE + n, value, mask=n < SIZE)
    if tl.program_id(1) == 0:
        tl.store(to_y + slot, tl.load(y + sample))
        tl.store(to_weight + slot, tl.load(weight + at))


def fetch(clock, index, x, y, weight, to_x, to_y, to_weight):
    """Copy the samples of the step that the clock points to, with their labels and weights.

    `index` and `weight` are (steps, clients, width); the destinations are for the first clients.
    """
    size = x[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    clients, width = to_weight.shape
    _fetch[(clients * width, triton.cdiv(size, block))](
        clock, index, x, y, weight, to_x, to_y, to_weight, clients, index.shape[1],
        width, size, BLOCK=block,
    )  # fmt: skip
