"""Simulated clients: what signals need of them, computed from their data many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError
from fedcohort.partition import IndexArray
from fedcohort.rounds import ClientId, stream
from fedcohort.signals.catalog import Clients, Options
from fedcohort.signals.projection import Projection, Vectors
from fedcohort.simulate.local import Data, Job, Trainer, jobs, lr_at
from fedcohort.sketch.hashing import MinHash
from fedcohort.sketch.race import empty_sketch, token_sets

Insight = Callable[[np.ndarray, np.ndarray], ArrayLike]
Embed = Callable[[np.ndarray], ArrayLike]

MAX_BYTES = 2**30  # of a projection matrix on a GPU
PUBLIC = 100  # examples of the test set that stand for public data


class TensorVectors(Vectors):
    """Vectors on the trainer's device; a GPU keeps the matrix of a projection, if it fits."""

    rows: Tensor

    def numpy(self) -> NDArray[Any]:
        """Return the vectors in main memory."""
        return np.asarray(self.rows.cpu().numpy())

    def project(self, projection: Projection) -> NDArray[np.float64]:
        """Return the projection of each row."""
        small = 4 * projection.k * projection.dim <= MAX_BYTES
        if self.rows.device.type == "cpu" or not small:
            return projection.apply(self.numpy())
        matrix = _matrix(projection, str(self.rows.device))
        return np.asarray((self.rows @ matrix.T).double().cpu().numpy())


@lru_cache(maxsize=4)
def _matrix(projection: Projection, device: str) -> Tensor:
    return torch.from_numpy(projection.matrix().astype(np.float32)).to(device)


