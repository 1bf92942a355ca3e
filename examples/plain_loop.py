"""A session in a training loop of one's own: no framework, nothing but NumPy.

python examples/plain_loop.py
"""

from __future__ import annotations

import numpy as np

from fedcohort.datasets import federate, load
from fedcohort.policies import PowerOfChoice
from fedcohort.session import Session

digits = load("digits")
clients = federate(digits, "dirichlet-per-client", clients=20, seed=0, alpha=0.3)
data = {c: (digits.x[i].reshape(len(i), -1), digits.y[i]) for c, i in clients.parts.items()}


def scores(weights, x):
    """Class probabilities of a linear model."""
    logits = x @ weights[:-1] + weights[-1]
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def loss(weights, x, y):
    return float(-np.log(scores(weights, x)[np.arange(len(y)), y] + 1e-12).mean())


def train(weights, x, y, steps=20, rate=0.5):
    for _ in range(steps):
        error = (scores(weights, x) - np.eye(10)[y]) / len(y)
        weights = weights - rate * np.vstack([x.T @ error, error.sum(axis=0)])
    return weights


def main(rounds: int = 30) -> tuple[Session, float]:
    weights = np.zeros((65, 10))
    session = Session(PowerOfChoice(d=10), cohort_size=5, seed=0, model_bytes=weights.nbytes)

    def collect(signal, asked):  # what your framework does to ask clients for something
        answers = {"num_examples": lambda x, y: len(y), "loss": lambda x, y: loss(weights, x, y)}
        return {client: answers[signal](*data[client]) for client in asked}

    for _ in range(rounds):
        cohort = session.begin(data, collect).clients  # whoever is there, and how to ask
        updates = {client: train(weights, *data[client]) for client in cohort}  # your training
        sizes = [len(data[client][1]) for client in cohort]
        weights = np.average([updates[client] for client in cohort], axis=0, weights=sizes)
        session.finish({}, cohort)  # signals that came with updates, and who came back
    x_test = digits.x_test.reshape(len(digits.x_test), -1)
    accuracy = float((scores(weights, x_test).argmax(axis=1) == digits.y_test).mean())
    print(f"accuracy {accuracy:.3f}; bytes up: {session.ledger.by_kind('up')}")
    return session, accuracy


if __name__ == "__main__":
    main()
