"""Sketch-to-Skip: no model moves while small sketches say that nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.gates.base import Floats, Gate, register
from fedcohort.rounds import ClientId
from fedcohort.signals.projection import Projection


def drift(sketches: Floats, reference: Floats) -> NDArray[np.float64]:
    """Relative change of sketched models, ``||h_i - h|| / ||h||`` (paper 2, Algorithm 2 line 14).

    Where the reference is zero the ratio is undefined; it counts as infinite, unless the other
    sketch is zero as well. A sketch that is not finite gives NaN: that client did not answer.

    Examples
    --------
    >>> drift(np.array([[3.0, 4.0], [0.0, 5.5]]), np.array([0.0, 5.0])).tolist()
    [0.632455532033675..., 0.1]
    """
    rows = np.atleast_2d(np.asarray(sketches, np.float64))
    change = np.linalg.norm(rows - reference, axis=1)
    scale = float(np.linalg.norm(np.asarray(reference, np.float64)))
    if scale == 0:
        return np.where(change > 0, np.inf, change)
    return np.asarray(change / scale)


def model_close(sketch_a: Floats, sketch_b: Floats, threshold: float) -> bool:
    """Whether two remote models are close, by their sketches (paper 2, section 3.1).

    The predicate for any sender a and receiver b: if it holds, the sender keeps its model.

    Examples
    --------
    >>> model_close(np.array([1.0, 1.05]), np.array([1.0, 1.0]), threshold=0.05)
    True
    """
    _check_threshold(threshold)
    return bool(drift(sketch_a, sketch_b)[0] < threshold)


@dataclass
class SkipState:
    """What the server remembers: skips in a row, and the threshold as found from drifts."""

    skips: int = 0
    threshold: float | None = None
    drifts: list[float] = field(default_factory=list)


@register("sketch-to-skip")
class SketchToSkip(Gate):
    """Algorithm 2 of Kollias, Salonidis and Wang (paper 2).

    The server announces the k-number projection of its model; a client that trained compares its
    own projection with it and answers whether the relative change stays below the threshold. If it
    does for all that answered, nobody uploads and nothing is broadcast: the round is skipped, and
    the same clients go on. Otherwise the cohort uploads.

    Parameters
    ----------
    threshold : float or "auto", default="auto"
        The paper's delta, which it never states. "auto" watches the drift of rounds that start
        from a fresh global model and picks the threshold at which a cohort would skip `skip_rate`
        of the rounds; `state.threshold` says what it chose.
    k : int, default=100
        Sketch size.
    kind : {"uniform", "sparse", "gaussian"}
        The projection; the paper draws from U(-1, 1).
    seed : int, default=0
        Of the projection, shared by server and clients.
    mode : {"round", "client"}
        "round" is the paper's: all upload or none. "client" asks only those that moved.
    on_skip : {"keep", "reset"}
        "keep" lets clients that did not upload go on from what they learned, so that drift
        accumulates until it is worth sending. "reset" is the literal reading of Algorithm 2
        (line 6 sets the local model to the global one in every round): a threshold above the
        drift of a single round then skips until `max_skips`.
    max_skips : int, default=50
        Skipped rounds in a row after which everybody is asked, so that it cannot skip for ever.
    skip_rate : float, default=0.8
        Wanted share of skipped rounds, for "auto".
    adaptive : bool, default=False
        Go on adjusting an automatic threshold by the latest `window` drifts: training slows down,
        and a threshold fixed early skips more and more.
    window : int, default=20
        Drifts that "auto" looks at.

    Notes
    -----
    A lying client can suppress a round only together with everybody else, and then for at most
    `max_skips` rounds; by always claiming to have moved it can only cause the traffic that there
    would be without a gate.

    In "keep" mode a drift of D a round reaches m D after m rounds, so a share s of skipped rounds
    needs the threshold (m - 1/2) D with m = 1 / (1 - s) rounds a cycle. In "reset" mode it is the
    s-quantile of the drifts. D is the largest drift in the cohort ("round") or the median one
    ("client").

    An engine whose models do not live in main memory sets `project` to a function of its own.
    """

    def __init__(
        self,
        threshold: float | Literal["auto"] = "auto",
        k: int = 100,
        kind: Literal["uniform", "gaussian", "sparse"] = "uniform",
        seed: int = 0,
        *,
        mode: Literal["round", "client"] = "round",
        on_skip: Literal["keep", "reset"] = "keep",
        max_skips: int = 50,
        skip_rate: float = 0.8,
        adaptive: bool = False,
        window: int = 20,
    ) -> None:
        if threshold != "auto":
            _check_threshold(threshold)
        if k < 1 or max_skips < 0 or window < 1:
            raise ValueError(
                f"SketchToSkip: k={k} and window={window} must be at least 1, "
                f"max_skips={max_skips} at least 0"
            )
        if not 0 < skip_rate < 1:
            raise ValueError(f"SketchToSkip: skip_rate={skip_rate} must lie in (0, 1)")
        for name, value, known in (
            ("mode", mode, ("round", "client")),
            ("on_skip", on_skip, ("keep", "reset")),
        ):
            if value not in known:
                raise ValueError(f"SketchToSkip: {name}={value!r} must be one of {known}")
        self.k, self.kind, self.seed, self.mode = k, kind, seed, mode
        self.on_skip, self.max_skips = on_skip, max_skips
        self.skip_rate, self.adaptive, self.window = skip_rate, adaptive, window
        self.automatic = threshold == "auto"
        self.state = SkipState(threshold=None if threshold == "auto" else float(threshold))
        self.project: Callable[[Projection, Any], NDArray[np.float64]] = Projection.apply
        self._projection: Projection | None = None

    @property
    def options(self) -> Mapping[str, int | float | str | bool]:
        """The projection; the threshold is announced."""
        return {"k": self.k, "kind": self.kind, "seed": self.seed}

    def announce(self, model: Floats) -> NDArray[np.float32]:
        """Return the model's sketch and the threshold; NaN asks clients for their drift."""
        sketch = self._project(model[None])[0]
        server_decides = self.state.threshold is None or (self.automatic and self.adaptive)
        threshold = np.nan if server_decides else self.state.threshold
        return np.append(sketch, threshold).astype(np.float32)

    def probe(self, announced: NDArray[Any] | None, start: Floats, models: Floats) -> NDArray[Any]:
        """Return each client's flag (1: close, skip), or its drift if the server decides."""
        assert announced is not None
        sketch, threshold = announced[:-1], announced[-1]
        drifts = drift(self._project(models).astype(np.float32), sketch)
        if np.isnan(threshold):
            return drifts.astype(np.float32)[:, None]
        # 2 is the answer of a client whose model is not finite: it is not counted.
        flags = np.where(np.isnan(drifts), 2, drifts < threshold)
        return flags.astype(np.uint8)[:, None]

    def decide(self, answers: Mapping[ClientId, NDArray[Any]]) -> tuple[ClientId, ...]:
        """Skip if and only if all that answered are close."""
        close = self._close(answers)
        if not close:
            return ()
        moved = tuple(client for client, near in close.items() if not near)
        if not moved and self.state.skips < self.max_skips:
            self.state.skips += 1
            return ()
        self.state.skips = 0
        return tuple(close) if self.mode == "round" or not moved else moved

    def _close(self, answers: Mapping[ClientId, NDArray[Any]]) -> dict[ClientId, bool]:
        """Read flags or drifts; clients that sent neither are left out."""
        flags: dict[ClientId, bool] = {}
        drifts: dict[ClientId, float] = {}
        for client, answer in answers.items():
            if answer.shape != (1,):
                continue
            value = float(answer[0])
            if answer.dtype.kind == "f" and value >= 0:
                drifts[client] = value
            elif answer.dtype.kind in "bu" and value in (0, 1):
                flags[client] = bool(value)
        if drifts:
            limit = self.state.threshold
            self._learn(list(drifts.values()))
            flags |= {c: limit is not None and d < limit for c, d in drifts.items()}
        return {c: flags[c] for c in answers if c in flags}

    def _learn(self, drifts: list[float]) -> None:
        """Watch rounds that began from a fresh model; pick the threshold when enough were seen."""
        state = self.state
        if not self.automatic or state.skips:
            return
        finite = [d for d in drifts if np.isfinite(d)]
        if not finite or (len(state.drifts) >= self.window and not self.adaptive):
            return
        one = max(finite) if self.mode == "round" else float(np.median(finite))
        state.drifts = [*state.drifts, one][-self.window :]
        if len(state.drifts) == self.window:
            state.threshold = self._chosen(np.array(state.drifts))

    def _chosen(self, drifts: NDArray[np.float64]) -> float:
        if self.on_skip == "reset":
            return float(np.quantile(drifts, self.skip_rate))
        return float(np.median(drifts) * (1 / (1 - self.skip_rate) - 0.5))

    def _project(self, models: Floats) -> NDArray[np.float64]:
        dim = models.shape[1]
        if self.k > dim:
            raise ValueError(f"SketchToSkip: k={self.k} exceeds the model's {dim} parameters")
        if self._projection is None or self._projection.dim != dim:
            self._projection = Projection(dim, self.k, kind=self.kind, seed=self.seed)
        return self.project(self._projection, models)


def _check_threshold(threshold: float) -> None:
    if not (isinstance(threshold, int | float) and 0 < threshold < np.inf):
        raise ValueError(f"SketchToSkip: threshold={threshold!r} must be a positive number")
