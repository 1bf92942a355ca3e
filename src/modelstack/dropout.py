"""Dropout masks that depend on the client, the step and the place, and on nothing else.

A generator would draw the masks of all clients that train side by side, so that they would change
with the grouping. Here each entry of a mask is a hash of the client's seed, the number of the step,
the layer and the entry's position among the client's own, sample by sample. The hash is the
finalizer of MurmurHash3, used several times, in 32-bit integers that wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelstack.switches import runs_triton

GOLDEN = -1640531527  # 2^32 / golden ratio, odd
FIRST, SECOND = -2048144789, -1028477387
BITS = 24  # of a hash that are compared with the probability


class MaskKeys:
    """What the masks of stacked clients depend on, in memory that a CUDA graph can read.

    `words` is int32 (clients, 2): each client's seed. `step` counts the steps of the round.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.words = torch.zeros(clients, 2, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def restart(self, seeds: Sequence[int]) -> None:
        """Begin a round of clients with these seeds, of at most 63 bits."""
        both = torch.tensor([[_signed(seed), _signed(seed >> 32)] for seed in seeds])
        self.words[: len(seeds)] = both.to(torch.int32)
        self.step.zero_()

    def next_step(self) -> None:
        """Go on to the next step."""
        self.step.add_(1)


def _signed(word: int) -> int:
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _mix(word: Tensor) -> Tensor:
    """Return the finalizer of MurmurHash3; PyTorch shifts signed numbers, so high bits are cut."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * FIRST
    word = (word ^ ((word >> 13) & 0x7FFFF)) * SECOND
    return word ^ ((word >> 16) & 0xFFFF)


def layer_words(words: Tensor, step: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Return two numbers per client that all of a layer's mask in a step depends on."""
    first = _mix(_mix(words[..., 0] + step * GOLDEN) + _signed(place * 0x85EBCA6B))
    return first, _mix(first ^ words[..., 1])


def keep_entries(first: Tensor, second: Tensor, position: Tensor, keep: float) -> Tensor:
    """Return which entries are kept, by their positions; the arguments are broadcast."""
    word = _mix(_mix((position * GOLDEN) ^ first) + second)
    return ((word >> (32 - BITS)) & ((1 << BITS) - 1)) < round(keep * (1 << BITS))


def fill_mask(keys: MaskKeys, place: int, keep: float, mask: Tensor) -> None:
    """Write 1 / keep to the kept entries of a mask, (clients, entries), and 0 to the others."""
    words = keys.words[: len(mask)]
    if runs_triton(mask.device):
        from modelstack import _triton_dropout

        kernels: Any = _triton_dropout
        kernels.fill(words, keys.step, place, keep, mask)
        return
    position = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    first, second = layer_words(words, keys.step, place)
    mask.copy_(keep_entries(first[:, None], second[:, None], position, keep))
    mask.mul_(1 / max(keep, 1e-30))


class HashedDropout(TorchFunctionMode):
    """Inside it, `F.dropout` and its forms for channels use such masks, for one client.

    Other random functions, such as the dropout inside `scaled_dot_product_attention`, still draw
    from the generator.
    """

    def __init__(self, words: Tensor, step: Tensor) -> None:
        super().__init__()
        self.words, self.step, self.calls = words, step, 0

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, given: Any = (), named: Any = None
    ) -> Any:
        """Replace dropout and pass everything else on."""
        named = named or {}
        if function in _CHANNELS:
            return self._drop(_CHANNELS[function], *given, **named)
        return function(*given, **named)

    def _drop(
        self,
        axes: int | None,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        shape = input.shape if axes is None else input.shape[:axes] + (1,) * (input.dim() - axes)
        position = torch.arange(shape.numel(), dtype=torch.int32, device=input.device).view(shape)
        first, second = layer_words(self.words, self.step, self.calls)
        self.calls += 1
        kept = keep_entries(first, second, position, 1.0 - p)
        dropped = input * (kept / max(1.0 - p, 1e-30))
        return input.copy_(dropped) if inplace else dropped


# The number of leading axes that the mask has: all, or samples and channels.
_CHANNELS: dict[Any, int | None] = {
    F.dropout: None,
    F.dropout1d: 2,
    F.dropout2d: 2,
    F.dropout3d: 2,
}
