"""Data, model and policy that the apps and the tests share.

What a run does comes from the environment, which every process of it inherits. PyTorch is imported
where it is needed only: a SuperNode starts a process per message, and most need none.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import numpy as np

from fedcohort.datasets import Federation, federate, load
from fedcohort.flower.wire import from_bytes
from fedcohort.policies import Uniform
from fedcohort.signals.catalog import Needs

CLIENTS = 8


class WithLosses(Uniform):
    """Picks uniformly, so that cohorts can be foreseen; wants sketches, and losses with updates."""

    needs = Needs(profile=frozenset({"race_sketch"}), reply=frozenset({"loss"}))
    signal_options: ClassVar = {"race_sketch": {"rows": 10, "bits": 3}}


def plan() -> dict[str, Any]:
    """Return what this run does; nothing outside of a run, where doctests are looked for."""
    return json.loads(os.environ.get("FEDCOHORT_TRIAL", "{}"))


def fault(client: str, kind: str, number: int) -> dict[str, str]:
    """What the plan makes a client do in a round: raise, hang, wait for a file or nothing."""
    faults = plan().get("faults", []) if kind == "train" else []
    return next((f for f in faults if (f["client"], f["round"]) == (client, number)), {})


def federation(clients: int = CLIENTS) -> Federation:
    """Return the first clients of eight."""
    whole = federate(load("digits"), "shards", clients=CLIENTS, seed=0)
    return Federation(whole.dataset, {c: whole.parts[c] for c in whole.clients[:clients]})


def bytes_of(message) -> int:
    """Bytes of a message that are numbers, and not the header of an .npy file."""
    if message.has_error():
        return 0
    records, configs = message.content.array_records, message.content.config_records
    arrays = [array.numpy() for record in records.values() for array in record.values()]
    for value in (value for config in configs.values() for value in config.values()):
        is_reading = isinstance(value, bytes) and value.startswith(b"\x93NUMPY")
        if isinstance(value, bytes):
            arrays.append(
                from_bytes(value, len(value)) if is_reading else np.frombuffer(value, "u1")
            )
    return sum(array.nbytes for array in arrays)


def accuracy(arrays) -> float:
    import torch

    torch.set_num_threads(1)
    network, dataset = model(), federation().dataset
    network.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        predicted = network(torch.from_numpy(dataset.x_test)).argmax(dim=1).numpy()
    return float((predicted == dataset.y_test).mean())


def model():
    from fedcohort.simulate import build

    return build("mlp-64-30", (1, 8, 8), classes=10, seed=0)


def local():
    from fedcohort.simulate import LocalTraining

    return LocalTraining(epochs=1, batch_size=16, lr=0.1)
