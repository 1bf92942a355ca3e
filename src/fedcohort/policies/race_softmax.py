"""Sampling by closeness to the global distribution sketch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics.sampling import draw
from fedcohort.options import Count, NonNegative, Positive
from fedcohort.policies.base import Array, Indices, Policy, register, scored
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import GlobalSketch, errors, variance_between

LOG = logging.getLogger("fedcohort")

_PART = 1_024  # sketches that are copied at a time
_MIN_KEPT = 0.1  # share of a typical sketch's difference that is not noise
_MIN_DISTANCE = 1e-6  # a distance of zero counts as this, which keeps 1 / distance finite


@dataclass
class RaceSoftmaxState(GlobalSketch):
    """The global sketch so far."""

    warned: bool = False


@register("race-softmax", when="clients near the overall distribution should train more often")
class RaceSoftmax(Policy):
    """Algorithm 3 of Liu et al.

    Each client sends a one-pass sketch of its data, once. Clients are drawn one after the other in
    proportion to exp(1 / (temperature * distance)), where distance is that of the client's sketch
    to the sketch of the federation seen so far.

    Parameters
    ----------
    temperature : float, default=1.0
        The paper's law at 1; larger is closer to uniform. Distances grow with the root of `rows`.
    distance : {"frobenius", "row-l2"}
        The paper's, or its released code's (mean over rows), which is nearly an argmax.
    center : {"mean", "pooled"}
        The paper's unweighted mean of sketches, or the sketch of all data together.
    rows : int, default=50
        Rows of a sketch, of 64 buckets each.
    epsilon : float, default=0.0
        Privacy budget of a sketch (0: exact).
    everybody : bool, default=False
        Ask all clients for their sketch before the first round, as the paper does.

    Notes
    -----
    Source: paper, and the authors' released code for "row-l2".
    Checked: law by enumeration, distances against the definition, shrinkage by simulation.
    Reference: Liu et al. (2023), One-Pass Distribution Sketch, NeurIPS.

    A private sketch is shrunk toward the center by its share of error, and the variance that
    remains is added to its squared distance; else small clients would look far for their noise.
    Where sketches show little but noise, cohorts are random, and a warning says so once.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sketch = np.zeros(3, [("n", "f8"), ("noise", "f8"), ("counts", "i2", (1, 2))])
    >>> sketch["n"], sketch["counts"] = 100, [[[50, 50]], [[52, 48]], [[99, 1]]]
    >>> select(RaceSoftmax(), "abc", 1, race_sketch=dict(zip("abc", sketch))).clients
    ('b',)
    """

    needs = Needs(profile=frozenset({"race_sketch"}))

    def __init__(
        self,
        temperature: Positive = 1.0,
        distance: Literal["frobenius", "row-l2"] = "frobenius",
        center: Literal["mean", "pooled"] = "mean",
        rows: Count = 50,
        epsilon: NonNegative = 0.0,
        everybody: bool = False,
    ) -> None:
        self.temperature, self.distance = temperature, distance
        self.center, self.profile_first = center, everybody
        sketch = {"rows": rows, "bits": 6, "seed": 0, "label_weight": 0.0, "center": False}
        self.signal_options = {"race_sketch": sketch | {"epsilon": epsilon}}
        self.state = RaceSoftmaxState()
        self._kept: tuple[tuple[ClientId, ...], int, Array] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        self.state.include(signals, round.available, round.number)
        if not self.state.clients:
            return Selection(())
        logits = self._logits(round, signals)
        at = draw(logits, round.size, rng)
        return scored(round.available, at, logits[at])

    def _logits(self, round: Round, signals: Signals) -> Array:
        """Log-weights of the available clients, minus infinity without a sketch; kept."""
        kept = self._kept
        if kept is not None and kept[1] == self.state.changes and kept[0] == round.available:
            return kept[2]
        positions, squares, error, private = self._squares(round, signals)
        if private and len(positions):
            squares = self._shrunken(squares, error)
        by_row = self.distance == "row-l2"
        far = np.sqrt(squares).mean(axis=1) if by_row else np.sqrt(squares.sum(axis=1))
        logits = np.full(len(round.available), -np.inf)
        logits[positions] = 1 / (self.temperature * np.maximum(far, _MIN_DISTANCE))
        self._kept = (round.available, self.state.changes, logits)
        return logits

    def _squares(self, round: Round, signals: Signals) -> tuple[Indices, Array, Array, bool]:
        """Positions of clients with data, squared distances by row, error variances, any noise."""
        goal, private = self.state.center(self.center), False
        parts: list[tuple[NDArray[Any], ...]] = [
            (np.empty(0, np.int64), np.empty((0, len(goal))), np.empty(0))
        ]
        for start in range(0, len(round.available), _PART):
            part = round.available[start : start + _PART]
            positions, readings = signals.read("race_sketch", part)
            if not len(positions):
                continue
            filled = readings["n"] > 0
            positions, readings = start + positions[filled], readings[filled]
            q = readings["counts"] / readings["n"][:, None, None]
            lengths = np.einsum("irb,irb->i", q, q)
            q -= goal
            rows = np.einsum("irb,irb->ir", q, q)
            private |= bool((readings["noise"] > 0).any())
            parts.append((positions, rows, errors(readings, lengths, goal)))
        positions, rows, error = (np.concatenate(column) for column in zip(*parts, strict=True))
        return positions, rows, error, private

    def _shrunken(self, squares: Array, error: Array) -> Array:
        """Return expected squared distances by row, given the noisy ones."""
        spread, doubt = variance_between(squares.sum(axis=1), error)
        keep = spread / (spread + error)
        if spread <= 2 * doubt or float(np.median(keep)) < _MIN_KEPT:
            if not self.state.warned:
                LOG.warning(
                    "RaceSoftmax: the clients' private sketches show little but "
                    "noise; cohorts are random. Raise epsilon or use fewer rows"
                )
            self.state.warned = True
            return np.ones_like(squares)
        rest = spread * (1 - keep) / squares.shape[1]
        return np.asarray(keep[:, None] ** 2 * squares + rest[:, None])