@dataclass(frozen=True)
class SimulatedClients(Clients):
    """Some clients of one seed; signals are computed for all of them at once."""

    ids: Sequence[ClientId]
    trainer: Trainer
    data: Data  # all training examples, on the trainer's device
    federation: Federation
    seed: int  # with the round, of batches of clients that train for a query, and of noise
    round_number: int
    model: Tensor  # that answers are taken under
    held_out: Mapping[ClientId, IndexArray] | None = None  # on which clients measure their loss
    insight: Insight | None = None  # of one client's (x, y), for the signal of that name
    embed: Embed | None = None  # x -> a vector per example, which are sketched instead
    embedder: Tensor | None = None  # whose features are sketched where `embed="model"`
    held: Mapping[ClientId, Tensor] = field(default_factory=dict)  # models after the last training
    arrived: Tensor | None = None  # trained models of this round, for reply signals
    seconds: Callable[[ClientId], float] = lambda client: np.nan  # that it takes for a round

    def examples(self) -> Iterable[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield each client's inputs and labels."""
        dataset, parts = self.federation.dataset, self.federation.parts
        return ((dataset.x[parts[c]], dataset.y[parts[c]]) for c in self.ids)

    def sizes(self) -> NDArray[np.int64]:
        """Return each client's number of examples."""
        return np.array([len(self.federation.parts[c]) for c in self.ids], np.int64)

    def insights(self) -> list[ArrayLike]:
        """Return the user's own vector for each client."""
        if self.insight is None:
            raise ConfigError("the policy asks for 'insight': pass insight=function(x, y)")
        return [self.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return each client's distribution sketch, private at the policy's epsilon."""
        epsilon = float(options.get("epsilon", 0.0))
        inputs, public = self._inputs(options)
        dataset, center = self.federation.dataset, None
        if options.get("center"):  # the mean of the server's public examples
            center = public.reshape(len(public), -1).mean(axis=0)
        tokens = dataset.tokens and public.dtype.kind in "iu"
        blank = empty_sketch(options, public, classes=dataset.classes, center=center, tokens=tokens)
        again = (self.round_number,) if self.round_number else ()
        readings = []
        for client, x in zip(self.ids, inputs, strict=True):
            sketch, flat = blank.empty_like(), x.reshape(len(x), -1)
            y = dataset.y[self.federation.parts[client]] if blank.labeled else None
            sketch.add(token_sets(flat) if isinstance(blank.family, MinHash) else flat, y)
            if epsilon:
                noise = stream(self.seed, "sketch noise", client, *again)
                sketch = sketch.privatize(epsilon, rng=noise)
            readings.append(sketch.reading())
        return readings

    def _inputs(self, options: Options) -> tuple[Iterable[NDArray[Any]], NDArray[Any]]:
        """Return what is sketched: the vectors of each client, and those of public examples."""
        parts = [self.federation.parts[c] for c in self.ids]
        dataset = self.federation.dataset
        public, at = dataset.x_test[:PUBLIC], np.concatenate(parts)
        if options.get("embed") == "model":
            model = self.model if self.embedder is None else self.embedder
            some = self.trainer.data(public, dataset.y_test[:PUBLIC])
            x = self.trainer.embeddings(model, at, self.data).cpu().numpy()
            public = self.trainer.embeddings(model, np.arange(len(public)), some).cpu().numpy()
        elif self.embed is not None:
            x, public = _embedded(self.embed, dataset.x[at]), _embedded(self.embed, public)
        else:
            return (dataset.x[part] for part in parts), public
        return np.split(x, np.cumsum([len(part) for part in parts])[:-1]), public

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return each client's mean of loss^power under the model."""
        parts = self.federation.parts if self.held_out is None else self.held_out
        measured = [Job(0, parts[c]) for c in self.ids]
        return self.trainer.losses(self.model, measured, self.data, power=power)

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer over each client's examples."""
        return self.trainer.features(self.model, self._jobs(), self.data)

    def gradients(self) -> Vectors:
        """Return the full-batch gradients."""
        return TensorVectors(self.trainer.gradients(self.model, self._jobs(), self.data))

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of each client's batches, in a random order."""
        size, spreads = self.trainer.training.batch_size, []
        for client in self.ids:
            rng = stream(self.seed, "gradient spread", self.round_number, client)
            order = rng.permutation(self.federation.parts[client])
            batches = [Job(0, order[at : at + size]) for at in range(0, len(order), size)]
            rows = self.trainer.gradients(self.model, batches, self.data)
            spreads.append((rows - rows.mean(dim=0)).double().square().sum(dim=1).mean().sqrt())
        return np.array([float(spread) for spread in spreads])

    def trained(self, fresh: bool = True) -> Vectors:
        """Return models after training on batches of their own, or those that clients hold."""
        if not fresh:
            return TensorVectors(torch.stack([self.held.get(c, self.model) for c in self.ids]))
        parts, number = [self.federation.parts[c] for c in self.ids], self.round_number
        work = jobs(self.trainer, self.seed, number, [f"query/{c}" for c in self.ids], parts)
        lr = lr_at(self.trainer, number)
        return TensorVectors(self.trainer.train(self.model, work, self.data, lr).clone())

    def steps(self, fresh: bool = True) -> Vectors:
        """Return `trained` minus the model."""
        return TensorVectors(self.trained(fresh).rows - self.model)

    def updates(self) -> Vectors:
        """Return the updates that arrived this round."""
        if self.arrived is None:
            raise ConfigError("updates are known only after training: ask for them in the reply")
        return TensorVectors(self.arrived - self.model)

    def durations(self) -> NDArray[np.float64]:
        """Return the simulated seconds that each client takes for a round."""
        return np.array([self.seconds(c) for c in self.ids])

    expected_durations = durations

    def classes(self) -> int:
        """Return the number of labels of the data set."""
        return self.federation.dataset.classes

    def noise_source(self, client: ClientId) -> np.random.Generator:
        """Return a generator that is a function of the seed and the client."""
        return stream(self.seed, "label noise", client)

    def last_array(self) -> int:
        """Return how many numbers the model's last array has."""
        return list(self.trainer.worker.model.parameters())[-1].numel()

    def _jobs(self) -> list[Job]:
        return [Job(0, self.federation.parts[c]) for c in self.ids]


def _embedded(embed: Embed, x: NDArray[Any]) -> NDArray[np.float32]:
    vectors = np.asarray(embed(x), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(x):
        raise ConfigError(
            f"embed: returned the shape {vectors.shape} for {len(x)} samples; return one vector "
            "per sample"
        )
    return vectors
