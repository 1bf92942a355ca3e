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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelstack import fused_convolution, layers, recurrent
from modelstack.fused_convolution import Block, DenseBlock, Part
from modelstack.kernel import Kernel, Setup, record_gradient
from modelstack.recurrent import LastOutput
from modelstack.switches import runs_triton
from modelstack.training import Unsupported

_WEIGHTED = (nn.Linear, nn.Conv2d, nn.Embedding, LastOutput)
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class Placed(NamedTuple):
    """A part of a chain; its place names its memory and its dropout masks."""

    place: int
    part: Part


class Unstackable(Exception):
    """Says which part of a model has no stacked form."""


def obstacle(model: nn.Module, device: torch.device) -> str:
    """Say which part of a model has no stacked form on a device, "" if all have one."""
    try:
        stackable(model, device)
    except Unstackable as error:
        return str(error)
    return ""


def stackable(model: nn.Module, device: torch.device, learns: bool = True) -> list[Placed]:
    """Return the layers of a model in order, joined with what is fused with them.

    Without dropout unless the copies learn. `Unstackable` names what has no stacked form.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise Unstackable(f"parameter {name!r} is frozen")
    tied = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))
    if tied:
        raise Unstackable("layers share a parameter")
    names = {id(module): name for name, module in model.named_modules()}
    flat = read_chain(model)
    parts: list[Placed] = []
    for number, module in enumerate(flat):
        if obstacle := _append(parts, 3 * number, module, device, learns):
            name = f"layer {names.get(id(module), '')!r} ({type(module).__name__})"
            raise Unstackable(f"{name} has {obstacle}")
    weighted = [id(module) for module in flat if isinstance(module, _WEIGHTED)]
    if not weighted or len(weighted) != len(set(weighted)):
        raise Unstackable("a layer with parameters is used twice, or there is none")
    held = {id(p) for module in flat for p in module.parameters()}
    if any(id(p) not in held for p in model.parameters()):
        raise Unstackable("a parameter belongs to no layer")
    if _of_images(parts) or isinstance(parts[-1].part, nn.Embedding):
        raise Unstackable("the output is not one vector per sample")
    return parts


def _of_images(parts: list[Placed]) -> bool:
    """Whether the next layer sees images that a convolution returned."""
    kinds = [type(part) for _, part in parts]
    return Block in kinds and nn.Flatten not in kinds[kinds.index(Block) :]


def _append(
    parts: list[Placed], place: int, module: nn.Module, device: torch.device, learns: bool
) -> str:
    """Append a layer or join it with the last part; say what is missing if neither can be."""
    last, image = parts[-1].part if parts else None, _of_images(parts)
    if not _has_form(module, last, image):
        return "no stacked form"
    if isinstance(module, nn.Conv2d):
        if not runs_triton(device):
            return "a stacked form only on a GPU with Triton"
        parts.append(Placed(place, Block(module)))
    elif isinstance(module, nn.Linear):
        parts.append(Placed(place, DenseBlock(module)))
    elif isinstance(module, nn.ReLU) and isinstance(last, (Block, DenseBlock)):
        parts[-1] = Placed(parts[-1].place, last._replace(relu=True))
    elif isinstance(module, nn.MaxPool2d) and isinstance(last, Block):
        parts[-1] = Placed(parts[-1].place, last._replace(pool=module))
    elif isinstance(module, nn.Flatten) and image and isinstance(last, nn.Dropout):
        parts.insert(-1, Placed(place, module))  # the pooling can then write what it returns
    elif not isinstance(module, nn.Identity) and (learns or not isinstance(module, nn.Dropout)):
        parts.append(Placed(place, module))
    return ""


def _has_form(module: nn.Module, last: Part | None, image: bool) -> bool:
    """Whether a layer has a stacked form after the part `last`; `image` if it sees images."""
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        return False
    if isinstance(last, nn.Embedding) != (type(module) is LastOutput):
        return False  # they are stacked only one after the other
    if type(module) is nn.Conv2d:
        return fused_convolution.plain_convolution(module)
    if type(module) is nn.MaxPool2d:
        alone = isinstance(last, Block) and last.pool is None
        return alone and fused_convolution.plain_pooling(module)
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    if type(module) is nn.Unflatten:
        return last is None and module.dim == 1
    if type(module) is nn.Embedding:
        return last is None and recurrent.plain_embedding(module)
    if type(module) is LastOutput:
        return recurrent.plain_lstm(module.lstm)
    if type(module) is nn.ReLU:
        return not image or isinstance(last, Block)
    anywhere = type(module) in (nn.Dropout, nn.Identity)
    return anywhere or (type(module) in (nn.Linear, nn.Tanh, nn.Sigmoid) and not image)


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


class Stacked(Kernel):
    """Copies of a model made of the layers that `stackable` accepts."""

    random = False

    def __init__(self, setup: Setup, clients: int, learns: bool = True) -> None:
        super().__init__(setup, clients, learns)
        parts = stackable(setup.model, setup.device, learns)
        self.drops = any(isinstance(part, nn.Dropout) for _, part in parts)
        self.layers = list(self._build(parts, learns))
        self.first = [isinstance(layer, layers.Weighted) for layer in self.layers].index(True)

    def _build(self, parts: list[Placed], learns: bool) -> Iterator[layers.Layer]:
        """Return the layers of each part."""
        model, training, _, device, precision = self.setup
        numbers = {id(p): i for i, p in enumerate(model.parameters())}
        small = training.batch_size <= layers.FusedDense.MAX_SAMPLES
        fuses_dense = runs_triton(device) and learns and small
        self.arena.peaks = sum(isinstance(part, Block) for _, part in parts)
        below: fused_convolution.FusedConv | None = None
        convolutions = 0
        for at, (place, part) in enumerate(parts):
            here = (place, self.arena)
            module = part[0] if isinstance(part, (Block, DenseBlock)) else part
            weighted = (*here, self.sink, [numbers[id(p)] for p in module.parameters()])
            if isinstance(part, Block):
                if not convolutions:
                    yield fused_convolution.ChannelsLast(*here)
                layer = fused_convolution.FusedConv(*weighted, part, precision)
                layer.join(convolutions, below, parts[at + 1].part)
                convolutions, below = convolutions + 1, layer
                yield layer
                continue
            below = None
            if isinstance(part, DenseBlock) and fuses_dense:
                yield layers.FusedDense(*weighted, part.relu, layers.ROUNDING[precision])
            elif isinstance(part, DenseBlock):
                yield layers.Dense(*weighted)
                if part.relu:
                    yield layers.Activation(*here, "ReLU", inplace=True)
            elif isinstance(part, nn.Flatten):
                image = _of_images(parts[:at])
                yield fused_convolution.FusedFlatten(*here) if image else layers.Flatten(*here)
            elif isinstance(part, nn.Embedding):
                yield recurrent.Embedding(*weighted)
            elif isinstance(part, LastOutput):
                yield recurrent.LSTM(*weighted, part.lstm, precision)
            elif isinstance(part, nn.Unflatten):
                yield layers.Unflatten(*here, part.unflattened_size)
            elif isinstance(part, nn.Dropout):
                yield layers.Dropout(*here, part.p)
            else:
                before = parts[at - 1].part if at else None
                inplace = isinstance(before, DenseBlock) and not before.relu
                yield layers.Activation(*here, type(part).__name__, inplace)

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
        for layer in self.layers:
            x = layer.forward(tape, x)
        return x

    def outputs(self, x: Tensor) -> Tensor:
        """Return (models, samples, outputs) of all copies on the same samples.

        The next call overwrites it.
        """
        tape: layers.Tape = []
        outputs = self.record_forward(tape, x.expand(self.clients, *x.shape))
        _play(tape)
        return outputs


def _play(tape: layers.Tape) -> Any:
    with torch.no_grad():
        for operation in tape:
            operation()
