"""The models of the papers, by name.

========== ================================================== ========== =======================
name       layers                                             parameters source
========== ================================================== ========== =======================
mlp-512    784-512-10                                         407,050    RACE sketches, MNIST
lenet5     two 5x5 convolutions (6, 16), 120-84-62            66,126     RACE sketches, FEMNIST
char-lstm  embedding 8, LSTM 256, 80 characters               293,584    RACE sketches, Shakespeare
cifar-cnn  two 5x5 convolutions (6, 16), 120-84-10            62,006     FedACS (PyTorch's tutorial)
fcnn-300   784-300-10                                         238,510    sketch to skip and select
lrn-cnn    two 5x5 convolutions (32, 32) with LRN, 256-10     555,178    sketch to skip and select
mlp-64-30  784-64-30-10                                       52,500     FedCor, Fashion-MNIST
fedcor-mlp the same, dropout of 1/2 before each ReLU          52,500     FedCor, released code
fedcor-cnn three 3x3 convolutions (32, 64, 64), 10            66,570     FedCor, CIFAR-10; with a
                                                                         dense layer, "-64"
cnn        two 5x5 convolutions (32, 64), 512-10              582,026    FL-DP3S
========== ================================================== ========== =======================

Where a paper leaves sizes open: FedCor as in the TensorFlow tutorial, FL-DP3S as FedAvg's network
without padding. Pooling comes before ReLU: the numbers are the same, with a quarter of the work.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from string import digits
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.exceptions import ConfigError
from fedcohort.registry import lookup
from fedcohort.simulate.local import config_errors, first_dense, seeded

Shape = Sequence[int]
BATCH = 4096  # samples that are embedded at a time


def _dense(sizes: Sequence[int], classes: int, dropout: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Dense layers fc1, fc2, ... with ReLU between them, and dropout before it."""
    layers: list[tuple[str, nn.Module]] = []
    for i, (wide, narrow) in enumerate(zip(sizes, [*sizes[1:], classes], strict=True), start=1):
        layers.append((f"fc{i}", nn.Linear(wide, narrow)))
        if dropout and i < len(sizes):
            layers.append((f"drop_fc{i}", nn.Dropout(dropout)))
        layers.append((f"relu_fc{i}", nn.ReLU()))
    return layers[:-1]


def _mlp(*hidden: int, dropout: float = 0.0) -> Callable[[Shape, int], nn.Module]:
    def make(shape: Shape, classes: int) -> nn.Module:
        layers = _dense([math.prod(shape), *hidden], classes, dropout)
        return nn.Sequential(OrderedDict([("flatten", nn.Flatten()), *layers]))

    return make


def _conv_net(
    layers: str, hidden: Sequence[int], *, kernel: int = 5, pads: Sequence[int] = (0, 0, 0)
) -> Callable[[Shape, int], nn.Module]:
    """Layers by name, ``convN`` having N channels, then dense layers of these sizes."""

    def make(shape: Shape, classes: int) -> nn.Module:
        if len(shape) not in (2, 3):
            raise ConfigError(
                f"input_shape={tuple(shape)}: a convolution needs (channels, height, width) or "
                "(height, width)"
            )
        depth, net, count = 1, OrderedDict[str, nn.Module](), Counter[str]()
        if len(shape) == 3:
            depth = shape[0]
        else:
            net["channel"] = nn.Unflatten(1, (1, shape[0]))
        for name in layers.split():
            kind = name.rstrip(digits)
            count[kind] += 1
            place = f"{kind}{count[kind]}"
            if kind == "conv":
                channels, pad = int(name.removeprefix(kind)), pads[count[kind] - 1]
                net[place] = nn.Conv2d(depth, channels, kernel, padding=pad)
                depth = channels
            else:
                net[place] = LAYERS[kind]()
        try:
            features = nn.Sequential(net)(torch.zeros(1, *shape)).numel()
        except RuntimeError:
            text = f"input_shape={tuple(shape)} is too small for this model's convolutions"
            raise ConfigError(text) from None
        dense = _dense([features, *hidden], classes)
        return nn.Sequential(OrderedDict([*net.items(), ("flatten", nn.Flatten()), *dense]))

    return make


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "pool": partial(nn.MaxPool2d, 2),
    "relu": nn.ReLU,
    # As in TensorFlow's old CIFAR tutorial, whose alpha is a ninth of PyTorch's.
    "norm": partial(nn.LocalResponseNorm, 9, alpha=0.001, beta=0.75, k=1.0),
}


