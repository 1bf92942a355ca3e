"""Driving a kernel through the steps of a cohort on a CPU."""

from __future__ import annotations

import numpy as np

from fedcohort.simulate.jobs import Data, Lockstep
from fedcohort.simulate.kernel import Kernel


class Stepper:
    """Feeds a kernel its batches, gathered into memory that is used again and again."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.x, self.y = data.x.numpy(), data.y.numpy()

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Do nothing: steps are made when they are first taken."""

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; finished clients are left alone."""
        even = _even(together)
        table = together.index(0, len(together.active))
        for t, (clients, samples) in enumerate(zip(together.active, together.width, strict=True)):
            # Few sizes, so that each step's preparation is used often.
            width = samples if even[t] else together.batch
            step = kernel.step(clients, width, self.data)
            index = table[:clients, t, :width].ravel()
            # The default mode copies twice.
            np.take(self.x, index, axis=0, out=step.x.flatten(0, 1).numpy(), mode="clip")
            np.take(self.y, index, axis=0, out=step.y.flatten(0, 1).numpy(), mode="clip")
            scale = together.scale[t, :clients]
            if even[t]:
                step.weight.fill_(float(scale[0]))
            else:
                real = np.arange(width) < together.count[t, :clients, None]
                np.multiply(scale[:, None], real, out=step.weight.numpy())
            step.rate.numpy()[:] = together.rate[t, :clients]
            step.eps.fill_(float(together.eps[t]))
            step.run()


def _even(together: Lockstep) -> list[bool]:
    """Whether the active clients of a step have batches of one size and one weight."""
    width = np.array(together.width)[:, None]
    same = (together.count == width) & (together.scale == together.scale[:, :1])
    even: list[bool] = (same | (together.count == 0)).all(axis=1).tolist()
    return even
