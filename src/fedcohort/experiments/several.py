"""Several experiments, each in a folder of its own: what comparisons and sweeps share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedcohort.atomic import write_atomically
from fedcohort.experiments.build import dataset_of
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.run import read_histories, run
from fedcohort.experiments.summary import Summary
from fedcohort.simulate.history import History, RoundRecord


class Setting(NamedTuple):
    """One experiment of several, and the name of its folder."""

    name: str
    experiment: Experiment


class PolicyResult(NamedTuple):
    """All seeds of one setting; a comparison's settings bear their policies' names."""

    policy: str
    summaries: list[Summary]
    histories: list[History]
    seconds: float


#: Called with a setting's name and the records of every new round.
OnRound = Callable[[str, Sequence[RoundRecord]], None]

#: Runs settings, each in the folder of its name, and returns their summaries.
Runner = Callable[..., list[list[Summary]]]


def in_turn(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
) -> list[list[Summary]]:
    """Run settings one after the other; a data set is loaded once for all its neighbors."""
    summaries, loaded, dataset = [], None, None
    for name, experiment in settings:
        data = experiment.data
        key = (data.dataset, data.root, data.standardize)
        if dataset is None or key != loaded:
            loaded, dataset = key, dataset_of(data)

        def report(records: Sequence[RoundRecord], name: str = name) -> None:
            if on_round is not None:
                on_round(name, records)

        place = Path(folder) / name
        summaries.append(run(experiment, place, resume=resume, on_round=report, dataset=dataset))
    return summaries


def run_several(
    settings: Sequence[Setting],
    folder: str | os.PathLike[str],
    file: str,
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    runner: Runner = in_turn,
) -> list[PolicyResult]:
    """Run settings under `folder`, and write all their summaries to one `file` there.

    Parameters
    ----------
    settings : sequence of Setting
    folder : path
    file : str
    resume : bool, default=False
        Continue what an interrupted call left.
    on_round : callable, optional
    runner : callable
        What runs them: `in_turn`, or `fedcohort.distribute.runs.run_all` on a cluster.
    """
    root = Path(folder)
    results = []
    summaries = runner(settings, root, resume=resume, on_round=on_round)
    for (name, _), own in zip(settings, summaries, strict=True):
        seconds = json.loads((root / name / "summary.json").read_text())["seconds"]
        results.append(PolicyResult(name, own, read_histories(root / name), seconds))
    content = {r.policy: [s._asdict() for s in r.summaries] for r in results}
    write_atomically(root / file, json.dumps(content, indent=2).encode())
    return results
