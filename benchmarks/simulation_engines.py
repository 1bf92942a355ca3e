"""One engine on one workload, one round at a time: the children of simulation.py.

python benchmarks/simulation_engines.py ENGINE WORKLOAD DATA.npz DEVICE SEEDS PRECISION

Only fedcohort trains several seeds at once. Reads a line from standard input for each round to run,
and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
from simulation_models import MODELS
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Workload(NamedTuple):
    model: str
    clients: int
    cohort: int
    epochs: int
    batch: int
    evaluate: bool
    shape: tuple[int, ...] = (1, 28, 28)
    classes: int = 10
    evaluate_every: int = 1
    lr: float = 0.01


WORKLOADS = {
    "W1": Workload("mlp-64-30", 100, 5, 5, 64, True),
    "W2": Workload("cnn", 100, 10, 1, 64, True),
    "W3": Workload("mlp-64-30", 10_000, 100, 1, 6, False),
    "fedcor": Workload("fedcor-cnn", 100, 5, 5, 50, True, (3, 32, 32)),
    # the CIFAR-10 workload of the pfl-research paper: 1,000 users of 50 images
    "pfl-cifar10": Workload("pfl-cnn", 1000, 50, 1, 10, True, (3, 32, 32), 10, 10, 0.1),
    # paper 0's char-LSTM: 3 clients of 400 windows, 20 epochs
    "char-lstm": Workload("char-lstm", 100, 3, 20, 10, False, (80,), 80),
    "resnet18": Workload("resnet18", 100, 10, 1, 32, False, (3, 32, 32)),
    "vit-tiny": Workload("vit-tiny", 100, 10, 1, 32, False, (3, 32, 32)),
}


class Pace:
    """Waits for a line before every round, and answers with its seconds."""

    def __init__(self):
        print("@@ {}", flush=True)  # ready

    def wait(self):
        """Whether there is to be another round."""
        wanted = bool(sys.stdin.readline())
        self.started = time.perf_counter()
        return wanted

    def done(self, accuracy):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        print("@@", json.dumps({"seconds": seconds, "accuracy": accuracy}), flush=True)


def serve(run_round):
    pace = Pace()
    while pace.wait():
        pace.done(run_round())


def module(work):
    """The model, as a module of PyTorch that every engine trains."""
    from fedcohort.simulate import build

    if work.model in MODELS:
        return MODELS[work.model](work.classes)
    if work.model == "pfl-cnn":
        convolutions = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
        dense = (nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5))
        return nn.Sequential(
            *convolutions, nn.MaxPool2d(2), nn.Dropout(0.25), *dense, nn.Linear(128, 10)
        )
    return build(work.model, work.shape, work.classes, seed=0)


def tensors(data, device="cpu"):
    return [torch.from_numpy(data[k]).to(device) for k in ("x", "y", "x_test", "y_test")]


def test_accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in x.split(1000)])
    model.train()
    return float((guesses == y).float().mean())


def train_plainly(model, x, y, work):
    """Local SGD on one client's data, as one would write it."""
    params = list(model.parameters())
    for _ in range(work.epochs):
        for batch in torch.randperm(len(y), device=x.device).split(work.batch):
            loss = cross_entropy(model(x[batch]), y[batch])
            grads = torch.autograd.grad(loss, params)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.sub_(g, alpha=work.lr)


def fedcohort(work, data, device, seeds, precision):
    from fedcohort.datasets import Dataset, Federation
    from fedcohort.simulate import LocalTraining, Simulation

    parts = np.array_split(np.arange(len(data["y"])), work.clients)
    arrays = (data[k] for k in ("x", "y", "x_test", "y_test"))
    held = Dataset("benchmark", *arrays, classes=work.classes)
    simulation = Simulation(
        Federation(held, {str(i): part for i, part in enumerate(parts)}),
        lambda seed: module(work),
        "uniform",
        cohort_size=work.cohort,
        local=LocalTraining(epochs=work.epochs, batch_size=work.batch, lr=work.lr),
        evaluate_every=work.evaluate_every if work.evaluate else 0,
        device=device,
        seeds=range(seeds),
        precision=precision,
    )
    serve(lambda: simulation.step()[0].accuracy)


