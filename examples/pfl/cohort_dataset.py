"""pfl with cohorts of ours: the hook is `FederatedDataset.get_cohort`.

python cohort_dataset.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

from fedcohort.datasets import federate, load
from fedcohort.policies import PowerOfChoice
from fedcohort.session import Session


class CohortDataset(FederatedDataset):
    """Users in the order of a policy's choice.

    Parameters
    ----------
    make_dataset : callable
        From a user's id to the user's data set.
    users : sequence of str
    session : Session
    collect : callable
        ``collect(signal, users)`` returns what the policy wants to know, by user.
    """

    def __init__(
        self,
        make_dataset: Callable[[str], Dataset],
        users: tuple[str, ...],
        session: Session,
        collect: Callable[[str, tuple[str, ...]], dict[str, Any]],
    ) -> None:
        super().__init__(make_dataset, user_sampler=lambda: users[0])
        self.users, self.session, self.collect = users, session, collect

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Dataset, int]]:
        """Yield the cohort's data sets, of which every worker takes its share."""
        workers = get_ops().distributed
        cohort = self.session.begin(self.users, self.collect).clients
        for i, user in enumerate(cohort):
            seed = self._get_seed()
            if i % workers.world_size == workers.global_rank:
                yield self.make_dataset_fn(user), seed
        self.session.finish({}, cohort)  # simulated users always come back


class Linear(nn.Module):
    """A linear classifier with the methods that pfl wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x)

    def loss(self, x, y, eval=False):
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=False):
        right = (self(x).argmax(dim=1) == y).sum()
        total = nn.functional.cross_entropy(self(x), y, reduction="sum")
        return {"accuracy": Weighted(float(right), len(y)), "loss": Weighted(float(total), len(y))}


def main(rounds: int = 20) -> tuple[Session, float]:
    digits = load("digits")
    clients = federate(digits, "dirichlet-per-client", clients=20, seed=0, alpha=0.3)
    network = Linear()

    def tensors(x, y):
        return [torch.from_numpy(x.reshape(len(x), -1)), torch.from_numpy(y)]

    def examples(user):
        return tensors(digits.x[clients.parts[user]], digits.y[clients.parts[user]])

    def collect(signal, users):
        if signal == "num_examples":
            return {user: len(clients.parts[user]) for user in users}
        with torch.no_grad():
            return {user: float(network.loss(*examples(user))) for user in users}

    session = Session(PowerOfChoice(d=10), cohort_size=5, seed=0)
    training = CohortDataset(
        lambda user: Dataset(examples(user), user_id=user), clients.clients, session, collect
    )
    test = Dataset(tensors(digits.x_test, digits.y_test))
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, lambda params, lr: torch.optim.SGD(params, lr), optimizer)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=5,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=training, val_data=training),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=0.5, local_num_epochs=5, local_batch_size=32
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[],
    )
    accuracy = network.metrics(*test.raw_data)["accuracy"].overall_value
    print(f"{session.round_number} cohorts, accuracy {accuracy:.3f}")
    return session, float(accuracy)


if __name__ == "__main__":
    main()
