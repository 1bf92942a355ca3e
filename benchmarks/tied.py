"""Two shards per client, with the last labels mostly on slow clients: for the suite `time`."""

from collections.abc import Callable, Sequence

import numpy as np

from fedcohort.partition import PARTITIONS
from fedcohort.rounds import stream
from fedcohort.simulate.clock import Durations

FIRST_RARE = 7  # labels from this one on are mostly with slow clients
SIGMA = 1.0  # of the log-normal speeds and bandwidths
BLUR = 0.5  # of log speeds, before clients are ordered by them


def shards(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The parts of ordinary shards, those with most records of the last labels at the end."""
    parts = PARTITIONS["shards"](labels, clients, rng, per_client=2)
    rare = [np.count_nonzero(labels[part] >= FIRST_RARE) for part in parts]
    return [parts[i] for i in np.argsort(rare, kind="stable")]


def durations() -> Callable[[Sequence[str], int], Durations]:
    """Log-normal speeds that fall, but for some noise, from the first client to the last."""

    def draw(clients: Sequence[str], seed: int) -> Durations:
        drawn = Durations.draw(clients, seed, sigma=SIGMA)
        speeds, rates = (
            np.array([of[client] for client in clients])
            for of in (drawn.samples_per_second, drawn.bytes_per_second)
        )
        noise = stream(seed, "tied").standard_normal(len(clients))
        order = np.argsort(-np.log(speeds) + BLUR * noise)
        return Durations(
            dict(zip(clients, speeds[order].tolist(), strict=True)),
            dict(zip(clients, rates[order].tolist(), strict=True)),
        )

    return draw
