"""Stacked models built from layers whose backward pass is written out: the fastest engine.

`read_chain` finds the layers of a model. The layers must form a chain: each one takes only the
output of the one before it. An `nn.Sequential` is a chain, and so are most modules whose `forward`
is written out, which `torch.fx` reads.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelstack import convolution, fused_convolution, layers, recurrent
from modelstack.kernel import Kernel, Setup, record_gradient
from modelstack.recurrent import LastOutput
from modelstack.switches import runs_triton
from modelstack.training import Unsupported

PARTS = {"cuda": 256}  # products that a device should get at once
_PLAIN = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.LocalResponseNorm)
_WEIGHTED = (nn.Linear, nn.Conv2d, nn.Embedding, LastOutput)
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class Unstackable(Exception):
    """Says which part of a model has no stacked form."""


def obstacle(model: nn.Module) -> str:
    """Say which part of a model has no stacked form, "" if all have one."""
    try:
        stackable(model)
    except Unstackable as error:
        return str(error)
    return ""


def stackable(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model in order; `Unstackable` names what has no stacked form."""
    names = {id(module): name for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise Unstackable(f"parameter {name!r} is frozen")
    tied = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))
    if tied:
        raise Unstackable("layers share a parameter")
    flat = read_chain(model)
    for place, module in enumerate(flat):
        if not _known(module, first=place == 0):
            name = names.get(id(module), "")
            raise Unstackable(f"layer {name!r} ({type(module).__name__}) has no stacked form")
    weighted = [id(module) for module in flat if isinstance(module, _WEIGHTED)]
    if not weighted or len(weighted) != len(set(weighted)):
        raise Unstackable("a layer with parameters is used twice, or there is none")
    held = {id(p) for module in flat for p in module.parameters()}
    if any(id(p) not in held for p in model.parameters()):
        raise Unstackable("a parameter belongs to no layer")
    _check_shapes(flat)
    return flat


def read_chain(model: nn.Module) -> list[nn.Module]:
    """Return the layers that the input passes through, one after the other."""
    if type(model) is nn.Sequential:
        return list(_leaves(model))
    if type(model).__module__.startswith("torch.nn"):
        return [model]
    if model._forward_hooks or model._forward_pre_hooks:
        raise Unstackable("the model has forward hooks")
    return [leaf for module in _traced(model) for leaf in _leaves(module)]


def _traced(model: nn.Module) -> list[nn.Module]:
    """Read the layers from what `forward` does to a symbol in place of the input."""
    from torch import fx

    copied = copy.deepcopy(model)
    try:
        evaluated = {node.name: node for node in fx.Tracer().trace(copied.eval()).nodes}
        graph = fx.Tracer().trace(copied.train())
    except Exception as error:  # whatever the user's code does to a symbol
        raise Unstackable(f"its forward depends on the input ({type(error).__name__})") from None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len([node for node in inputs if node.users]) != 1:
        raise Unstackable("its forward does not take exactly one input")
    chain: list[nn.Module] = []
    node = next(node for node in inputs if node.users)
    while True:
        following = [user for user in node.users if not _asks_shape(user)]
        if len(following) != 1:
            raise Unstackable(f"{node.name!r} is used by {len(following)} layers, not by one")
        (node,) = following
        if node.op == "output":
            return chain
        node = _convert(model, node, evaluated.get(node.name), chain)


def _asks_shape(node: Any) -> bool:
    """Whether a node only reads the shape of its input, or is not used at all."""
    if node.op == "call_method" and node.target == "size":
        return True
    attribute = node.target is getattr and node.args[1] == "shape"
    return attribute or (node.op != "output" and not node.users)


