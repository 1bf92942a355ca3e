"""Sampling by closeness to the global distribution sketch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics.sampling import successive_inclusion
from fedcohort.policies.base import (
    Policy,
    check_at_least,
    check_weights,
    draw,
    inverse_inclusion,
    register,
)
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import GlobalSketch

Array = NDArray[np.float64]

_PART = 1_024  # sketches that are copied at a time
_SMALLEST = 1e-6  # a distance of zero counts as this, which keeps 1 / distance finite


@dataclass
class RaceSoftmaxState(GlobalSketch):
    """The global sketch so far."""


@register("race-softmax", when="clients near the overall distribution should train more often")
class RaceSoftmax(Policy):
    """Algorithm 3 of Liu et al. [1]_.

    Each client sends a one-pass sketch of its data, once. Clients are drawn one after the other,
    without replacement, in proportion to exp(1 / (temperature * distance)), where distance is that
    of the client's sketch to the sketch of the federation seen so far.

    Parameters
    ----------
    temperature : float, default=1.0
        The paper's law at 1; larger is closer to uniform. The Frobenius distance grows with the
        root of `rows`, so the same temperature means less with more rows.
    distance : {"frobenius", "row-l2"}
        The paper's, or its released code's (mean over rows), which is nearly an argmax.
    debias : bool, optional
        Remove from the distance what is only sample size and noise; without it, small clients
        look far from everybody. A debiased square is at least its standard error: by chance it can
        fall to zero or below, and exp(1 / distance) would then pick the same few clients always.
        None debiases private sketches only.
    center : {"mean", "pooled"}
        The paper's unweighted mean of sketches, or the sketch of all data together.
    weights : {None, "inverse-inclusion"}
        "inverse-inclusion" weights each picked client by its share of the data over its probability
        of being picked, which makes the aggregate unbiased.
    rows, bits, seed, label_weight, centered, epsilon
        How sketches are made: rows of 2^bits buckets; weight of the label appended to the input (0:
        none); whether inputs are centered by public constants; privacy budget (0: exact).

    Notes
    -----
    Clients without a usable sketch are picked only when too few others are available. Distances
    are kept until the federation or the available clients change.

    References
    ----------
    .. [1] Liu et al. (2023), One-Pass Distribution Sketch for Measuring Data Heterogeneity in
       Federated Learning, NeurIPS.

    Examples
    --------
    >>> sketch = np.zeros(3, [("n", "f8"), ("noise", "f8"), ("counts", "i2", (1, 2))])
    >>> sketch["n"], sketch["counts"] = 100, [[[50, 50]], [[52, 48]], [[99, 1]]]
    >>> signals = Signals()
    >>> _ = signals.record("race_sketch", dict(zip("abc", sketch)), stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c"), cohort_size=1)
    >>> selection = RaceSoftmax().select(round, signals, np.random.default_rng(0))
    >>> selection.clients, f"{selection.scores['b']:.3f}"      # with its inclusion probability
    (('b',), '0.604')
    """

    needs = Needs(profile=frozenset({"race_sketch"}))

    def __init__(
        self,
        temperature: float = 1.0,
        distance: Literal["frobenius", "row-l2"] = "frobenius",
        debias: bool | None = None,
        center: str = "mean",
        weights: str | None = None,
        rows: int = 50,
        bits: int = 6,
        seed: int = 0,
        label_weight: float = 0.0,
        centered: bool = False,
        epsilon: float = 0.0,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"RaceSoftmax: temperature={temperature} must be positive")
        if distance not in ("frobenius", "row-l2"):
            raise ValueError(f"RaceSoftmax: distance={distance!r} must be 'frobenius' or 'row-l2'")
        if center not in ("mean", "pooled"):
            raise ValueError(f"RaceSoftmax: center={center!r} must be 'mean' or 'pooled'")
        check_weights("RaceSoftmax", weights)
        check_at_least("RaceSoftmax", 0, label_weight=label_weight, epsilon=epsilon)
        self.temperature, self.distance, self.debias = temperature, distance, debias
        self.center, self.weights = center, weights
        options: dict[str, Option] = {"rows": rows, "bits": bits, "seed": seed}
        options |= {"label_weight": label_weight, "center": centered, "epsilon": epsilon}
        self.signal_options = {"race_sketch": options}
        self.state = RaceSoftmaxState()
        self._kept: tuple[tuple[ClientId, ...], int, Array, Array] | None = None
        self._chances: tuple[int, Array] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw the cohort without replacement."""
        self.state.include(signals, round.available, round.number)
        if not self.state.clients:
            return Selection(())
        logits, n = self._logits(round, signals)
        at = draw(logits, round.size, rng)
        chosen = tuple(round.available[i] for i in at.tolist())
        inclusion = self._inclusion(logits, round.size)[at]
        weights = None
        if self.weights is not None:
            weights = inverse_inclusion(n[at] / n.sum(), inclusion)
        return Selection(chosen, weights, dict(zip(chosen, inclusion.tolist(), strict=True)))

    def _logits(self, round: Round, signals: Signals) -> tuple[Array, Array]:
        """Log-weights of the available clients and their sizes; minus infinity without a sketch."""
        kept = self._kept
        if kept is not None and kept[1] == self.state.changes and kept[0] == round.available:
            return kept[2], kept[3]
        logits, n = np.full(len(round.available), -np.inf), np.zeros(len(round.available))
        debias = self.debias
        if debias is None:
            debias = bool((signals.field("race_sketch", "noise", round.available) > 0).any())
        for positions, readings in signals.read_parts("race_sketch", round.available, _PART):
            far = self.state.distances(readings, self.center, self.distance, debias, debias)
            usable = np.isfinite(far)
            logits[positions[usable]] = 1 / (self.temperature * np.maximum(far[usable], _SMALLEST))
            n[positions] = np.maximum(readings["n"], 0.0)
        self._kept, self._chances = (round.available, self.state.changes, logits, n), None
        return logits, n

    def _inclusion(self, logits: Array, size: int) -> Array:
        if self._chances is None or self._chances[0] != size:
            self._chances = (size, successive_inclusion(logits, size))
        return self._chances[1]
