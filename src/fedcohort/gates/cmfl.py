"""CMFL: upload only updates whose signs agree with the last global update."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.gates.base import Answers, Gate, Message, numbers, register
from fedcohort.options import Share
from fedcohort.rounds import ClientId
from fedcohort.signals.projection import Vectors

LOG = logging.getLogger("fedcohort")
MAX_SILENT = 20  # rounds in a row without an upload, after which the gate warns


@dataclass
class CMFLState:
    """The last global step, the rounds so far, and those since the last upload."""

    step: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    rounds: int = 0
    silent: int = 0


@register("cmfl")
class CMFL(Gate):
    """Communication-mitigated federated learning of Wang, Wang and Li; paper 1's benchmark.

    The server announces the signs of its last step, two bits per parameter. A client uploads if at
    least a `threshold` share of the signs of its update agrees. In the first round everybody does.
    If nobody agrees enough for 20 rounds in a row, the gate warns.

    Parameters
    ----------
    threshold : float, default=0.6
        Smallest share of agreeing signs.
    decay : bool, default=False
        Divide it by the square root of the round number, as one of the sources does.

    Notes
    -----
    Source: reimplementations, with thresholds of .6, .7 and .8; the paper's text could not be had.
    Checked: agreement and thresholds by hand.
    Reference: Wang, Wang, Li (2019), CMFL: Mitigating Communication Overhead, ICDCS.

    Two zeros agree; one of the sources counts them as unlike.
    """

    on_skip: Literal["keep", "reset"] = "reset"

    def __init__(self, threshold: Share = 0.6, decay: bool = False) -> None:
        self.threshold, self.decay = threshold, decay
        self.state = CMFLState()

    def announce(self, model: Vectors) -> NDArray[np.uint8]:
        """Return the packed signs of the last global step, empty in the first round."""
        step = self.state.step
        return np.packbits([step > 0, step < 0], axis=1).ravel()

    def probe(self, announced: Message, start: Vectors, models: Vectors) -> NDArray[Any]:
        """Return each client's share of agreeing signs; all agree before the first step."""
        assert announced is not None
        trained = models.numpy()
        if not len(announced):
            return np.ones((len(trained), 1), np.float32)
        bits = np.unpackbits(announced.reshape(2, -1), axis=1, count=models.dim).astype(np.int8)
        signs = np.sign(trained - start.numpy())
        shares = np.asarray((signs == bits[0] - bits[1]).mean(axis=1))
        shares[~np.isfinite(trained).all(axis=1)] = np.nan
        return shares.astype(np.float32)[:, None]

    def decide(self, answers: Answers) -> tuple[ClientId, ...]:
        self.state.rounds += 1
        limit = self.threshold / (np.sqrt(self.state.rounds) if self.decay else 1.0)
        asked = [c for c, share in numbers(answers).items() if limit <= share <= 1]
        self.state.silent = 0 if asked else self.state.silent + 1
        if self.state.silent == MAX_SILENT:
            LOG.warning(
                "CMFL: no update passed in the last %d rounds, so the model stands still; "
                "lower threshold=%g or set decay=True",
                MAX_SILENT,
                self.threshold,
            )
        return tuple(asked)

    def aggregated(self, before: Vectors, after: Vectors) -> None:
        self.state.step = np.asarray(after.numpy()[0] - before.numpy()[0], np.float32)