def _convert(model: nn.Module, node: Any, evaluated: Any, chain: list[nn.Module]) -> Any:
    """Append the module that does what a node does; return the node that holds its output.

    `evaluated` is the same node as traced in evaluation mode.
    """
    if node.op == "call_module":
        module = model.get_submodule(node.target)
        if not isinstance(module, nn.LSTM):
            chain.append(module)
            return node
        if len(node.args) != 1 or node.kwargs:
            raise Unstackable(f"layer {node.target!r} (LSTM) starts from a state")
        outputs = _only_user(node, 0)
        for last in ((slice(None), -1), (slice(None), -1, slice(None))):
            if (only := _only_user(outputs, last)) is not None:
                chain.append(LastOutput(module))
                return only
        raise Unstackable(f"layer {node.target!r} (LSTM) is used beyond its last output")
    same = _module_of(node, evaluated)
    if same is None:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        raise Unstackable(f"the operation {name!r} has no stacked form")
    chain.append(same)
    return node


def _only_user(node: Any, item: Any) -> Any:
    """Return the node that takes an item of a node, if nothing else uses that node."""
    users = [] if node is None else [user for user in node.users if user.users]
    fits = len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == item
    return users[0] if fits else None


def _module_of(node: Any, evaluated: Any) -> nn.Module | None:
    """Return the module that does the same as a function or a tensor's method."""
    name = node.target if isinstance(node.target, str) else node.target.__name__
    given, named = node.args[1:], node.kwargs
    if name in _ACTIVATIONS and not given:
        return _ACTIVATIONS[name]()
    if name in ("max_pool2d", "_max_pool2d", "boolean_dispatch"):
        supported = {"kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"}
        return nn.MaxPool2d(*given, **named) if set(named) <= supported else None
    if name == "flatten":
        options = dict(zip(("start_dim", "end_dim"), given, strict=False)) | named
        return nn.Flatten(options.get("start_dim", 0), options.get("end_dim", -1))
    if name in ("view", "reshape") and _flattens(node):
        return nn.Flatten()
    if name == "dropout" and evaluated is not None:
        (p, on), (_, still_on) = _dropout_options(node), _dropout_options(evaluated)
        if not still_on:
            return nn.Dropout(p) if on else nn.Identity()
    return None


def _dropout_options(node: Any) -> tuple[float, bool]:
    options = dict(zip(("p", "training", "inplace"), node.args[1:], strict=False)) | node.kwargs
    return options.get("p", 0.5), options.get("training", True)


def _flattens(node: Any) -> bool:
    """Whether a view is (samples, -1) or (-1, k).

    If k is not the number of features, the dense layer that follows refuses the shape.
    """
    size = node.args[1:] if len(node.args) > 2 else tuple(node.args[1])
    if len(size) != 2:
        return False
    if size[1] == -1 and not isinstance(size[0], int):
        return True  # the number of samples, by x.size(0) or x.shape[0]
    return size[0] == -1 and isinstance(size[1], int)


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
        return convolution.plain_convolution(module)
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    if type(module) is nn.Unflatten:
        return first and module.dim == 1
    if type(module) is nn.Embedding:
        return first and recurrent.plain_embedding(module)
    if type(module) is LastOutput:
        return recurrent.plain_lstm(module.lstm)
    return type(module) in _PLAIN


def _check_shapes(flat: list[nn.Module]) -> None:
    """Dense layers and the end must come after a Flatten, norms after a convolution.

    An LSTM must come right after its embedding, and nothing else may.
    """
    image, after = False, None
    for i, module in enumerate(flat):
        misplaced = nn.Linear if image else nn.LocalResponseNorm
        if isinstance(module, misplaced):
            raise Unstackable(f"layer {i} ({type(module).__name__}) sees an unexpected shape")
        if isinstance(after, nn.Embedding) != isinstance(module, LastOutput):
            raise Unstackable("an embedding and an LSTM are stacked only one after the other")
        image = image or isinstance(module, (nn.Conv2d, nn.MaxPool2d))
        image, after = image and not isinstance(module, nn.Flatten), module
    if image or isinstance(after, nn.Embedding):
        raise Unstackable("the output is not one vector per sample")


