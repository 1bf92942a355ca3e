"""A federation in this process: Flower's own apps and messages, without its transport."""

from __future__ import annotations

import copy
import gc
import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedcohort.datasets import federate, load
from fedcohort.flower import attach
from fedcohort.simulate import LocalTraining, build

SUPERLINK = 1
LOCAL = LocalTraining(epochs=1, batch_size=16, lr=0.1)


class LocalGrid(Grid):
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

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run) -> None:
        pass

    @property
    def run(self):
        return None

    def sent(self, kind: str) -> list[tuple[int, Message]]:
        """Messages of a type, with their nodes."""
        down = [(n, m) for way, n, m in self.crossed if way == "down"]
        return [(n, m) for n, m in down if m.metadata.message_type == kind]


class Digits:
    """Eight clients with digits, a small model, and the same thing in Flower's terms."""

    def __init__(self, clients: int = 8) -> None:
        self.federation = federate(load("digits"), "shards", clients=clients, seed=0)
        self.clients = self.federation.clients
        self.local = LOCAL

    def model(self):
        return build("mlp-64-30", (1, 8, 8), classes=10, seed=0)

    def arrays(self) -> ArrayRecord:
        return ArrayRecord(self.model().state_dict())

    @property
    def bytes(self) -> int:
        return sum(p.numel() * 4 for p in self.model().parameters())

    def examples(self, client: str):
        part = self.federation.parts[client]
        return self.federation.dataset.x[part], self.federation.dataset.y[part]

    def app(self, client: str, **options) -> ClientApp:
        app = ClientApp()
        attach(app, self.examples(client), self.model, local=self.local, **options)
        return app

    def empty_grid(self) -> LocalGrid:
        return LocalGrid()

    def grid(self, **options) -> LocalGrid:
        grid = LocalGrid()
        for i, client in enumerate(self.clients):
            # Node ids that sort otherwise than clients, as in a real run.
            grid.add(1000 - 7 * i, self.app(client, **options), **{"client-id": client})
        return grid

    def node(self, client: str) -> int:
        return 1000 - 7 * self.clients.index(client)

    def accuracy(self, arrays: ArrayRecord) -> float:
        model = self.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        dataset = self.federation.dataset
        with torch.no_grad():
            predicted = model(torch.from_numpy(dataset.x_test)).argmax(dim=1).numpy()
        return float(np.mean(predicted == dataset.y_test))


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Some of Flower's strategies collect garbage many times a round; PyTorch need not be searched.

    It took about half of the time of their tests.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Models are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def identify_process(set_attribute=setattr):
    """Messages are stamped with the run of their process, which Flower's runner would set."""
    if importlib.util.find_spec("flwr.supercore.task_identity") is not None:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_task_id", "_run_id", "_node_id"):
            set_attribute(TaskIdentity, name, SUPERLINK)


@pytest.fixture(autouse=True)
def identity_of_the_process(monkeypatch):
    identify_process(monkeypatch.setattr)


class Clock:
    """Time that passes only while somebody sleeps, so that no limit depends on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock for our side and for Flower's wait for clients."""
    clock = Clock()
    for module in ("grid", "identity", "strategy"):
        monkeypatch.setattr(f"fedcohort.flower.{module}.time", clock)
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", clock.sleep)
    return clock


@pytest.fixture
def local_grid() -> LocalGrid:
    return LocalGrid()


@pytest.fixture
def digits() -> Digits:
    return Digits()


@pytest.fixture(scope="session")
def trial():
    """The module that the apps of the real processes share."""
    path = Path(__file__).parent / "app" / "trial" / "task.py"
    spec = importlib.util.spec_from_file_location("trial_task", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
