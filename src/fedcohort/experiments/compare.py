"""Several policies on one setting, over the same seeds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from fedcohort.experiments.build import gate_of, policy_of
from fedcohort.experiments.config import NO_GATE, DataConfig, Experiment, LocalConfig, NamedConfig
from fedcohort.experiments.several import (
    OnRound,
    PolicyResult,
    Runner,
    Setting,
    in_turn,
    run_several,
)

#: What `fedcohort compare` runs when nothing else is said: real digits, two labels a client.
DEFAULT_SETTING = Experiment(
    rounds=60,
    cohort_size=5,
    seeds=(0, 1, 2),
    target=0.8,
    data=DataConfig("digits", "shards", clients=60, options={"per_client": 2}),
    local=LocalConfig(epochs=5, batch_size=8, lr=0.05),
)

#: What a gate's accuracy and traffic are compared with: random cohorts that always upload.
BASELINE = "fedavg"


def compare(
    setting: Experiment,
    policies: Sequence[NamedConfig],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    runner: Runner = in_turn,
) -> list[PolicyResult]:
    """Run each policy in a folder of its own under `folder`, and write ``comparison.json``.

    With a gate, plain FedAvg runs first, named `BASELINE`: random cohorts and no gate.

    Parameters
    ----------
    setting : Experiment
        Everything but the policy.
    policies : sequence of NamedConfig
        The policies; all their options are checked before the first run starts.
    folder, resume, on_round, runner
        As for `fedcohort.experiments.several.run_several`.
    """
    gate_of(setting.gate)
    for policy in policies:
        policy_of(policy)
    settings = [Setting(p.name, dataclasses.replace(setting, policy=p)) for p in policies]
    if setting.gate != NO_GATE:
        plain = dataclasses.replace(setting, policy=NamedConfig("uniform"), gate=NO_GATE)
        settings.insert(0, Setting(BASELINE, plain))
    return run_several(
        settings, folder, "comparison.json", resume=resume, on_round=on_round, runner=runner
    )
