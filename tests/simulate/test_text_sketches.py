"""Tokens are hashed as sets by default: sketches of roles differ, halves of one role do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.datasets import federate
from fedcohort.datasets.base import Dataset
from fedcohort.policies import SketchMatch
from fedcohort.simulate.clients import PUBLIC, SimulatedClients
from fedcohort.sketch.distances import distance_matrix
from modelstack.jobs import Data

WINDOW, ROLES = 40, 4


def roles(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of tokens; each role has favorite tokens. Two clients hold a half of each role."""
    rng = np.random.default_rng(seed)
    x, ids = [], []
    for role in range(ROLES):
        law = rng.dirichlet(np.full(60, 0.3))
        x.append(rng.choice(60, size=(200, WINDOW), p=law))
        ids += [f"{role}{half}" for half in "ab" for _ in range(100)]
    return np.concatenate(x), rng.integers(0, 60, 200 * ROLES), np.array(ids)


def clients() -> SimulatedClients:
    x, y, ids = roles()
    dataset = Dataset("tokens", x, y, x[:200], y[:200], 60, ids, ids[:200], tokens=True)
    federation = federate(dataset, "natural")
    data = Data(torch.from_numpy(dataset.x), torch.from_numpy(dataset.y))
    names = sorted(federation.parts)
    return SimulatedClients(names, None, data, federation, 0, 0, torch.zeros(1))


@pytest.mark.parametrize("hash", ["auto", "srp"])
def test_roles_differ_more_than_halves_of_one_role(hash: str) -> None:
    """Squared MMD between roles over that between halves of a role, which is 0 up to chance.

    Numbers hashed by angle, as all inputs were, do not tell roles apart this well.
    """
    made = clients()
    options = SketchMatch(hash=hash, centered=False, label_weight=0.0).signal_options
    readings = np.array(made.sketches(options["race_sketch"]))
    far = distance_matrix(readings, "mmd")
    role = np.array([int(c[0]) for c in made.ids])
    same = (role[:, None] == role) & ~np.eye(len(role), dtype=bool)
    apart = far[role[:, None] != role].mean() / max(np.abs(far[same]).mean(), 1e-9)
    assert apart > 10 if hash == "auto" else apart < 10


def test_the_center_is_the_mean_of_the_public_examples_alone() -> None:
    """Other examples of the test set do not move the center."""
    rng = np.random.default_rng(0)
    x, y = rng.random((300, 6)).astype(np.float32), rng.integers(0, 2, 300)
    found = []
    for scale in (1.0, 5.0):
        test = x.copy()
        test[PUBLIC:] *= scale
        federation = federate(Dataset("toy", x, y, test, y, 2), "iid", clients=3, seed=0)
        data = Data(torch.from_numpy(x), torch.from_numpy(y))
        made = SimulatedClients(sorted(federation.parts), None, data, federation, 0, 0, data.x[0])
        found.append(made.sketches(SketchMatch().signal_options["race_sketch"]))
    np.testing.assert_array_equal(found[0], found[1])
