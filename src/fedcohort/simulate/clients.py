"""Simulated clients: what signals need of them, computed from their data many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedcohort.exceptions import ConfigError
from fedcohort.partition import IndexArray
from fedcohort.rounds import ClientId, stream
from fedcohort.signals.catalog import Clients, Options
from fedcohort.signals.projection import Projection, Vectors
from fedcohort.simulate.local import Job, jobs, lr_at
from fedcohort.sketch.hashing import MinHash
from fedcohort.sketch.race import empty_sketch, token_sets

if TYPE_CHECKING:
    from fedcohort.simulate.seed import Seed

Insight = Callable[[np.ndarray, np.ndarray], ArrayLike]
Embed = Callable[[np.ndarray], ArrayLike]

MAX_BYTES = 2**30  # of a projection matrix on a GPU
PUBLIC = 100  # examples of the test set that stand for public data


class TensorVectors(Vectors):
    """Vectors on the trainer's device; a GPU keeps the matrix of a projection, if it fits."""

    rows: Tensor

    def numpy(self) -> NDArray[Any]:
        return np.asarray(self.rows.cpu().numpy())

    def project(self, projection: Projection) -> NDArray[np.float64]:
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
    seed: Seed
    model: Tensor  # that answers are taken under
    arrived: Tensor | None  # trained models of this round, for reply signals

    @property
    def parts(self) -> list[IndexArray]:
        """The examples of each client."""
        return [self.seed.federation.parts[c] for c in self.ids]

    def examples(self) -> Iterable[tuple[NDArray[Any], NDArray[Any]]]:
        dataset = self.seed.federation.dataset
        return ((dataset.x[part], dataset.y[part]) for part in self.parts)

    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(part) for part in self.parts], np.int64)

    def insights(self) -> list[ArrayLike]:
        if self.seed.insight is None:
            raise ConfigError("the policy asks for 'insight': pass insight=function(x, y)")
        return [self.seed.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return each client's distribution sketch, private at the policy's epsilon."""
        epsilon = float(options.get("epsilon", 0.0))
        inputs, public = self._inputs(options)
        dataset, center = self.seed.federation.dataset, None
        if options.get("center"):  # the mean of the server's public examples
            center = public.reshape(len(public), -1).mean(axis=0)
        tokens = dataset.tokens and public.dtype.kind in "iu"
        blank = empty_sketch(options, public, classes=dataset.classes, center=center, tokens=tokens)
        again = (self.seed.round_number,) if self.seed.round_number else ()
        readings = []
        for client, part, x in zip(self.ids, self.parts, inputs, strict=True):
            sketch, flat = blank.empty_like(), x.reshape(len(x), -1)
            y = dataset.y[part] if blank.labeled else None
            sketch.add(token_sets(flat) if isinstance(blank.family, MinHash) else flat, y)
            if epsilon:
                noise = stream(self.seed.seed, "sketch noise", client, *again)
                sketch = sketch.privatize(epsilon, rng=noise)
            readings.append(sketch.reading())
        return readings

    def _inputs(self, options: Options) -> tuple[Iterable[NDArray[Any]], NDArray[Any]]:
        """Return what is sketched: the vectors of each client, and those of public examples."""
        seed, dataset = self.seed, self.seed.federation.dataset
        public, at = dataset.x_test[:PUBLIC], np.concatenate(self.parts)
        if options.get("embed") == "model":
            embeddings = partial(seed.trainer.embeddings, seed.embedder)
            some = seed.trainer.data(public, dataset.y_test[:PUBLIC])
            x = embeddings(at, seed.data).cpu().numpy()
            public = embeddings(np.arange(len(public)), some).cpu().numpy()
        elif seed.embed is not None:
            x, public = _embedded(seed.embed, dataset.x[at]), _embedded(seed.embed, public)
        else:
            return (dataset.x[part] for part in self.parts), public
        return np.split(x, np.cumsum(self.sizes())[:-1]), public

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        measured = [Job(0, self.seed.held_out[c]) for c in self.ids]
        return self.seed.trainer.losses(self.model, measured, self.seed.data, power=power)

    def features(self) -> NDArray[Any]:
        whole = [Job(0, part) for part in self.parts]
        return self.seed.trainer.features(self.model, whole, self.seed.data)

    def gradients(self) -> Vectors:
        whole = [Job(0, part) for part in self.parts]
        return TensorVectors(self.seed.trainer.gradients(self.model, whole, self.seed.data))

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of each client's batches, in a random order."""
        seed, trainer, spreads = self.seed, self.seed.trainer, []
        size = trainer.training.batch_size
        for client, part in zip(self.ids, self.parts, strict=True):
            rng = stream(seed.seed, "gradient spread", seed.round_number, client)
            order = rng.permutation(part)
            batches = [Job(0, order[at : at + size]) for at in range(0, len(order), size)]
            rows = trainer.gradients(self.model, batches, seed.data)
            spreads.append((rows - rows.mean(dim=0)).double().square().sum(dim=1).mean().sqrt())
        return np.array([float(spread) for spread in spreads])

    def trained(self, fresh: bool = True) -> Vectors:
        """Return models after training on batches of their own, or those that clients hold."""
        seed, trainer, number = self.seed, self.seed.trainer, self.seed.round_number
        if not fresh:
            return TensorVectors(torch.stack([seed.held.get(c, self.model) for c in self.ids]))
        work = jobs(trainer, seed.seed, number, [f"query/{c}" for c in self.ids], self.parts)
        trained = trainer.train(self.model, work, seed.data, lr_at(trainer, number))
        return TensorVectors(trained.clone())

    def steps(self, fresh: bool = True) -> Vectors:
        return TensorVectors(self.trained(fresh).rows - self.model)

    def updates(self) -> Vectors:
        if self.arrived is None:
            raise ConfigError("updates are known only after training: ask for them in the reply")
        return TensorVectors(self.arrived - self.model)

    def durations(self) -> NDArray[np.float64]:
        return np.array([self.seed.seconds_of(c) for c in self.ids])

    expected_durations = durations

    def classes(self) -> int:
        return self.seed.federation.dataset.classes

    def noise_source(self, client: ClientId) -> np.random.Generator:
        return stream(self.seed.seed, "label noise", client)

    def last_array(self) -> int:
        return list(self.seed.trainer.worker.model.parameters())[-1].numel()


def _embedded(embed: Embed, x: NDArray[Any]) -> NDArray[np.float32]:
    vectors = np.asarray(embed(x), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(x):
        raise ConfigError(
            f"embed: returned the shape {vectors.shape} for {len(x)} samples; return one vector "
            "per sample"
        )
    return vectors
