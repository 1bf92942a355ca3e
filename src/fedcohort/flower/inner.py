"""What the wrapper must know about the strategy inside it: its weights, its state, its chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedcohort.exceptions import ConfigError
from fedcohort.flower.arrays import as_saved, from_saved
from fedcohort.policies.base import Policy

RECORD_MARK = "__record__"


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy and those that it wraps, outermost first."""
    seen: Any = strategy
    while isinstance(seen, Strategy):
        yield seen
        seen = getattr(seen, "strategy", None)


def weight_key(strategy: Strategy) -> str:
    """Return the metric by which the innermost strategy weighs updates."""
    keys = [getattr(s, "weighted_by_key", None) for s in chain(strategy)]
    return next((key for key in reversed(keys) if isinstance(key, str)), "num-examples")


def check(strategy: Strategy, *, gate: bool, checkpoint: bool) -> None:
    """Refuse combinations that would break a promise of the inner strategy."""
    for one in chain(strategy):
        name = type(one).__name__
        if gate and name.startswith("DifferentialPrivacyClientSide"):
            raise ConfigError(
                f"CohortStrategy: a gate lets updates grow over rounds, beyond what {name} clips; "
                "use its server-side counterpart, or no gate"
            )
        if checkpoint and getattr(one, "accountant", None) is not None:
            raise ConfigError(
                f"CohortStrategy: the privacy accountant of {name} is not kept in a checkpoint; "
                "leave out checkpoint, or the accountant"
            )


def check_policy(policy: Policy, has_center: bool) -> None:
    """Refuse policies whose signals cannot be had."""
    options = policy.signal_options
    if options.get("race_sketch", {}).get("center") and not has_center:
        raise ConfigError(
            "CohortStrategy: the policy's sketches are centered: pass center=, the mean of a "
            "public data set, or turn its centering off"
        )
    if options.get("update_distance", {}).get("insight_step"):
        raise ConfigError(
            "CohortStrategy: insight_step=True needs full gradients, which updates do not "
            "carry; use a policy with insight_step=False"
        )


def settings(strategy: Strategy) -> list[dict[str, Any]]:
    """Return the numbers that strategies were made with, to tell them from what they learn."""
    plain = bool | int | float
    return [{k: v for k, v in vars(s).items() if isinstance(v, plain)} for s in chain(strategy)]


def state_dict(strategy: Strategy, made_with: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what strategies learned: arrays, and numbers that are no longer what they were.

    Server optimizers keep moments, adaptive clipping its norm; all are attributes.
    """
    states = []
    for one, fixed in zip(chain(strategy), made_with, strict=True):
        learned = {k: v for k, v in vars(one).items() if k not in fixed or fixed[k] != v}
        states.append({k: s for k, v in learned.items() if (s := _saved(v)) is not None})
    return states


def load_state_dict(strategy: Strategy, states: list[Mapping[str, Any]]) -> None:
    """Restore what `state_dict` returned."""
    for one, state in zip(chain(strategy), states, strict=True):
        for name, value in state.items():
            setattr(one, name, _restored(value))


def _saved(value: Any) -> Any:
    """Return a value as a checkpoint can hold it, None for what is no state."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return value
    if isinstance(value, ArrayRecord):
        return {RECORD_MARK: as_saved(value)}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    arrays = [isinstance(part, np.ndarray) for part in parts]
    return value if arrays and all(arrays) else None


def _restored(value: Any) -> Any:
    if isinstance(value, dict) and RECORD_MARK in value:
        return from_saved(value[RECORD_MARK])
    return value
