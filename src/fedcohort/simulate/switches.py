"""PyTorch's global switches, set for a block of code and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def precision(device: torch.device, tf32: bool) -> Iterator[None]:
    """Let a GPU round the factors of products to 10 bits of mantissa, or forbid it."""
    if device.type != "cuda":
        yield
        return
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = tf32
    try:
        yield
    finally:
        for switch, old in zip(switches, before, strict=True):
            switch.allow_tf32 = old


@contextmanager
def gradients_without_training(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode such that it still has gradients.

    cuDNN's recurrent layers have none in that mode, PyTorch's own do.
    """
    model.eval()
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before