def _pool_first(stack: list[layers.Layer]) -> list[layers.Layer]:
    """Take each maximum before the bias and the ReLU: the same result from fewer numbers."""
    in_order = (convolution.Bias, layers.Activation)  # keep the order of the numbers in a channel
    for i in range(1, len(stack)):
        j = i
        while isinstance(stack[j], convolution.MaxPool) and isinstance(stack[j - 1], in_order):
            stack[j - 1], stack[j] = stack[j], stack[j - 1]
            j -= 1
    return stack


class Stacked(Kernel):
    """Copies of a model made of the layers that `stackable` accepts."""

    def __init__(self, setup: Setup, clients: int, learns: bool = True) -> None:
        super().__init__(setup, clients, learns)
        model, training, _, device, self.precision = setup
        flat = stackable(model)
        if not learns:
            flat = [module for module in flat if not isinstance(module, nn.Dropout)]
        self.random, self.drops = False, any(isinstance(module, nn.Dropout) for module in flat)
        self.place_of = {id(p): i for i, p in enumerate(model.parameters())}
        parts = fused_convolution.fused_blocks(flat) if runs_triton(device) else None
        self.fused = parts is not None
        if parts is None:
            self.layers = _pool_first(list(self._build(flat)))
        else:
            self.dense_too = learns and training.batch_size <= layers.FusedDense.MAX_SAMPLES
            self.layers = list(self._build_fused(parts))
        self.first = [isinstance(layer, layers.Weighted) for layer in self.layers].index(True)
        self.parts = 1 if self.fused else PARTS.get(device.type, 1)

    def _split(self, clients: int, samples: int) -> int:
        """Return the number of parts that a convolution cuts each client's batch into.

        The gradient of a small kernel is a product of two small matrices over all pixels of a
        batch. Only many such products keep a whole GPU busy.
        """
        wanted = -(-self.parts // clients)
        divisors = (d for d in range(1, samples + 1) if samples % d == 0)
        return next((d for d in divisors if d >= wanted), samples)

    def _weighted(
        self, place: int, module: nn.Module
    ) -> tuple[int, layers.Arena, layers.Sink, list[int]]:
        """Return what a layer with the parameters of a module is made from."""
        at = [self.place_of[id(p)] for p in module.parameters()]
        return place, self.arena, self.sink, at

    def _build(self, flat: list[nn.Module]) -> Iterator[layers.Layer]:
        """Return the layers of each module; a place in the network names its memory."""
        image = False
        for number, module in enumerate(flat):
            place, arena = 3 * number, self.arena
            if isinstance(module, (nn.Conv2d, nn.MaxPool2d)) and not image:
                pooled = isinstance(module, nn.MaxPool2d)
                yield layers.ChannelsFirst(place + 1, arena, pooled)
                image = True
            if isinstance(module, nn.Conv2d):
                *_, at = given = self._weighted(place, module)
                yield convolution.Conv(*given, module)
                if module.bias is not None:
                    yield convolution.Bias(place + 2, arena, self.sink, at[1:])
            elif isinstance(module, nn.MaxPool2d):
                yield convolution.MaxPool(place, arena, module)
            elif isinstance(module, nn.LocalResponseNorm):
                yield layers.ResponseNorm(place, arena, module)
            else:
                after = flat[number - 1] if number else None
                yield from self._build_plain(place, module, after, image)
            image = image and not isinstance(module, nn.Flatten)

    def _build_fused(self, parts: list[fused_convolution.Part]) -> Iterator[layers.Layer]:
        """Do the same with layers that are fused on a GPU."""
        below: fused_convolution.FusedConv | None = None
        number, image = 0, False
        self.arena.peaks = sum(isinstance(part, fused_convolution.Block) for part in parts)
        for at, part in enumerate(parts):
            place = 3 * at
            if isinstance(part, fused_convolution.Block):
                if not number:
                    yield fused_convolution.ChannelsLast(place + 1, self.arena)
                given = self._weighted(place, part.conv)
                layer = fused_convolution.FusedConv(*given, part, self.precision)
                layer.join(number, below, parts[at + 1])
                below = layer
                number, image = number + 1, True
                yield below
                continue
            below = None
            if isinstance(part, nn.Flatten) and image:
                yield fused_convolution.FusedFlatten(place, self.arena)
                image = False
            elif isinstance(part, fused_convolution.DenseBlock):
                given = self._weighted(place, part.linear)
                if self.dense_too:
                    yield layers.FusedDense(*given, part.relu, layers.ROUNDING[self.precision])
                    continue
                yield layers.Dense(*given)
                if part.relu:
                    yield layers.Activation(place + 1, self.arena, "ReLU", inplace=True)
            else:
                yield from self._build_plain(place, part, None)

    def _build_plain(
        self, place: int, module: nn.Module, after: nn.Module | None, image: bool = False
    ) -> Iterator[layers.Layer]:
        """Return the layer of a module; `image` says that its input has a convolution's layout."""
        weighted, here = self._weighted(place, module), (place, self.arena)
        if isinstance(module, nn.Linear):
            yield layers.Dense(*weighted)
        elif isinstance(module, nn.Embedding):
            yield recurrent.Embedding(*weighted)
        elif isinstance(module, LastOutput):
            yield recurrent.LSTM(*weighted, module.lstm, self.precision)
        elif isinstance(module, nn.Flatten):
            yield layers.Flatten(*here, image)
        elif isinstance(module, nn.Unflatten):
            yield layers.Unflatten(*here, module.unflattened_size)
        elif isinstance(module, nn.Dropout):
            yield layers.Dropout(*here, module.p, image)
        elif not isinstance(module, nn.Identity):
            inplace = isinstance(after, (nn.Linear, nn.Conv2d, nn.MaxPool2d))
            yield layers.Activation(*here, type(module).__name__, inplace)

    def prepare(
        self, x: Tensor, y: Tensor, weight: Tensor, rate: Tensor, eps: Tensor
    ) -> Callable[[], None]:
        """Record all layers forward, then backward down to the first that has a weight."""
        tape: layers.Tape = []
        outputs = self.record_forward(tape, x)
        grad = record_gradient(tape, self.arena, self.setup.loss, outputs, y, weight)
        for i in range(len(self.layers) - 1, self.first - 1, -1):
            grad = self.layers[i].backward(tape, grad, wanted=i > self.first)
        tape.append(partial(self.sink.update, rate, eps, len(x)))
        if self.drops:
            tape.append(self.masks.next_step)
        return partial(_play, tape)

    def record_forward(self, tape: layers.Tape, x: Tensor) -> Tensor:
        """Append the forward pass and return where the outputs will be."""
        if x.dim() != 3 and isinstance(self.layers[0], (layers.Dense, layers.FusedDense)):
            raise Unsupported(
                f"samples of shape {tuple(x.shape[2:])} meet nn.Linear: put nn.Flatten() before "
                "it, or choose engine='loop'"
            )
        split = self._split(*x.shape[:2])
        for layer in self.layers:
            layer.split = split
            x = layer.forward(tape, x)
        return x


def evaluates(model: nn.Module, device: torch.device) -> bool:
    """Whether `Forward` is fast and frugal: `convolution.Conv` would copy patches of a test set."""
    flat = stackable(model)
    images = any(isinstance(module, nn.Conv2d) for module in flat)
    return not images or (runs_triton(device) and fused_convolution.fused_blocks(flat) is not None)


class Forward:
    """Outputs of the models that `kernel` holds, on the same samples, layer by layer."""

    def __init__(self, setup: Setup, models: int) -> None:
        self.kernel = Stacked(setup, models, learns=False)
        self.kernel.parts = 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return (models, samples, outputs); the next call overwrites it."""
        tape: layers.Tape = []
        outputs = self.kernel.record_forward(tape, x.expand(self.kernel.clients, *x.shape))
        _play(tape)
        return outputs


def _play(tape: layers.Tape) -> Any:
    with torch.no_grad():
        for operation in tape:
            operation()
