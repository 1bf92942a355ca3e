"""PyTorch's global settings, changed inside a block and restored after it.

Three kinds: the precision of products, cuDNN for recurrent layers, and the random generators that
dropout draws from.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from modelstack.training import Unsupported

FUSED = {"cuda"}  # devices that use the fused Triton layers; remove one to use PyTorch's kernels
PRECISIONS = ("float32", "tf32")
TRITON_IS_HERE = find_spec("triton") is not None
_LOCKS: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)  # one per generator


def runs_triton(device: torch.device) -> bool:
    """Whether a device uses the fused Triton layers: a GPU needs the tensor cores of Ampere."""
    if device.type not in FUSED or not TRITON_IS_HERE:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def check_precision(mode: str, device: torch.device) -> str:
    """Return the mode, or raise Unsupported if it is unknown or the device does not have it."""
    if mode not in PRECISIONS:
        raise Unsupported(f"precision={mode!r} must be one of {', '.join(PRECISIONS)}")
    if mode == "tf32" and device.type != "cuda":
        raise Unsupported(f"precision='tf32' needs a GPU, not {device}: choose 'float32'")
    return mode


@contextmanager
def precision(device: torch.device, mode: str) -> Iterator[None]:
    """Set how a GPU rounds the factors of products: "tf32" to 10 bits of mantissa."""
    if device.type != "cuda":
        yield
        return
    kinds: Any = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = mode == "tf32"
        # Triton launches on the current device.
        with nullcontext() if device.index is None else torch.cuda.device(device):
            yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            kind.allow_tf32 = old


@contextmanager
def gradients_without_training(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode and keep its gradients available.

    cuDNN's recurrent layers have no gradient in that mode; PyTorch's own have one.
    """
    model.eval()
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = before and not any(isinstance(m, nn.RNNBase) for m in model.modules())
    try:
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def seeded(seeds: Sequence[int], device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Seed the device's generator inside the block and restore it after the block.

    Threads that use the same generator take turns.
    """
    if not wanted:
        yield
        return
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 6364136223846793005 + seed + 1442695040888963407) % 2**63
    with _LOCKS[str(device)]:
        generator = _generator(device)
        before = generator.get_state()
        generator.manual_seed(mixed)
        try:
            yield
        finally:
            generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    number = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[number]
    return generator
