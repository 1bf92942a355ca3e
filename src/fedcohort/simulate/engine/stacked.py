"""Stacked models built from layers whose backward pass is written out: the fastest engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.engine import activations, convolution, layers
from fedcohort.simulate.engine.kernel import Kernel, SampleLoss, record_gradient
from fedcohort.simulate.local import LocalTraining

PARTS = {"cuda": 256}  # products that a device should get at once
_PLAIN = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.LocalResponseNorm)


def modules(model: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a model in order, or None if one of them cannot be stacked.

    Examples
    --------
    >>> [type(m).__name__ for m in modules(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))]
    ['Flatten', 'Linear']
    >>> modules(nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))) is None
    True
    """
    flat = list(_leaves(model))
    weighted = [id(module) for module in flat if isinstance(module, (nn.Linear, nn.Conv2d))]
    once = weighted and len(weighted) == len(set(weighted))
    trained = all(p.requires_grad for p in model.parameters())
    known = all(_known(module, first=i == 0) for i, module in enumerate(flat))
    return flat if once and trained and known and _shapes_fit(flat) else None


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def _known(module: nn.Module, first: bool) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        return False
    if type(module) is nn.Conv2d:
        return module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    if type(module) is nn.Unflatten:
        return first and module.dim == 1
    return type(module) in _PLAIN


def _shapes_fit(flat: list[nn.Module]) -> bool:
    """Whether dense layers and the end come after a Flatten, and norms after a convolution."""
    image = False
    for module in flat:
        misplaced = nn.Linear if image else nn.LocalResponseNorm
        if isinstance(module, misplaced):
            return False
        image = (image or isinstance(module, (nn.Conv2d, nn.MaxPool2d))) and not isinstance(
            module, nn.Flatten
        )
    return not image


def _pool_first(stack: list[layers.Layer]) -> list[layers.Layer]:
    """Take each maximum before the bias and the ReLU: the same result from fewer numbers."""
    for i in range(1, len(stack)):
        j = i
        while isinstance(stack[j], convolution.MaxPool) and _rises(stack[j - 1]):
            stack[j - 1], stack[j] = stack[j], stack[j - 1]
            j -= 1
    return stack


def _rises(layer: layers.Layer) -> bool:
    """Whether a layer keeps the order of the numbers in a channel."""
    return isinstance(layer, (convolution.Bias, activations.Activation))


class Stacked(Kernel):
    """Copies of an `nn.Sequential` of the layers that `modules` accepts."""

    def __init__(
        self,
        model: nn.Module,
        local: LocalTraining | None,
        loss: SampleLoss,
        clients: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, local, loss, clients, device)
        flat = modules(model) or []
        if local is None:
            flat = [module for module in flat if not isinstance(module, nn.Dropout)]
        self.random = any(isinstance(module, nn.Dropout) for module in flat)
        self.layers = _pool_first(list(self._build(flat)))
        weighted = [isinstance(layer, (layers.Dense, convolution.Conv)) for layer in self.layers]
        self.first = weighted.index(True)
        self.parts = PARTS.get(device.type, 1)

    def _split(self, clients: int, samples: int) -> int:
        """Return into how many parts a convolution shall cut each client's batch.

        The gradient of a small kernel is a product of two small matrices over all pixels of a
        batch; on a GPU only many such products keep all of it busy.
        """
        wanted = -(-self.parts // clients)
        divisors = (d for d in range(1, samples + 1) if samples % d == 0)
        return next((d for d in divisors if d >= wanted), samples)

    def _build(self, flat: list[nn.Module]) -> Iterator[layers.Layer]:
        """Return the layers of each module; a place in the network names its memory."""
        at, image = 0, False
        for place, module in enumerate(flat):
            here = (3 * place, self.arena)
            after = flat[place - 1] if place else None
            if isinstance(module, (nn.Conv2d, nn.MaxPool2d)) and not image:
                copy = isinstance(module, nn.MaxPool2d)
                yield activations.ChannelsFirst(3 * place + 1, self.arena, copy)
                image = True
            if isinstance(module, nn.Conv2d):
                yield convolution.Conv(*here, self.sink, at, module)
                if module.bias is not None:
                    yield convolution.Bias(3 * place + 2, self.arena, self.sink, at + 1)
            elif isinstance(module, nn.Linear):
                yield layers.Dense(*here, self.sink, at, module.bias is not None)
            elif isinstance(module, nn.MaxPool2d):
                yield convolution.MaxPool(*here, module)
            elif isinstance(module, nn.Flatten):
                yield activations.Flatten(*here, image)
                image = False
            elif isinstance(module, nn.Unflatten):
                yield activations.Split(*here, module.unflattened_size)
            elif isinstance(module, nn.LocalResponseNorm):
                yield activations.ResponseNorm(*here, module)
            elif isinstance(module, nn.Dropout):
                yield activations.Dropout(*here, module.p)
            elif not isinstance(module, nn.Identity):
                inplace = isinstance(after, (nn.Linear, nn.Conv2d, nn.MaxPool2d))
                yield activations.Activation(*here, type(module).__name__, inplace)
            at += len(list(module.parameters()))

    def prepare(
        self, x: Tensor, y: Tensor, weight: Tensor, rate: Tensor, eps: Tensor
    ) -> Callable[[], None]:
        """Record all layers forward, then backward down to the first that has a weight."""
        if x.dim() != 3 and isinstance(self.layers[0], layers.Dense):
            raise ConfigError(
                f"samples of shape {tuple(x.shape[2:])} meet nn.Linear: put nn.Flatten() before "
                "it, or choose engine='loop'"
            )
        tape: layers.Tape = []
        at, split = x, self._split(*x.shape[:2])
        for layer in self.layers:
            layer.split = split
            at = layer.forward(tape, at)
        grad = record_gradient(tape, self.arena, self.loss, at, y, weight)
        for i in range(len(self.layers) - 1, self.first - 1, -1):
            grad = self.layers[i].backward(tape, grad, wanted=i > self.first)
        tape.append(partial(self.sink.update, rate, eps, len(x)))
        return partial(_play, tape)


def _play(tape: layers.Tape) -> None:
    with torch.no_grad():
        for operation in tape:
            operation()