class CharLSTM(nn.Module):
    """Next character from a window of characters: embedding, one LSTM, output layer."""

    def __init__(self, vocabulary: int = 80, embedding: int = 8, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits from (samples, window) character numbers."""
        outputs, _ = self.lstm(self.embedding(characters))
        return cast(Tensor, self.output(outputs[:, -1]))


THREE = "conv32 pool relu conv64 pool relu conv64 relu"
MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp-512": _mlp(512),
    "mlp-64-30": _mlp(64, 30),
    "fedcor-mlp": _mlp(64, 30, dropout=0.5),
    "fcnn-300": _mlp(300),
    "lenet5": _conv_net("conv6 pool relu conv16 pool relu", (120, 84), pads=(2, 0)),
    "cnn": _conv_net("conv32 pool relu conv64 pool relu", (512,)),
    "fedcor-cnn": _conv_net(THREE, (), kernel=3),
    "fedcor-cnn-64": _conv_net(THREE, (64,), kernel=3),
    "cifar-cnn": _conv_net("conv6 pool relu conv16 pool relu", (120, 84)),
    "lrn-cnn": _conv_net("conv32 pool relu norm conv32 relu norm pool", (256,), pads=(2, 2)),
    "char-lstm": lambda shape, classes: CharLSTM(classes),
}

INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "kaiming-uniform": nn.init.kaiming_uniform_,
    "kaiming-normal": nn.init.kaiming_normal_,
    "xavier-uniform": nn.init.xavier_uniform_,
    "xavier-normal": nn.init.xavier_normal_,
}


def build(
    name: str | Callable[[Shape, int], nn.Module],
    input_shape: Shape,
    classes: int,
    seed: int = 0,
    *,
    init: str | None = None,
) -> nn.Module:
    """Return a model with parameters drawn from a seed; no global generator is touched.

    `name` is a key of `MODELS`, or a function of (input_shape, classes) that returns a module. The
    shape is that of one sample: any for the dense models, (channels, height, width) or (height,
    width) for the convolutions, (window,) for the LSTM. With `init`, a key of `INITS`, all weights
    are drawn so, and biases as PyTorch does.

    Examples
    --------
    >>> model = build("mlp-64-30", (28, 28), 10)
    >>> sum(p.numel() for p in model.parameters())
    52500
    """
    make = lookup("model", name, MODELS) if isinstance(name, str) else name
    if classes < 1 or not input_shape or min(input_shape) < 1:
        raise ConfigError(f"model {name!r}: input_shape={tuple(input_shape)}, classes={classes}")
    draw = init and lookup("initialization", init, INITS)
    with seeded([seed], torch.device("cpu")):
        model = make(input_shape, classes)
        for parameter in model.parameters():
            if draw and parameter.dim() > 1:
                draw(parameter.data)
    return model


@config_errors()
def embedding_of(model: nn.Module) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function from samples to the outputs of the first dense layer that runs.

    For sketches of embeddings: ``sketch.add(embedding_of(model)(x))``. The model is copied.

    Examples
    --------
    >>> embed = embedding_of(build("mlp-64-30", (28, 28), 10))
    >>> embed(np.zeros((5, 28, 28), np.float32)).shape
    (5, 64)
    """
    frozen = copy.deepcopy(model).eval()

    def embed(x: NDArray[Any]) -> NDArray[Any]:
        parts = []
        with torch.no_grad(), first_dense(frozen) as output:
            for first in range(0, len(x), BATCH):
                rows = torch.from_numpy(np.ascontiguousarray(x[first : first + BATCH]))
                parts.append(output(rows).flatten(1).numpy())
        return np.concatenate(parts)

    return embed
