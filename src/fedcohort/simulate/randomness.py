"""Random numbers inside a model, such as dropout's, without touching anyone else's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
