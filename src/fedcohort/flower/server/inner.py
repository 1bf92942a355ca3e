"""The strategy inside `CohortStrategy`: what must be known about it, and the messages it sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import wire
from fedcohort.flower.server.asking import GridCollector, Model
from fedcohort.flower.wire import LOG, PROBE, RECORD, UPLOAD
from fedcohort.gates import Gate
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId, Selection
from fedcohort.signals.catalog import SIGNALS
from fedcohort.simulate.clock import Pace

RECORD_MARK = "__record__"
MAX_ANSWER = 1 << 16  # bytes of a client's answer to a gate; Sketch-to-Skip's has one


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
    if gate and not pace.waits_for_all:
        raise ConfigError(f"CohortStrategy: a gate decides when all have answered; drop {pace}")
    for one in chain(strategy):
        name = type(one).__name__
        if name == "FedXgbCyclic" and (cohort_size or 1) > 1:
            raise ConfigError(
                f"CohortStrategy: cohort_size={cohort_size}, but FedXgbCyclic keeps one update per "
                "round: use cohort_size=1, or FedXgbBagging"
            )
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
    kinds = [type(one).__name__ for one in chain(strategy)]
    private = [kind for kind in kinds if kind.startswith("DifferentialPrivacy")]
    names = sorted(policy.needs.profile | policy.needs.query | policy.needs.reply)
    options = policy.signal_options
    exact = [repr(n) for n in names if SIGNALS[n].tells_of_records(options.get(n, {}))]
    if private and exact:
        LOG.warning(
            "%s makes updates private, but %s tell of the records without noise: pass "
            "attach(privacy=Privacy(...)) on the clients",
            private[0],
            ", ".join(exact),
        )


def reply_kind(
    strategy: Strategy, arrays: ArrayRecord, policy: Policy, gate: Gate | None, pace: Pace
) -> Literal["model", "records", "opaque"]:
    """Return what training replies hold, see `Replies`; ConfigError where vectors are needed.

    A model without floating-point arrays is opaque: serialized trees change their size. A strategy
    with an aggregation of its own may want several records, a part of the layers or metrics only.
    """
    opaque = not any(wire.is_float(array) for array in arrays.values())
    signals = [SIGNALS[name] for name in sorted(policy.needs.reply)]
    users = [f"the signal {s.name!r}" for s in signals if s.work == "server" and s.model != "none"]
    users += [] if gate is None else [f"the gate {gate.name!r}"]
    users += [] if pace.late == "drop" else ["Pace(late='next')"]
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
    before = [(s, n, getattr(s, n)) for s in chain(strategy) for n in wanted if n in vars(s)]
    for one, name, _ in before:
        setattr(one, name, wanted[name])
    try:
        yield
    finally:
        for setting in before:
            setattr(*setting)


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
            is_model = isinstance(value, dict) and RECORD_MARK in value
            setattr(one, name, from_saved(value[RECORD_MARK]) if is_model else value)


def as_saved(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return a model as plain arrays in order, for a checkpoint."""
    return {name: array.numpy() for name, array in record.items()}


def from_saved(saved: Mapping[str, Any]) -> ArrayRecord:
    """Restore what `as_saved` returned."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in saved.items()})


def _saved(value: Any) -> Any:
    """Return a value as a checkpoint can hold it, None for anything that is not state."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return value
    if isinstance(value, ArrayRecord):
        return {RECORD_MARK: as_saved(value)}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    arrays = [isinstance(part, np.ndarray) for part in parts]
    return value if arrays and all(arrays) else None


