"""Model, data and training; batch norm, so that the state holds counters too."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedcohort.datasets import federate, load


class Net(nn.Module):
    """Two layers with batch norm; each client keeps a head of its own between rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=False)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


def load_data(partition_id: int, num_partitions: int, batch_size: int = 32):
    """Return this client's loaders, for training and for testing."""
    federation = federate(load("digits"), "dirichlet-per-client", num_partitions, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[partition_id]]
    x, y = (
        torch.from_numpy(federation.dataset.x[mine]),
        torch.from_numpy(federation.dataset.y[mine]),
    )
    cut = max(2, int(0.8 * len(x)))
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    last = cut % batch_size == 1  # batch norm cannot train on a single example
    return DataLoader(train, batch_size, drop_last=last), DataLoader(test, batch_size)


def train(net: nn.Module, loader: DataLoader, lr: float) -> float:
    """Train an epoch and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = [0.0]
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def held_out() -> TensorDataset:
    """Return the images that the server holds."""
    dataset = load("digits")
    return TensorDataset(torch.from_numpy(dataset.x_test), torch.from_numpy(dataset.y_test))


@torch.no_grad()
def accuracy(arrays: ArrayRecord, loader: DataLoader) -> float:
    """Share of right answers."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    right = [net.eval()(x).argmax(1) == y for x, y in loader]
    return float(torch.cat(right).float().mean())
