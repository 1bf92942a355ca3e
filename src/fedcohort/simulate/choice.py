"""Which engine and device suit a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedcohort.exceptions import ConfigError
from fedcohort.simulate import stacked

ENGINES = ("auto", "loop", "stacked", "vmap")


def choose(engine: str, model: nn.Module, device: torch.device) -> str:
    """Return the engine to use: the one asked for, if the model allows it, or the fastest.

    Examples
    --------
    >>> choose("auto", nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.device("cpu"))
    'stacked'
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    mixes = any(isinstance(module, _NormBase) for module in model.modules())
    stackable = stacked.modules(model) is not None
    if engine == "stacked" and not stackable:
        raise ConfigError(
            "engine='stacked' needs an nn.Sequential of Flatten, Linear, Conv2d, MaxPool2d, "
            "LocalResponseNorm, Dropout, ReLU, Tanh and Sigmoid layers: choose 'vmap', 'loop' or "
            "'auto'"
        )
    if engine == "vmap" and mixes:
        raise ConfigError("batch norm sees padding when clients are batched: choose engine='loop'")
    if engine != "auto":
        return engine
    if device.type == "cpu":  # batched convolutions and recurrences lose to the loop there
        images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        return "stacked" if stackable and not images else "loop"
    return "loop" if mixes else "stacked" if stackable else "vmap"


def check(model: nn.Module) -> None:
    """Refuse models that have nothing to train, or state that federated averaging would lose."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise ConfigError(
                f"layer {name!r} ({type(module).__name__}) tracks running statistics, which are no "
                "parameters and would not be averaged: use nn.GroupNorm, or "
                "track_running_stats=False"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameter")


def room(device: torch.device) -> int:
    """Return the bytes for clients side by side: what a CPU's cache holds, a quarter of a GPU."""
    if device.type == "cpu":
        return 2**24
    return int(torch.cuda.get_device_properties(device).total_memory) // 4


def device_name(name: str) -> str:
    """Return the device to use."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but PyTorch sees no GPU: choose 'cpu' or 'auto'")
    return name