class Template:
    """What the inner strategy wants to send, to the nodes that it sampled itself."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = {m.metadata.dst_node_id: m for m in messages}
        self.any, content = messages[0], messages[0].content
        self.name = next(iter(content.array_records), "arrays")
        self.config = next(iter(content.config_records), "config")
        self.per_node = any(m.content is not content and m.content != content for m in messages)
        models = [m.content.array_records.get(self.name) for m in messages]
        same = all(model is models[0] or model == models[0] for model in models)
        self.arrays = models[0] if same else None  # the one model of all messages

    def missing(self, nodes: Mapping[ClientId, int]) -> list[ClientId]:
        """Return the clients that want a message of their own and have none."""
        return [c for c, node in nodes.items() if self.per_node and node not in self.messages]


class Cohort:
    """The selected clients of one round, and what is sent to them."""

    def __init__(self, selection: Selection, template: Template, collector: GridCollector) -> None:
        self.selection, self.template, self.collector = selection, template, collector
        self.model, self.nodes = collector.current, collector.nodes
        policy = collector.session.policy
        names = tuple(sorted(n for n in policy.needs.reply if SIGNALS[n].work != "server"))
        options = {name: policy.signal_options.get(name, {}) for name in names}
        self.request = replace(
            collector.request, version=self.model.version, signals=names, options=options
        )
        self.sent: dict[ClientId, Message] = {}  # the last message to each client
        self.problems: dict[ClientId, str] = {}  # why clients did not answer the gate
        self._probing: dict[ClientId, float] = {}

    def train(
        self, kind: str = "", announced: NDArray[Any] | None = None, **entries: Any
    ) -> list[Message]:
        """Return the training messages, with further `entries` of the request for a gate."""
        template, request = self.template, replace(self.request, **entries)
        extra = {} if announced is None else {"announce": wire.to_bytes(announced)}
        self.sent = {}
        for client in self.selection.clients:
            model = self.model
            inner = template.messages.get(self.nodes[client], template.any).content
            own = inner.array_records.get(template.name)
            if template.arrays is None and own is not None:  # each node has a model of its own
                model = Model(wire.in_dtypes(own, wire.dtypes_of(model.arrays)))
            content = RecordDict({k: v for k, v in inner.items() if k != template.name})
            if self.collector.must_carry(client, model):
                content[template.name] = model.arrays
            ours = replace(request, version=model.version, client=client).to_json()
            # not a record of its own: Flower's clipping mods want exactly one ConfigRecord
            config = {**inner.config_records.get(template.config, {}), **extra, RECORD: ours}
            content[template.config] = ConfigRecord(config)
            kind = kind or template.any.metadata.message_type
            self.sent[client] = self._message(client, content, kind)
        return list(self.sent.values())

    def probe(self, gate: Gate, announced: NDArray[Any] | None) -> dict[ClientId, NDArray[Any]]:
        """Let the clients train, and return what they answer to the gate."""
        self.train(
            PROBE,
            announced,
            gate=gate.name,
            on_skip=gate.on_skip,
            carries_over=gate.carries_over,
            options={**self.request.options, "gate": gate.client_options},
        )
        answers: dict[ClientId, NDArray[Any]] = {}

        def read(client: ClientId, record: ConfigRecord, seconds: float) -> None:
            self.collector.confirm(client, record)
            data = record.get("answer")
            try:
                answers[client] = wire.from_bytes(data, MAX_ANSWER)
            except DataError:
                size = len(data) if isinstance(data, bytes) else 0
                self.collector.session.charge("gate", "up", {client: size})
                raise
            self._probing[client] = seconds

        self.problems = self.collector.exchange(self.sent, read)
        return {c: answers[c] for c in self.selection.clients if c in answers}

    def upload(self, admitted: Iterable[ClientId]) -> list[Message]:
        """Return the requests for the models of those that the gate admitted."""
        config = ConfigRecord({RECORD: self.request.to_json(), "decision": b"\x01"})
        content = RecordDict({self.template.config: config})
        self.sent = {c: self._message(c, content, UPLOAD) for c in admitted}
        return list(self.sent.values())

    def seconds(self) -> dict[ClientId, float]:
        """Return how long each client took that replied to the last message to it."""
        replied = self.collector.grid.seconds
        ids = {client: m.metadata.message_id for client, m in self.sent.items()}
        return {c: self._probing.get(c, 0.0) + replied[i] for c, i in ids.items() if i in replied}

    def _message(self, client: ClientId, content: RecordDict, kind: str) -> Message:
        group = self.template.any.metadata.group_id or None
        ttl = self.collector.timeout + 5
        return Message(content, self.nodes[client], kind, ttl=ttl, group_id=group)
