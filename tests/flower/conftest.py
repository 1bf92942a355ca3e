"""A federation in this process, with Flower's own apps and messages but not its transport.

Tests use it through the fixtures at the end: `digits` (eight clients), `client` and `context` (one
client), `cohort` and `inner` (strategies), `local_grid` and `clock`.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import struct
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from tests.flower.app.trial.task import bytes_of, federation, local, model

from fedcohort.flower import CohortStrategy, attach
from fedcohort.flower.wire import QUERY, RECORD, Request, from_bytes, to_bytes
from fedcohort.policies import Uniform
from fedcohort.signals.catalog import SIGNALS

collect_ignore = ["shapes"]  # apps, which are imported when they have been patched

SUPERLINK = 1


class LocalGrid:
    """Runs client apps when messages are pushed; records everything that crosses."""

    def __init__(self) -> None:
        self.apps: dict[int, ClientApp] = {}
        self.contexts: dict[int, Context] = {}
        self.names: dict[int, str] = {}
        self.crossed: list[tuple[str, int, Message]] = []
        self.silent: set[int] = set()
        self.gone: set[int] = set()
        self.on_push = lambda message: None
        self._replies: dict[str, Message] = {}

    def add(self, node: int, app: ClientApp, name: str = "", **config) -> None:
        self.apps[node] = app
        self.names[node] = name
        self.contexts[node] = Context(0, node, config, RecordDict(), {})

    def remove(self, node: int) -> None:
        del self.apps[node]

    def get_node_ids(self):
        return list(self.apps)

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=n, name=self.names[n], public_key=b"key-%d" % n)
            for n in self.apps
        ]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            identifier = f"message-{len(self.crossed)}"
            message.metadata.__dict__["_message_id"] = identifier
            node = message.metadata.dst_node_id
            self.crossed.append(("down", node, copy.deepcopy(message)))
            self.on_push(message)
            reply = self._reply(node, copy.deepcopy(message))
            if reply is not None:
                self.crossed.append(("up", node, copy.deepcopy(reply)))
                self._replies[identifier] = reply
            ids.append(identifier)
        return ids

    def _reply(self, node: int, message: Message) -> Message | None:
        if node in self.silent:
            return None
        if node in self.gone or node not in self.apps:
            reply = Message(Error(5, "Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = SUPERLINK
            return reply
        try:
            return self.apps[node](message, self.contexts[node])
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, message_ids):
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages, *, timeout=None):
        ids = self.push_messages(list(messages))
        time.sleep(0)
        return self.pull_messages(ids)

    def asked(self, signal: str) -> list[tuple[int, Message]]:
        """Questions for a signal, or with "" for ids, and their nodes."""

        def is_asked(message: Message) -> bool:
            request = Request.from_json(message.content["config"][RECORD])
            return signal in request.signals or (not signal and not request.client)

        return [(n, m) for n, m in self.sent(QUERY) if is_asked(m)]

    def sent(self, kind: str) -> list[tuple[int, Message]]:
        """Messages of a type, with their nodes."""
        down = [(n, m) for way, n, m in self.crossed if way == "down"]
        return [(n, m) for n, m in down if m.metadata.message_type == kind]

    def bytes_crossed(self, way: str) -> int:
        """Bytes of arrays and readings in all messages that went "down" or "up"."""
        return sum(bytes_of(m) for direction, _, m in self.crossed if direction == way)


class SlowGrid:
    """Lets the replies to training messages come when their clients are done."""

    def __init__(self, grid, clock, seconds):
        self.grid, self.clock, self.seconds = grid, clock, seconds
        self.due, self.away = {}, set()

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def get_nodes(self):
        return [node for node in self.grid.get_nodes() if node.node_id not in self.away]

    def push_messages(self, messages):
        messages = list(messages)
        ids = self.grid.push_messages(messages)
        for identifier, message in zip(ids, messages, strict=True):
            is_training = message.metadata.message_type == "train"
            node = message.metadata.dst_node_id
            self.due[identifier] = self.clock.now + (self.seconds[node] if is_training else 0.0)
        return ids

    def pull_messages(self, message_ids):
        ready = [i for i in message_ids if self.due.get(i, 0.0) <= self.clock.now + 1e-9]
        return self.grid.pull_messages(ready)


def npy(header, content=b"12345678"):
    """An .npy file with a header of one's own."""
    text = str(header).encode("latin-1", "replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def claim(dtype, shape, content=b"12345678"):
    return npy({"descr": dtype, "fortran_order": False, "shape": shape}, content)


class Digits:
    """Eight clients with digits and a small model, as data and as Flower apps and arrays."""

    def __init__(self, clients: int = 8) -> None:
        self.federation = federation(clients)
        self.clients = self.federation.clients
        self.local = local()

    def model(self):
        return model()

    def arrays(self) -> ArrayRecord:
        return ArrayRecord(self.model().state_dict())

    @property
    def bytes(self) -> int:
        return sum(p.numel() * 4 for p in self.model().parameters())

    def examples(self, client: str):
        part = self.federation.parts[client]
        return self.federation.dataset.x[part], self.federation.dataset.y[part]

    def app(self, client: str, train=None, mods=(), **options) -> ClientApp:
        app = ClientApp(mods=list(mods))
        if train is not None:
            app.train()(train)
        attach(app, self.examples(client), self.model, local=self.local, **options)
        return app

    def empty_grid(self) -> LocalGrid:
        return LocalGrid()

    def grid(self, **options) -> LocalGrid:
        return self.grid_of(lambda client: self.app(client, **options))

    def grid_of(self, make_app: Callable[[str], ClientApp]) -> LocalGrid:
        """A grid in which ``make_app(client)`` runs on each client's node."""
        grid = LocalGrid()
        for client in self.clients:
            grid.add(self.node(client), make_app(client), **{"client-id": client})
        return grid

    def node(self, client: str) -> int:
        """The client's node id; ids sort differently from clients, as in a real run."""
        return 1000 - 7 * self.clients.index(client)

    def replying_app(self, client: str, content, attached: bool = True, mods=()) -> ClientApp:
        """An app with its own training handler, which replies with ``content(message)``."""
        app = ClientApp()
        train = app.train(mods=list(mods))
        train(lambda message, context: Message(content(message), reply_to=message))
        if attached:
            attach(app, self.examples(client))
        return app

    def changing_app(self, client: str, change, attached: bool = True) -> ClientApp:
        """An app whose training replaces each array of the model by ``change(array)``."""
        return self.replying_app(client, lambda message: self.update(message, change), attached)

    @staticmethod
    def update(message: Message, change) -> RecordDict:
        """A training reply: each array of the model as ``change(array)``, and two metrics."""
        arrays = {k: Array(change(a.numpy())) for k, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5})
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})


