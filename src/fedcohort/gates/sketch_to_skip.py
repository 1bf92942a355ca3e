"""Sketch-to-Skip: no model moves while small sketches say that nothing changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.gates.base import Answers, Gate, Message, numbers, register
from fedcohort.options import Count, Positive, Range, Whole, typed
from fedcohort.rounds import ClientId
from fedcohort.signals.projection import Projection, Vectors

Floats = NDArray[np.floating[Any]]

_GAIN = 0.1  # of the adaptive threshold
_MAX_DRIFT = 2.0  # times the cohort's median: what "auto" believes of a single client
_MIN_THRESHOLD = 1e-12  # of an automatic one: models that did not move at all are close


def drift(sketches: Floats, reference: Floats) -> NDArray[np.float64]:
    """Relative change of sketched models, ``||h_i - h|| / ||h||`` (paper 2, Algorithm 2 line 14).

    From a reference of zero any change is infinite. A sketch that is not finite gives NaN.
    """
    rows = np.atleast_2d(np.asarray(sketches, np.float64))
    change = np.linalg.norm(rows - reference, axis=1)
    scale = float(np.linalg.norm(np.asarray(reference, np.float64)))
    if scale == 0:
        return np.where(change > 0, np.inf, change)
    return np.asarray(change / scale)


def model_close(sketch_a: Floats, sketch_b: Floats, threshold: float) -> bool:
    """Whether two remote models are so close that the sender keeps its own (paper 2, section 3.1).

    Examples
    --------
    >>> model_close(np.array([1.0, 1.05]), np.array([1.0, 1.0]), threshold=0.05)
    True
    """
    typed(Positive, threshold, "model_close: threshold")
    if np.shape(sketch_a) != np.shape(sketch_b) or np.ndim(sketch_a) != 1:
        raise ValueError(
            f"model_close: sketches of shapes {np.shape(sketch_a)} and {np.shape(sketch_b)} cannot "
            "be compared; project both models with the same k and seed"
        )
    return bool(drift(sketch_a, sketch_b)[0] < threshold)


@dataclass
class SkipState:
    """What the server remembers: skips in a row, and the threshold as found from the drifts."""

    skips: int = 0
    threshold: float | None = None
    drifts: list[float] = field(default_factory=list)


@register("sketch-to-skip")
class SketchToSkip(Gate):
    """Algorithm 2 of Kollias, Salonidis and Wang.

    The server announces the k-number projection of its model; clients that trained answer whether
    the relative change of theirs is below the threshold. If it is for all that answered, the round
    is skipped, and the same clients go on. Otherwise the cohort uploads.

    Parameters
    ----------
    threshold : float or "auto", default="auto"
        The paper's delta, which it never states. "auto" finds the threshold at which a cohort skips
        `skip_rate` of the rounds; it is then in `state.threshold`.
    k : int, default=100
        Length of the projection. A model with fewer parameters is compared as it is.
    mode : {"round", "client"}
        "round" is the paper's: all upload or none. "client" asks only those that moved. The mean is
        over those, which is a larger step than FedAvg's: good on like data and bad on unlike.
    on_skip : {"keep", "reset"}
        Where clients that did not upload go on: from what they learned, so that drift accumulates,
        or from the global model, as in the literal Algorithm 2, where a threshold above the drift
        of a single round skips until `max_skips`.
    max_skips : int, default=50
        Skipped rounds in a row after which everybody is asked.
    skip_rate : float, default=0.8
        Wanted share of skipped rounds, for "auto".
    window : int, default=20
        Rounds that "auto" watches, or a few more to complete a cycle. It adjusts ever after,
        because drift shrinks as training slows down.

    Notes
    -----
    Source: paper.
    Checked: flags against projections by hand, decisions and automatic thresholds by cases.
    Reference: Kollias, Salonidis, Wang (2022), Sketch to Skip and Select.

    To skip a share s, "keep" needs cycles of m = 1 / (1 - s) rounds. While "auto" watches, cycles
    are that long; its threshold is halfway between the median drifts after m - 1 and m rounds, and
    for "reset" the s-quantile of the drifts. A cohort's drift is its median ("client"), or its
    largest, but at most twice its median ("round"). Every round multiplies the threshold by exp(0.1
    (u - (1 - s))), u being the share of clients asked.
    """

    def __init__(
        self,
        threshold: Positive | Literal["auto"] = "auto",
        k: Count = 100,
        *,
        mode: Literal["round", "client"] = "round",
        on_skip: Literal["keep", "reset"] = "keep",
        max_skips: Whole = 50,
        skip_rate: Annotated[float, Range(0.01, 0.99)] = 0.8,
        window: Count = 20,
    ) -> None:
        self.k, self.mode = k, mode
        self.on_skip, self.max_skips = on_skip, max_skips
        self.skip_rate, self.window = skip_rate, window
        self.carries_over = mode == "client"
        self.automatic = threshold == "auto"
        self.state = SkipState(threshold=None if threshold == "auto" else float(threshold))

    @property
    def client_options(self) -> Mapping[str, int | float | str | bool]:
        """The projection; the threshold is announced."""
        return {"k": self.k}

    def announce(self, model: Vectors) -> NDArray[np.float32]:
        """Return the model's sketch and the threshold; NaN asks clients for their drift."""
        sketch = self._project(model)[0]
        threshold = np.nan if self.state.threshold is None else self.state.threshold
        return np.append(sketch, threshold).astype(np.float32)

    def probe(self, announced: Message, start: Vectors, models: Vectors) -> NDArray[Any]:
        """Return each client's flag (1: close, skip), or its drift until a threshold is set."""
        assert announced is not None
        sketch, threshold = announced[:-1], announced[-1]
        drifts = drift(self._project(models).astype(np.float32), sketch)
        if np.isnan(threshold):
            return drifts.astype(np.float32)[:, None]
        # A client whose model is not finite answers 2, which is not counted.
        flags = np.where(np.isnan(drifts), 2, drifts < threshold)
        return flags.astype(np.uint8)[:, None]

    def decide(self, answers: Answers) -> tuple[ClientId, ...]:
        """Skip if and only if all that answered are close."""
        if self.state.threshold is None:
            return self._watch(numbers(answers))
        close = {c: bool(v) for c, v in numbers(answers, "bu").items() if v in (0, 1)}
        if not close:
            return ()
        asked = tuple(client for client, near in close.items() if not near)
        if not asked and self.state.skips < self.max_skips:
            self.state.skips += 1
        else:
            self.state.skips = 0
            asked = tuple(close) if self.mode == "round" or not asked else asked
        if self.automatic:
            excess = len(asked) / len(close) - (1 - self.skip_rate)
            self.state.threshold *= math.exp(_GAIN * excess)
        return asked

    def _watch(self, drifts: dict[ClientId, float]) -> tuple[ClientId, ...]:
        """Skip as often as is wanted, note the drifts, and pick the threshold when all are seen."""
        state, cycle = self.state, 1  # rounds from one upload to the next
        if self.on_skip == "keep":
            cycle = min(math.ceil(1 / (1 - self.skip_rate) - 1e-9), self.max_skips + 1)
        finite = [d for d in drifts.values() if math.isfinite(d)]
        if finite:
            middle = float(np.median(finite))
            if self.mode == "round":
                middle = min(max(finite), _MAX_DRIFT * middle)
            state.drifts = [*state.drifts, middle]
        else:  # a model of zeros, or nobody answered: begin the cycle again
            state.drifts = state.drifts[: len(state.drifts) // cycle * cycle]
        if len(state.drifts) % cycle:
            state.skips += 1
            return ()
        state.skips = 0
        if len(state.drifts) >= self.window:
            chosen = self._chosen(np.array(state.drifts).reshape(-1, cycle))
            state.threshold = max(chosen, _MIN_THRESHOLD)
        return tuple(drifts)

    def _chosen(self, drifts: NDArray[np.float64]) -> float:
        """Return the threshold from drifts, (cycles, rounds of a cycle)."""
        if self.on_skip == "reset":
            return float(np.quantile(drifts, self.skip_rate))
        growth = [0.0, *np.median(drifts, axis=0)]
        return float(np.interp(1 / (1 - self.skip_rate) - 0.5, range(len(growth)), growth))

    def _project(self, models: Vectors) -> NDArray[np.float64]:
        k = min(self.k, models.dim)
        return models.project(Projection(models.dim, k, seed=0))
