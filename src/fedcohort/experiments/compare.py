"""Several policies on one setting, over the same seeds."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedcohort.atomic import write_atomically
from fedcohort.datasets import Dataset
from fedcohort.experiments.build import dataset_of, policy_of
from fedcohort.experiments.config import DataConfig, Experiment, LocalConfig, NamedConfig
from fedcohort.experiments.run import read_histories, run
from fedcohort.experiments.summary import Summary
from fedcohort.simulate.history import History, RoundRecord

#: What `fedcohort compare` runs when nothing else is said: real digits, two labels a client.
DEFAULT_SETTING = Experiment(
    rounds=60,
    cohort_size=5,
    seeds=(0, 1, 2),
    target=0.8,
    data=DataConfig("digits", "shards", clients=60, options={"per_client": 2}),
    local=LocalConfig(epochs=5, batch_size=8, lr=0.05),
)


class PolicyResult(NamedTuple):
    """All seeds of one policy."""

    policy: str
    summaries: list[Summary]
    histories: list[History]
    seconds: float


OnRound = Callable[[str, Sequence[RoundRecord]], None]


def compare(
    setting: Experiment,
    policies: Sequence[NamedConfig],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
) -> list[PolicyResult]:
    """Run each policy in a folder of its own under `folder`.

    Parameters
    ----------
    setting : Experiment
        Everything but the policy.
    policies : sequence of NamedConfig
        The policies; all their options are checked before the first run starts.
    folder : path
        Gets a run folder a policy, and ``comparison.json``.
    resume : bool, default=False
        Continue what an interrupted comparison left.
    on_round : callable, optional
        Called with the policy's name and the records of every new round.
    """
    for policy in policies:
        policy_of(policy)
    shared = dataset or dataset_of(setting.data)
    results = []
    for policy in policies:
        experiment = dataclasses.replace(setting, policy=policy)
        place = Path(folder) / policy.name

        def report(records: Sequence[RoundRecord], name: str = policy.name) -> None:
            if on_round is not None:
                on_round(name, records)

        summaries = run(experiment, place, resume=resume, on_round=report, dataset=shared)
        seconds = json.loads((place / "summary.json").read_text())["seconds"]
        results.append(PolicyResult(policy.name, summaries, read_histories(place), seconds))
    content = {r.policy: [s._asdict() for s in r.summaries] for r in results}
    write_atomically(Path(folder) / "comparison.json", json.dumps(content, indent=2).encode())
    return results
