"""A round on several actors: the number of actors, and their deaths, change no bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from fedcohort.datasets import federate, load
from fedcohort.distribute.rounds import ShardedTrainer
from fedcohort.exceptions import ConfigError
from fedcohort.simulate import LocalTraining, Simulation, build

DATA = load("digits")
FEDERATION = federate(DATA, "dirichlet-per-client", clients=20, seed=0, alpha=0.5)
SMALL = {"cpus": 0.25, "group": 3}


def simulation(**options):
    return Simulation(
        FEDERATION,
        lambda seed: build("mlp-64-30", DATA.x.shape[1:], DATA.classes, seed=seed),
        "power-of-choice",
        cohort_size=7,
        local=LocalTraining(epochs=2, batch_size=8, lr=0.1, augment="crop-flip"),
        seeds=(0, 1),
        device="cpu",
        **options,
    )


def models(of):
    return torch.stack([seed.model for seed in of.seeds]).numpy()


def test_neither_the_number_of_workers_nor_their_death_changes_a_bit(connected):
    """Cohorts of 7 for two seeds are 5 groups, on 1, 2 and 3 actors; one of 3 is killed."""
    import ray

    alone = simulation()
    expected = [[record.selected for record in alone.step()] for _ in range(3)]
    found = []
    for workers in (1, 2, 3):
        sharded = simulation(trainer=partial(ShardedTrainer, workers=workers, **SMALL))
        cohorts = []
        for number in range(3):
            if (workers, number) == (3, 1):
                ray.kill(sharded.trainer.actors[0], no_restart=False)
            cohorts.append([record.selected for record in sharded.step()])
        assert cohorts == expected
        found.append(models(sharded))
        sharded.trainer.close()
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    # Groups of 3 and of 14 clients are multiplied in another order: float32, 3 rounds.
    np.testing.assert_allclose(found[0], models(alone), atol=1e-4)


def test_a_cluster_without_room_is_said(connected):
    trainer = partial(ShardedTrainer, workers=1, cpus=64, timeout=2)
    with pytest.raises(ConfigError, match=r"2 s.*2 CPU"):
        simulation(trainer=trainer).step()
    with pytest.raises(ConfigError, match="workers=0"):
        simulation(trainer=partial(ShardedTrainer, workers=0))
