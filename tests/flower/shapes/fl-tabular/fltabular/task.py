"""A table of measurements, and a classifier that ends in a sigmoid."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class IncomeClassifier(nn.Module):
    """One probability per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.output = nn.Linear(30, 16), nn.Linear(16, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.output(torch.relu(self.layer1(x))))


def table():
    """Return standardized rows and labels of shape (n, 1)."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).view(-1, 1)


def load_data(partition_id: int, num_partitions: int):
    """Return this client's rows as loaders, for training and for testing."""
    x, y = table()
    mine = np.arange(partition_id, len(x), num_partitions)
    cut = int(0.8 * len(mine))
    train = TensorDataset(x[mine[:cut]], y[mine[:cut]])
    test = TensorDataset(x[mine[cut:]], y[mine[cut:]])
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=16)


def trainer(model: nn.Module, loader: DataLoader, lr: float) -> None:
    """Train an epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(arrays: ArrayRecord) -> float:
    """Accuracy on all rows."""
    model = IncomeClassifier()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = table()
    return float(((model.eval()(x) > 0.5).float() == y).float().mean())
