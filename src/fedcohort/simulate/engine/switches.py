"""PyTorch's global switches, set for a block of code and put back after it.

Random numbers inside a model, such as dropout's, without touching anyone else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@contextmanager
def seeded(seeds: Sequence[int], device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Seed PyTorch's generators inside the block and put them back after it.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with seeded([1, 2], torch.device("cpu")):
    ...     a = torch.rand(())
    >>> with seeded([1, 2], torch.device("cpu")):
    ...     b = torch.rand(())
    >>> bool(a == b), bool((torch.get_rng_state() == before).all())
    (True, True)
    """
    if not wanted:
        yield
        return
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 6364136223846793005 + seed + 1442695040888963407) % 2**63
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(mixed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(mixed)
        yield