def loop(work, data, device, seeds, precision):
    x, y, x_test, y_test = tensors(data, device)
    parts = torch.arange(len(y), device=device).tensor_split(work.clients)
    rng = np.random.default_rng(0)
    model = module(work).to(device)

    def run_round():
        start = parameters_to_vector(model.parameters()).detach()
        total = torch.zeros_like(start)
        for client in rng.choice(work.clients, work.cohort, replace=False):
            vector_to_parameters(start.clone(), model.parameters())
            train_plainly(model, x[parts[client]], y[parts[client]], work)
            total += parameters_to_vector(model.parameters()).detach() / work.cohort
        vector_to_parameters(total, model.parameters())
        return test_accuracy(model, x_test, y_test) if work.evaluate else None

    serve(run_round)


def flower(work, data, device, seeds, precision):
    """Flower's simulation on Ray, two actors of one thread."""
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    os.environ["RAY_DEDUP_LOGS"] = "0"
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(flower_client)
    *_, x_test, y_test = tensors(data)

    class Paced(FedAvg):
        """FedAvg that waits for the word before every round."""

        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 1:
                self.pace = Pace()
            if not self.pace.wait():
                raise KeyboardInterrupt
            config["workload"], config["data"] = sys.argv[2], sys.argv[3]
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            result = super().aggregate_train(server_round, replies)
            if not work.evaluate:
                self.pace.done(None)
            return result

    fraction = work.cohort / work.clients
    strategy = Paced(fraction_train=fraction, fraction_evaluate=0.0, min_train_nodes=work.cohort,
                     min_available_nodes=work.clients)  # fmt: skip

    def evaluate(server_round, arrays):
        if server_round and work.evaluate:
            model = module(work)
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = test_accuracy(model, x_test, y_test)
            strategy.pace.done(accuracy)
            return MetricRecord({"accuracy": accuracy})
        return None

    @server_app.main()
    def main(grid, context):
        initial = ArrayRecord(module(work).state_dict())
        strategy.start(grid, initial, num_rounds=10_000, evaluate_fn=evaluate)

    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False, "logging_level": "ERROR"},
    })  # fmt: skip


CACHE: dict[str, object] = {}  # of a Ray actor, which keeps the data between rounds


def flower_client(message, context):
    """One client's training."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config = message.content["config"]
    work = WORKLOADS[config["workload"]]
    if not CACHE:
        data = np.load(config["data"])
        CACHE["data"] = [torch.from_numpy(data[k]) for k in ("x", "y")]
        CACHE["model"] = module(work)
    (x, y), model = CACHE["data"], CACHE["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    size = len(y) // work.clients
    first = int(context.node_config["partition-id"]) * size
    train_plainly(model, x[first : first + size], y[first : first + size], work)
    metrics = MetricRecord({"num-examples": size})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def pfl(work, data, device, seeds, precision):
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    if device == "cuda":
        torch.set_default_device("cuda")
    x, y, x_test, y_test = tensors(data, device)
    parts = torch.arange(len(y), device=device).tensor_split(work.clients)
    net = module(work).to(device)
    net.loss = lambda a, b, eval=False: cross_entropy(net(a), b)
    net.metrics = lambda a, b, eval=False: {"loss": Weighted(0.0, len(b))}
    rng = np.random.default_rng(0)

    def user(i):
        order = parts[i][torch.randperm(len(parts[i]), device=device)]
        return Dataset((x[order], y[order]), user_id=str(i))

    class Paced(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            self.pace = Pace()
            self.pace.wait()
            return Metrics()

        def after_central_iteration(self, metrics, model, *, central_iteration):
            due = work.evaluate and (central_iteration + 1) % work.evaluate_every == 0
            self.pace.done(test_accuracy(net, x_test, y_test) if due else None)
            return not self.pace.wait(), Metrics()

    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    users = FederatedDataset(user, lambda: rng.integers(work.clients))
    FederatedAveraging().run(
        NNAlgorithmParams(10_000, 10**9, work.cohort, 0),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr,
                           local_batch_size=work.batch),
        callbacks=[Paced()],
        send_metrics_to_platform=False,
    )  # fmt: skip


ENGINES = {f.__name__: f for f in (fedcohort, loop, flower, pfl)}

if __name__ == "__main__":
    import simulation_engines  # so that Flower's actors find the client by name

    torch.set_num_threads(2)
    engine, workload, path, device, seeds, precision = sys.argv[1:]
    # The same rounding for all engines: by itself PyTorch rounds convolutions to TF32.
    for switch in (torch.backends.cudnn, torch.backends.cuda.matmul):
        switch.allow_tf32 = precision == "tf32"
    run = simulation_engines.ENGINES[engine]
    run(WORKLOADS[workload], np.load(path), device, int(seeds), precision)
