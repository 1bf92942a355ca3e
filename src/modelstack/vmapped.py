"""Stacked copies of any model by torch.func.vmap."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelstack.batchable import batchable
from modelstack.dropout import HashedDropout
from modelstack.kernel import Kernel, Setup
from modelstack.switches import runs_triton, seeded
from modelstack.training import Training


class OneClient(HashedDropout):
    """The mode of one client's forward pass: its dropout masks, and views of any layout.

    Convolutions leave images with channels last, which `.view()` cannot flatten; a copy can.
    """

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, given: Any = (), named: Any = None
    ) -> Any:
        """Return a copy where a view is refused."""
        try:
            return super().__torch_function__(function, kinds, given, named)
        except RuntimeError as error:
            if function is not Tensor.view or "view size" not in str(error):
                raise
            return Tensor.reshape(*given, **(named or {}))


class Vmapped(Kernel):
    """Copies of any model that `torch.func.vmap` can batch.

    `nn.LSTM` cannot be batched, so it is replaced by the same recurrence, written out.
    """

    def __init__(self, setup: Setup, clients: int, learns: bool = True) -> None:
        super().__init__(setup, clients, learns)
        model, _, loss, device, precision = setup
        self.model = replaced(copy.deepcopy(model), unrolled).to(device).train(learns)
        if runs_triton(device):
            replaced(self.model, partial(batchable, precision=precision))
        names = [name for name, _ in model.named_parameters()]

        def total(
            trained: Any, frozen: Any, x: Tensor, y: Tensor, w: Tensor, words: Tensor
        ) -> Tensor:
            both, rest = iter(trained), iter(frozen)
            values = [next(both) if is_trained else next(rest) for is_trained in self.trained]
            with OneClient(words, self.masks.step):
                outputs = functional_call(self.model, dict(zip(names, values, strict=True)), (x,))
            return (loss(outputs, y) * w).sum()

        self.gradient: Callable[..., Any] = vmap(grad(total), randomness="different")

    def footprint(self, samples: int, like: tuple[Tensor, Tensor]) -> int:
        """Add the memory of autograd: the outputs of all modules, their gradients, scratch."""
        seen: list[int] = []
        probe = copy.deepcopy(self.model).eval()
        for module in probe.modules():
            module.register_forward_hook(lambda _, inputs, output: seen.append(_bytes(output)))
        with torch.no_grad(), OneClient(self.masks.words[0], self.masks.step):
            probe(like[0][:1])
        return super().footprint(samples, like) + 4 * samples * sum(seen)

    def prepare(
        self, x: Tensor, y: Tensor, weight: Tensor, rate: Tensor, eps: Tensor
    ) -> Callable[[], None]:
        """Differentiate the losses of all clients in one call, then update."""
        clients = len(x)
        heads = [p[:clients] for p in self.params]
        trained = [p for p, on in zip(heads, self.trained, strict=True) if on]
        frozen = [p for p, on in zip(heads, self.trained, strict=True) if not on]

        def run() -> None:
            with torch.no_grad(), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                # `adaptive_avg_pool2d` of images with channels last; it costs nothing in a graph.
                # Other kernels for attention would run the clients' backward passes one by one.
                warnings.filterwarnings("ignore", "There is a performance drop")
                words = self.masks.words[:clients]
                self.sink.add(self.gradient(trained, frozen, x, y, weight, words), active=clients)
                self.sink.update(rate, eps, clients)
                self.masks.next_step()

        return run


def _bytes(output: object) -> int:
    if isinstance(output, Tensor):
        return output.nbytes
    return sum(map(_bytes, output)) if isinstance(output, (tuple, list)) else 0


class UnrolledLSTM(nn.Module):
    """`nn.LSTM` step by step, with the same parameters and names."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.layers, self.hidden = lstm.num_layers, lstm.hidden_size
        self.batch_first, self.dropout = lstm.batch_first, lstm.dropout
        for name, parameter in lstm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return all outputs and the last state, as `nn.LSTM` does."""
        steps = x.transpose(0, 1) if self.batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.layers):
            zero = steps.new_zeros(steps.shape[1], self.hidden)
            h, c = (zero, zero) if state is None else (state[0][layer], state[1][layer])
            steps, h, c = self._run(layer, steps, h, c)
            last.append((h, c))
            if self.dropout and layer + 1 < self.layers:
                samples_first = steps.transpose(0, 1)  # as masks number their entries
                dropped = nn.functional.dropout(samples_first, self.dropout, self.training)
                steps = dropped.transpose(0, 1)
        out = steps.transpose(0, 1) if self.batch_first else steps
        return out, (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))

    def _run(
        self, layer: int, steps: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
        of_layer: Any = [getattr(self, f"{name}_l{layer}", None) for name in names]
        weight_ih, bias_ih, weight, bias = of_layer
        inputs, outputs = nn.functional.linear(steps, weight_ih, bias_ih), []
        for step in inputs.unbind(0):
            i, f, g, o = (step + nn.functional.linear(h, weight, bias)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), h, c


def unrolled(module: nn.Module) -> nn.Module | None:
    """Return an LSTM that can be batched in place of an `nn.LSTM`."""
    if isinstance(module, nn.LSTM) and not module.bidirectional and not module.proj_size:
        return UnrolledLSTM(module)
    return None


def replaced(model: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace layers inside a model (in place) by what `other` returns for them, if anything."""
    for name, child in model.named_children():
        new = other(child)
        if new is None:
            replaced(child, other)
        else:
            setattr(model, name, new)
    return model


def forward_rows(model: nn.Module, params: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of a model, in its current mode, under each row of `params`."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    recurrent = any(isinstance(module, nn.LSTM) for module in model.modules())
    plain = replaced(copy.deepcopy(model), unrolled) if recurrent else model

    def one(row: Tensor) -> Tensor:
        parts = zip(shapes.items(), torch.split(row, sizes), strict=True)
        values = {name: part.view(shape) for (name, shape), part in parts}
        outputs: Tensor = functional_call(plain, values, (x,))
        return outputs

    rows: Tensor = vmap(one)(params)
    return rows


def obstacle(setup: Setup, data: tuple[Tensor, Tensor]) -> str:
    """Say which layer `torch.func.vmap` cannot batch, "" if it can batch the model.

    Two clients take a gradient on two samples each.
    """
    x, y = (t[[0, 0]].expand(2, *t[[0, 0]].shape) for t in data)
    kernel = Vmapped(setup._replace(training=Training()), 2)
    inside: list[str] = []
    for name, module in kernel.model.named_modules():
        label = f"layer {name!r} ({type(module).__name__})" if name else "its forward"
        module.register_forward_pre_hook(lambda *_, label=label: inside.append(label))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    rows = torch.cat([p.detach().flatten() for p in setup.model.parameters()]).expand(2, -1)
    kernel.load(rows, torch.arange(2, device=x.device))
    ones, zeros = torch.ones(2, 2, device=x.device), torch.zeros(2, device=x.device)
    try:
        with seeded([0], x.device):
            kernel.prepare(x, y, ones, zeros, zeros[0])()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0][:120]
        return f"{inside[-1] if inside else 'the loss'} cannot be batched by torch.func ({cause})"
    return ""