def outcomes(strategy, *names):
    """Who was selected, finished and withheld in each round, and what crossed."""
    names = names or ("round", "selected", "finished", "withheld", "bytes_up", "bytes_down")
    return [tuple(getattr(report, name) for name in names) for report in strategy.history]


class AppError(ValueError):
    """An error that a client sent, of which only the text arrives."""


class OneClient:
    """A client with 50 examples, and the messages that a server sends to it."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
        self.y = np.arange(50) % 3
        self.arrays = ArrayRecord([np.zeros(4, np.float32)])

    def app(self, train=None, mods=(), **options) -> ClientApp:
        app = ClientApp(mods=list(mods))
        if train is not None:
            app.train()(train)
        attach(app, (self.x, self.y), **options)
        return app

    @staticmethod
    def message(kind: str, arrays: ArrayRecord | None = None, round: int = 0, **entries) -> Message:
        """A message of a type, with a request of these entries and perhaps a model."""
        request = Request(round, 0, **entries)
        config = ConfigRecord({RECORD: request.to_json()})
        if request.gate == "cmfl":  # before the first step, it announces nothing
            config["announce"] = to_bytes(np.empty(0, np.uint8))
        content = RecordDict({"config": config})
        if arrays is not None:
            content["arrays"] = arrays
        return Message(content, 1, kind)

    @staticmethod
    def send(app: ClientApp, message: Message, context: Context) -> Message:
        """Return the app's reply; AppError if it is an error."""
        reply = app(message, context)
        if reply.has_error():
            raise AppError(reply.error.reason)
        return reply

    def ask(self, app: ClientApp, context: Context, name: str, arrays=None, **entries):
        """Query a signal, and read the answer within the size that a server accepts."""
        message = self.message(QUERY, arrays, **{"signals": (name,), "client": "ann", **entries})
        reply = self.send(app, message, context)
        if f"{name}.error" in reply.content[RECORD]:
            raise AppError(reply.content[RECORD][f"{name}.error"])
        form = SIGNALS[name].form(entries.get("options", {}).get(name, {}))
        return from_bytes(reply.content[RECORD][name], form.max_bytes or 10**6)

    def sketch(self, app: ClientApp, context: Context, **options):
        """Query the client's distribution sketch, of 20 rows and 3 bits unless stated."""
        options = {"rows": 20, "bits": 3, **options}
        return self.ask(app, context, "race_sketch", options={"race_sketch": options})

    @staticmethod
    def echo(message: Message, context: Context) -> Message:
        """A training handler that returns the model it was sent."""
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Keep PyTorch's objects out of garbage collections, which some of Flower's strategies force.

    Those collections took about half of the time of their tests.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: models are tiny here, and threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def identify_process(set_attribute=setattr):
    """Set the run of this process, which messages carry; Flower's runner would set it."""
    if importlib.util.find_spec("flwr.supercore.task_identity") is not None:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_task_id", "_run_id", "_node_id"):
            set_attribute(TaskIdentity, name, SUPERLINK)


@pytest.fixture(autouse=True)
def identity_of_the_process(monkeypatch):
    identify_process(monkeypatch.setattr)


class Clock:
    """Time that passes only during a sleep, so that no limit depends on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Replace the clocks of our modules and of Flower's wait for clients."""
    clock = Clock()
    for module in ("asking", "identity", "strategy"):
        monkeypatch.setattr(f"fedcohort.flower.server.{module}.time", clock)
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", clock.sleep)
    return clock


@pytest.fixture
def local_grid() -> LocalGrid:
    return LocalGrid()


@pytest.fixture
def digits() -> Digits:
    return Digits()


@pytest.fixture
def inner():
    """Make a strategy of Flower, by default FedAvg, that asks no client to evaluate."""

    def make(kind=FedAvg, **options):
        return kind(fraction_evaluate=0.0, min_evaluate_nodes=0, **options)

    return make


@pytest.fixture
def cohort(inner):
    """Make a `CohortStrategy`, by default a uniform one around FedAvg."""
    make_inner = inner

    def make(policy=None, inner=None, **options):
        options = {"timeout": 0.3, "seed": 3, **options}
        return CohortStrategy(inner or make_inner(), policy or Uniform(), **options)

    return make


@pytest.fixture
def client() -> OneClient:
    return OneClient()


@pytest.fixture
def context() -> Context:
    """The state of the node of the client 'ann'."""
    return Context(0, 1, {"client-id": "ann"}, RecordDict(), {})
