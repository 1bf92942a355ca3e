"""What `CohortStrategy` must know about the strategy inside it.

Its chain of wrapped strategies, the metric it weighs by, what its replies hold, what it cannot be
combined with, and what it has learned so far.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.arrays import as_saved, from_saved, is_float
from fedcohort.gates import Gate
from fedcohort.policies.base import Policy
from fedcohort.signals.catalog import SIGNALS

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
    """Refuse what is no strategy of the message API, and what would break a promise of one."""
    if not isinstance(strategy, Strategy):
        kind = type(strategy)
        raise ConfigError(
            f"CohortStrategy: {kind.__module__}.{kind.__name__} is not a strategy of Flower's "
            "message API; use its counterpart in flwr.serverapp.strategy"
        )
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
    """Refuse policies whose signals clients cannot compute."""
    options = policy.signal_options
    if options.get("race_sketch", {}).get("center") and not has_center:
        raise ConfigError(
            "CohortStrategy: the policy's sketches are centered: pass center=, the mean of a "
            "public data set, or turn its centering off"
        )
    if options.get("race_sketch", {}).get("embed"):
        raise ConfigError(
            "CohortStrategy: embed= is for simulations; in Flower let the clients' data function "
            "return embedded inputs, attach(app, data=...)"
        )
    if options.get("update_distance", {}).get("insight_step"):
        raise ConfigError(
            "CohortStrategy: insight_step needs full gradients, which updates do not "
            "carry; use reward='gradient-sketch'"
        )


def update_users(policy: Policy, gate: Gate | None) -> list[str]:
    """Return what needs the clients' updates as vectors: signals made of them, and a gate."""
    signals = [SIGNALS[name] for name in sorted(policy.needs.reply)]
    users = [f"the signal {s.name!r}" for s in signals if s.work == "server" and s.model != "none"]
    return users if gate is None else [*users, f"the gate {gate.name!r}"]


def check_cohort_size(strategy: Strategy, cohort_size: int | None) -> None:
    """Refuse cohorts of which the inner strategy would keep one update only."""
    cyclic = any(type(one).__name__ == "FedXgbCyclic" for one in chain(strategy))
    if cyclic and cohort_size is not None and cohort_size > 1:
        raise ConfigError(
            f"CohortStrategy: cohort_size={cohort_size}, but FedXgbCyclic keeps one update per "
            "round: use cohort_size=1, or FedXgbBagging"
        )


def reply_kind(
    strategy: Strategy, arrays: ArrayRecord, policy: Policy, gate: Gate | None
) -> Literal["model", "records", "opaque"]:
    """Return what training replies hold; see `Replies`.

    A model without floating-point arrays is opaque: serialized trees change their size. A strategy
    with an aggregation of its own may want several records, a part of the layers or metrics only.
    ConfigError where the policy or the gate needs updates that are vectors.
    """
    opaque = not any(is_float(array) for array in arrays.values())
    users = update_users(policy, gate)
    if opaque and users:
        raise ConfigError(
            f"CohortStrategy: the model has no floating-point arrays, so its updates are not "
            f"vectors, which {' and '.join(users)} needs; use a policy without it, and no gate"
        )
    if opaque:
        return "opaque"
    own = any(
        not type(one).aggregate_train.__module__.startswith("flwr.") for one in chain(strategy)
    )
    return "records" if own and not users else "model"


def check_trees(strategy: Strategy, arrays: ArrayRecord) -> None:
    """DataError unless Flower's XGBoost strategies, where they are inside, can read the trees."""
    if not any(type(one).__name__ == "FedXgbBagging" for one in chain(strategy)):
        return
    try:
        (array,) = arrays.values()
        model = json.loads(array.numpy().tobytes())["learner"]["gradient_booster"]["model"]
        parallel = int(model["gbtree_model_param"]["num_parallel_tree"])
        int(model["gbtree_model_param"]["num_trees"])
        whole = 0 <= parallel <= len(model["trees"]) and bool(model["iteration_indptr"])
        whole = whole and all(isinstance(tree, dict) for tree in model["trees"])
        whole = whole and isinstance(model["tree_info"], list)
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise DataError("an update that is not a tree model of XGBoost")


HOOKS = (
    "configure_train",
    "aggregate_train",
    "configure_evaluate",
    "aggregate_evaluate",
    "summary",
)


@contextmanager
def running(strategy: Strategy, outer: Strategy) -> Iterator[Callable[..., Result]]:
    """Yield the function that runs the rounds: Flower's, or the inner strategy's own `start`.

    Its own `start` runs on the inner strategy, whose other methods are meanwhile the outer one's.
    """
    if type(strategy).start is Strategy.start:
        yield partial(Strategy.start, outer)
        return
    for name in HOOKS:
        vars(strategy)[name] = getattr(outer, name)
    try:
        yield strategy.start
    finally:
        for name in HOOKS:
            del vars(strategy)[name]


@contextmanager
def sampling_everybody(strategy: Strategy, nodes: int) -> Iterator[None]:
    """Make Flower's strategies send a message to each of the nodes that they are shown."""
    wanted = {"fraction_train": 1.0, "min_train_nodes": nodes, "min_available_nodes": nodes}
    changed = [
        (one, name, vars(one)[name])
        for one in chain(strategy)
        for name in wanted
        if name in vars(one)
    ]
    for one, name, _ in changed:
        setattr(one, name, wanted[name])
    try:
        yield
    finally:
        for one, name, before in changed:
            setattr(one, name, before)


def settings(strategy: Strategy) -> list[dict[str, Any]]:
    """Return the numbers that strategies were made with, to tell settings from state."""
    plain = bool | int | float
    return [{k: v for k, v in vars(s).items() if isinstance(v, plain)} for s in chain(strategy)]


def state_dict(strategy: Strategy, made_with: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what strategies learned: arrays, and numbers that have changed.

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
    """Return a value as a checkpoint can hold it, None for anything that is not state."""
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
