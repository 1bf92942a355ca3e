"""What `CohortStrategy` must know about the strategy inside it, and what that one has learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.wire import LOG, is_float
from fedcohort.gates import Gate
from fedcohort.policies.base import Policy
from fedcohort.signals.catalog import SIGNALS
from fedcohort.simulate.clock import Pace

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


def check(
    strategy: Strategy, gate: bool, checkpoint: bool, cohort_size: int | None, pace: Pace
) -> None:
    """Refuse what is not a strategy of the message API, and what would break a promise of one."""
    if not isinstance(strategy, Strategy):
        kind = type(strategy)
        raise ConfigError(
            f"CohortStrategy: {kind.__module__}.{kind.__name__} is not a strategy of Flower's "
            "message API; use its counterpart in flwr.serverapp.strategy"
        )
    cyclic = any(type(one).__name__ == "FedXgbCyclic" for one in chain(strategy))
    if cyclic and cohort_size is not None and cohort_size > 1:
        raise ConfigError(
            f"CohortStrategy: cohort_size={cohort_size}, but FedXgbCyclic keeps one update per "
            "round: use cohort_size=1, or FedXgbBagging"
        )
    if gate and not pace.waits_for_all:
        raise ConfigError(f"CohortStrategy: a gate decides when all have answered; drop {pace}")
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


def warn_of_exact(strategy: Strategy, policy: Policy) -> None:
    """Say which signals tell of the records without noise, where updates are private."""
    private = next((type(s).__name__ for s in chain(strategy) if _clips(s)), None)
    names = sorted(policy.needs.profile | policy.needs.query | policy.needs.reply)
    options = policy.signal_options
    exact = [n for n in names if SIGNALS[n].tells_of_records(options.get(n, {}))]
    if private and exact:
        LOG.warning(
            "%s makes updates private, but %s tell of the records without noise: pass "
            "attach(privacy=Privacy(...)) on the clients",
            private,
            ", ".join(map(repr, exact)),
        )


def _clips(strategy: Strategy) -> bool:
    return type(strategy).__name__.startswith("DifferentialPrivacy")


def update_users(policy: Policy, gate: Gate | None, pace: Pace) -> list[str]:
    """Return what needs the clients' updates as vectors: signals made of them, and a gate."""
    signals = [SIGNALS[name] for name in sorted(policy.needs.reply)]
    users = [f"the signal {s.name!r}" for s in signals if s.work == "server" and s.model != "none"]
    users += [] if gate is None else [f"the gate {gate.name!r}"]
    return users if pace.late == "drop" else [*users, "Pace(late='next')"]


def reply_kind(
    strategy: Strategy, arrays: ArrayRecord, policy: Policy, gate: Gate | None, pace: Pace
) -> Literal["model", "records", "opaque"]:
    """Return what training replies hold, see `Replies`; ConfigError where vectors are needed.

    A model without floating-point arrays is opaque: serialized trees change their size. A strategy
    with an aggregation of its own may want several records, a part of the layers or metrics only.
    """
    opaque = not any(is_float(array) for array in arrays.values())
    users = update_users(policy, gate, pace)
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

    The latter's strategy is meanwhile of a subclass that leaves its methods to the outer one.
    """
    plain = type(strategy)
    if plain.start is Strategy.start:
        yield partial(Strategy.start, outer)
        return
    hooks = {name: _left_to(getattr(outer, name)) for name in HOOKS}
    strategy.__class__ = type(plain.__name__, (plain,), {**hooks, "_fedcohort_hooked": True})
    try:
        yield strategy.start
    finally:
        strategy.__class__ = plain


def _left_to(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda strategy, *arguments, **named: method(*arguments, **named)


@contextmanager
def full_participation(strategy: Strategy, nodes: int) -> Iterator[None]:
    """Make Flower's strategies send a message to each of the nodes that they are shown."""
    wanted = {"fraction_train": 1.0, "min_train_nodes": nodes, "min_available_nodes": nodes}
    changed = [(one, name) for one in chain(strategy) for name in wanted if name in vars(one)]
    before = [getattr(one, name) for one, name in changed]
    for one, name in changed:
        setattr(one, name, wanted[name])
    try:
        yield
    finally:
        for (one, name), value in zip(changed, before, strict=True):
            setattr(one, name, value)


def usual_cohort_size(strategy: Strategy, messages: int, online: int) -> int:
    """Return what the inner strategy samples; where that is everybody, two fifths of them."""
    sampled = [getattr(one, "num_sampled_clients", None) for one in chain(strategy)]
    stated = next((size for size in sampled if isinstance(size, int)), None)
    if stated is not None or messages < max(online, 3):
        return stated or messages
    size = max(2, round(0.4 * online))
    LOG.warning(
        "the inner strategy samples all %d clients, so nothing would be selected: cohorts are of "
        "%d; pass CohortStrategy(cohort_size=...) for another number",
        online,
        size,
    )
    return size


def settings(strategy: Strategy) -> list[dict[str, Any]]:
    """Return the numbers that strategies were made with, to tell settings from state."""
    plain = bool | int | float
    return [{k: v for k, v in vars(s).items() if isinstance(v, plain)} for s in chain(strategy)]


def state_dict(strategy: Strategy, made_with: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what strategies learned: attributes that are arrays, and numbers that changed."""
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


def as_saved(record: ArrayRecord) -> dict[str, Any]:
    """Return a model as plain arrays in order, for a checkpoint."""
    return {"names": list(record), "arrays": [array.numpy() for array in record.values()]}


def from_saved(saved: Mapping[str, Any]) -> ArrayRecord:
    """Restore what `as_saved` returned."""
    pairs = zip(saved["names"], saved["arrays"], strict=True)
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in pairs})


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
