"""Random shifts and mirror images of what jobs train on.

They depend on the job's own generator only, so they are the same on every engine and device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelstack.jobs import Data, Job
from modelstack.training import Unsupported

SHIFT = 4  # pixels, at most, in each direction


class Augmented:
    """The transformed samples of a round's jobs, in memory that a CUDA graph can read.

    The memory is used again in the next round: a captured step goes on reading from it.
    """

    def __init__(self) -> None:
        self.held: Data | None = None

    def transform(self, jobs: Sequence[Job], data: Data) -> tuple[list[Job], Data]:
        """Return jobs that train on transformed copies of their samples, and these copies."""
        shape = tuple(data.x.shape[1:])
        if len(shape) < 2 or not data.x.is_floating_point():
            raise Unsupported(
                f"Training: augment='crop-flip' needs images, but a sample is {shape} "
                f"numbers of type {str(data.x.dtype).removeprefix('torch.')}"
            )
        ends = np.cumsum([len(job.positions) for job in jobs]).tolist()
        held = self._room(ends[-1], data)
        moved = []
        for job, last in zip(jobs, ends, strict=True):
            first = last - len(job.positions)
            at = torch.from_numpy(job.positions).to(data.x.device)
            if job.augment is None:
                raise Unsupported("a job without `augment` cannot be augmented: give it one")
            held.x[first:last] = crop_flip(data.x[at], job.augment())
            held.y[first:last] = data.y[at]
            moved.append(job._replace(positions=np.arange(first, last)))
        return moved, held

    def _room(self, samples: int, data: Data) -> Data:
        if self.held is None or len(self.held.x) < samples:
            x, y = (values.new_empty(samples, *values.shape[1:]) for values in data)
            self.held = Data(x, y)
        return self.held


def crop_flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images shifted by up to four pixels over zeros, and half of them mirrored.

    The last two axes are height and width. It is what cropping at random after padding by four
    pixels, and flipping at random, give.

    Examples
    --------
    >>> crop_flip(torch.ones(2, 1, 8, 8), np.random.default_rng(0)).sum(dim=(1, 2, 3)).tolist()
    [40.0, 42.0]
    """
    count, height, width = len(x), *x.shape[-2:]
    drawn = rng.integers(0, [[2 * SHIFT + 1], [2 * SHIFT + 1], [2]], (3, count))
    down, right, mirrored = torch.from_numpy(drawn).to(x.device).unsqueeze(2)
    across = torch.arange(width, device=x.device)
    rows = torch.arange(height, device=x.device) + SHIFT - down
    columns = torch.where(mirrored == 1, width - 1 - across, across) + SHIFT - right
    inside = ((rows >= 0) & (rows < height)).unsqueeze(2)
    inside = inside & ((columns >= 0) & (columns < width)).unsqueeze(1)
    at = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    pixels = x.reshape(count, -1, height * width)
    moved: Tensor = pixels.gather(2, at.view(count, 1, -1).expand(-1, pixels.shape[1], -1))
    return moved.mul_(inside.view(count, 1, -1)).view(x.shape)
