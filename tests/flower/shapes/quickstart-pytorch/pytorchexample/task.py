"""Model, data and training, as an app of one's own has them."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from fedcohort.datasets import federate, load


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc1 = nn.Linear(6 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(-1, 6 * 3 * 3)
        return self.fc2(F.relu(self.fc1(x)))


class Images(Dataset):
    """Items are dicts, as Flower's data sets give them."""

    def __init__(self, x, y) -> None:
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return {"img": self.x[i], "label": self.y[i]}


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return this client's loaders, for training and for testing."""
    federation = federate(load("digits"), "dirichlet-per-client", num_partitions, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[partition_id]]
    x, y = federation.dataset.x[mine], federation.dataset.y[mine]
    cut = max(1, int(0.8 * len(x)))
    train, test = Images(x[:cut], y[:cut]), Images(x[cut:], y[cut:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(batch["img"]), batch["label"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    net.eval()
    loss, right, n = 0.0, 0, max(len(loader.dataset), 1)
    for batch in loader:
        outputs = net(batch["img"])
        loss += F.cross_entropy(outputs, batch["label"], reduction="sum").item()
        right += int((outputs.argmax(1) == batch["label"]).sum())
    return loss / n, right / n


def accuracy(arrays: ArrayRecord) -> float:
    """Accuracy on the images that the server holds."""
    net, dataset = Net(), load("digits")
    net.load_state_dict(arrays.to_torch_state_dict())
    return test(net, DataLoader(Images(dataset.x_test, dataset.y_test), 256))[1]
