"""Embeddings and LSTMs of many models at once.

All time steps share two large products, with the input weights and for the weight gradients. Each
step then needs one batched product and one pass over the gates, which on a GPU are one kernel.
Activations lie as (clients, steps, samples, features), so that a step is a view and all steps
together are a matrix per client.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelstack.layers import ROUNDING, Arena, Sink, Tape, Weighted
from modelstack.switches import runs_triton

# ruff: noqa: D102 (`Layer` documents the methods)

MAX_VOCABULARY = 1024  # larger embeddings would waste time on one-hot products


class LastOutput(nn.Module):
    """The output of an LSTM's last time step: what ``lstm(x)[0][:, -1]`` returns."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        """Return (samples, hidden)."""
        outputs: Tensor = self.lstm(x)[0]
        return outputs[:, -1]


def plain_embedding(module: nn.Embedding) -> bool:
    """Whether an embedding has none of the options that the stacked form leaves out."""
    plain = module.padding_idx is None and module.max_norm is None and not module.sparse
    return plain and not module.scale_grad_by_freq and module.num_embeddings <= MAX_VOCABULARY


def plain_lstm(module: nn.LSTM) -> bool:
    """Whether an LSTM has one layer and direction, biases and the batch first."""
    one = module.num_layers == 1 and not module.bidirectional and not module.proj_size
    return one and module.bias and module.batch_first


class Embedding(Weighted):
    """`nn.Embedding` of (clients, samples, steps) numbers, as a product with one-hot rows."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        clients, samples, steps = x.shape
        weight = self.sink.params[self.at[0]][:clients]
        self.hot = self.memory("hot", (clients, steps * samples, weight.shape[1]))
        number = self.memory("number", (clients, steps, samples), torch.int64)
        ones = self.memory("ones", (clients, steps * samples, 1)).fill_(1)
        out = self.memory("out", (clients, steps * samples, weight.shape[2]))
        tape += [
            partial(number.copy_, x.transpose(1, 2)),
            self.hot.zero_,
            partial(self.hot.scatter_, 2, number.view(clients, -1, 1), ones),
        ]
        self.multiply(tape, self.hot, weight, out)
        return out.view(clients, steps, samples, -1)

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        self.gather(tape, self.at[0], self.hot.mT, grad.flatten(1, 2))
        return grad


class LSTM(Weighted):
    """`nn.LSTM` of one layer, of which only the last output is used."""

    def __init__(
        self, place: int, arena: Arena, sink: Sink, at: list[int], lstm: nn.LSTM, precision: str
    ) -> None:
        super().__init__(place, arena, sink, at)
        self.hidden, self.rounding = lstm.hidden_size, ROUNDING[precision]

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        clients, steps, samples = x.shape[:3]
        self.x = x.flatten(1, 2)
        self.weight_ih, self.weight_hh, bias_ih, bias_hh = (
            self.sink.params[at][:clients] for at in self.at
        )
        self.gates = self.memory("gates", (clients, steps, samples, 4 * self.hidden))
        shape = (clients, steps + 1, samples, self.hidden)
        self.h, self.c = self.memory("h", shape), self.memory("c", shape)
        self.tanh_c = self.memory("tanh c", (clients, steps, samples, self.hidden))
        bias = self.memory("bias", bias_ih.shape)
        flat = self.gates.flatten(1, 2)
        tape += [self.h[:, 0].zero_, self.c[:, 0].zero_]
        self.multiply(tape, self.x, self.weight_ih.mT, flat)
        tape += [
            partial(torch.add, bias_ih, bias_hh, out=bias),
            partial(flat.add_, bias.unsqueeze(1)),
        ]
        for t in range(steps):
            self._step(tape, t)
        return self.h[:, steps]

    def _kernels(self) -> Any:
        """Return the module of Triton kernels, None on devices without them."""
        if not runs_triton(self.arena.device):
            return None
        from modelstack import _triton_recurrent

        return _triton_recurrent

    def _step(self, tape: Tape, t: int) -> None:
        """Append one step, whose activations replace the sums in `gates`."""
        gates, h, c = self.gates[:, t], self.h[:, t + 1], self.c[:, t + 1]
        before, tanh_c = self.c[:, t], self.tanh_c[:, t]
        kernels = self._kernels()
        if kernels:
            given = (gates, self.weight_hh, self.h[:, t], before, h, c, tanh_c, self.rounding)
            tape.append(partial(kernels.lstm_step, *given))
            return
        tape.append(partial(torch.baddbmm, gates, self.h[:, t], self.weight_hh.mT, out=gates))
        i, f, g, o = gates.chunk(4, -1)
        tape += [
            gates[..., : 2 * self.hidden].sigmoid_,
            g.tanh_,
            o.sigmoid_,
            partial(torch.mul, f, before, out=c),
            partial(c.addcmul_, i, g),
            partial(torch.tanh, c, out=tanh_c),
            partial(torch.mul, o, tanh_c, out=h),
        ]

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        clients, steps, samples = self.gates.shape[:3]
        grad_h = self.memory("grad h", (clients, samples, self.hidden))
        grad_c = self.memory("grad c", (clients, samples, self.hidden))
        tape += [partial(grad_h.copy_, grad), grad_c.zero_]
        for t in reversed(range(steps)):
            self._step_backward(tape, t, grad_h, grad_c)
        flat = self.gates.flatten(1, 2)
        below = grad
        if wanted:  # before the weight changes
            below = self.memory("below", self.x.shape)
            self.multiply(tape, flat, self.weight_ih, below)
        self.gather(tape, self.at[0], flat.mT, self.x)
        self.gather(tape, self.at[1], flat.mT, self.h[:, :steps].flatten(1, 2))
        for at in self.at[2:]:
            self.gather_sum(tape, at, flat)
        return below.view(clients, steps, samples, -1) if wanted else grad

    def _step_backward(self, tape: Tape, t: int, grad_h: Tensor, grad_c: Tensor) -> None:
        """Append one step's gradients, which replace the activations in `gates`."""
        gates, before, tanh_c = self.gates[:, t], self.c[:, t], self.tanh_c[:, t]
        last = t == self.gates.shape[1] - 1
        kernels = self._kernels()
        if kernels:
            given = (grad_h, gates, self.weight_hh, before, tanh_c, grad_c, self.rounding)
            later = None if last else self.gates[:, t + 1]
            tape.append(partial(kernels.lstm_step_backward, later, *given))
            return
        if not last:
            self.multiply(tape, self.gates[:, t + 1], self.weight_hh, grad_h)
        tape.append(partial(_cell_backward, gates, before, tanh_c, grad_h, grad_c))


def _cell_backward(
    gates: Tensor, before: Tensor, tanh_c: Tensor, grad_h: Tensor, grad_c: Tensor
) -> None:
    i, f, g, o = gates.chunk(4, -1)
    grad_o = grad_h * tanh_c * o * (1 - o)
    grad_c.addcmul_(grad_h * o, 1 - tanh_c * tanh_c)
    grad_i = grad_c * g * i * (1 - i)
    grad_g = grad_c * i * (1 - g * g)
    grad_f = grad_c * before * f * (1 - f)
    grad_c.mul_(f)
    for gate, grad in zip((i, f, g, o), (grad_i, grad_f, grad_g, grad_o), strict=True):
        gate.copy_(grad)
