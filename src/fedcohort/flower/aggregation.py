"""Between replies and the inner strategy: signals from updates, and the policy's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord
from numpy.typing import NDArray

from fedcohort.flower.arrays import flatten, is_float, unflatten
from fedcohort.flower.delivery import Model
from fedcohort.flower.messages import RECORD
from fedcohort.flower.queries import reading_of
from fedcohort.flower.replies import Update
from fedcohort.policies.base import Option, Policy
from fedcohort.rounds import ClientId, Selection
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Projection
from fedcohort.signals.updates import last_layer, update_distance

Readings = dict[ClientId, Any]
Options = Mapping[str, Option]


def reply_signals(
    policy: Policy,
    updates: Mapping[ClientId, Update],
    model: Model,
    seconds: Mapping[ClientId, float],
    limit: int,
) -> dict[str, Readings]:
    """Return the signals that come with updates: read from replies, or computed from the updates.

    Parameters
    ----------
    policy : Policy
    updates : mapping
        The checked replies.
    model : Model
        The global model that training started from.
    seconds : mapping
        How long each client took.
    limit : int
        Bytes that a reading may have.
    """
    answers: dict[str, Readings] = {}
    for name in sorted(policy.needs.reply):
        options = policy.signal_options.get(name, {})
        if name == "duration":
            answers[name] = {c: np.float64(seconds[c]) for c in updates if c in seconds}
        elif SIGNALS[name].work == "server":
            answers[name] = from_updates(name, updates, model, options)
        else:
            answers[name] = _sent_along(name, updates, options, limit)
    return answers


def _sent_along(
    name: str, updates: Mapping[ClientId, Update], options: Options, limit: int
) -> Readings:
    records: dict[ClientId, ConfigRecord | None] = {
        c: u.message.content.config_records.get(RECORD) for c, u in updates.items()
    }
    readings = {c: reading_of(record, name, options, limit) for c, record in records.items()}
    return {c: reading for c, reading in readings.items() if reading is not None}


def from_updates(
    name: str, updates: Mapping[ClientId, Update], model: Model, options: Options
) -> Readings:
    """Compute a signal from the updates themselves."""
    if not updates:
        return {}
    steps = np.stack([u.flat for u in updates.values()]) - flatten(model.arrays)
    if name == "update_sketch":
        rows: NDArray[Any] = Projection(steps.shape[1], **options).apply(steps)  # type: ignore[arg-type]
        return dict(zip(updates, rows.astype(np.float32), strict=True))
    if options.get("last_layer"):
        own = {n: a for n, a in model.arrays.items() if is_float(a)}
        steps = steps[:, -last_layer(list(own), [int(np.prod(a.shape)) for a in own.values()]) :]
    distances = update_distance(
        steps,
        [u.weight for u in updates.values()],
        weighted=bool(options.get("weighted")),
        scale_by_size=bool(options.get("scale_by_size")),
    )
    return dict(zip(updates, distances, strict=True))


def weigh(updates: Mapping[ClientId, Update], selection: Selection, model: Model, key: str) -> None:
    """Make the inner strategy's weighted mean use the policy's weights, where there are some.

    With weights w of sum s the next model is to be c + sum w (x - c) for the global model c. The
    inner strategy normalizes weights, so that updates are stretched by s where it is not one.
    """
    if selection.weights is None or not updates:
        return
    known = dict(zip(selection.clients, selection.weights, strict=True))
    total = sum(known[client] for client in updates)
    start = flatten(model.arrays)
    for client, update in updates.items():
        content = update.message.content
        metrics, old = next(iter(content.metric_records.items()))
        content[metrics] = MetricRecord({**old, key: float(known[client])})
        if abs(total - 1) > 1e-9:
            name, record = next(iter(content.array_records.items()))
            content[name] = unflatten(start + np.float32(total) * (update.flat - start), record)
