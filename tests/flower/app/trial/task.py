"""Data, model and policy that the apps and the tests share.

What a run shall do comes from the environment, which every process of it inherits.
"""

from __future__ import annotations

import json
import os
from typing import Any

from fedcohort.datasets import Federation, federate, load
from fedcohort.policies import Uniform
from fedcohort.signals.catalog import Needs
from fedcohort.simulate import LocalTraining, build

CLIENTS = 8
LOCAL = LocalTraining(epochs=1, batch_size=16, lr=0.1)


class WithLosses(Uniform):
    """Picks uniformly, so that cohorts can be foreseen, and wants losses with the updates."""

    needs = Needs(reply=frozenset({"loss"}))


def plan() -> dict[str, Any]:
    """What this run shall do."""
    return json.loads(os.environ["FEDCOHORT_TRIAL"])


def federation(clients: int = CLIENTS) -> Federation:
    """The first clients of eight."""
    whole = federate(load("digits"), "shards", clients=CLIENTS, seed=0)
    return Federation(whole.dataset, {c: whole.parts[c] for c in whole.clients[:clients]})


def model():
    return build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
