"""Run an experiment in a folder of its own, so that nothing is lost when it is interrupted.

The folder holds ``config.json`` (every default filled in), ``rounds.jsonl`` (a line a round and
seed, flushed as it happens), ``checkpoint`` (all that the next round depends on) and, at the end,
``summary.json``. A run that was killed continues with ``resume=True`` and leaves the same lines as
one that was not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcohort import checkpoint
from fedcohort.atomic import write_atomically
from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.build import dataset_of, simulation_of
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.summary import Summary, summarize
from fedcohort.simulate.history import History, RoundRecord, record_from
from fedcohort.simulate.simulation import Simulation

OnRound = Callable[[Sequence[RoundRecord]], None]


def run(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
) -> list[Summary]:
    """Run an experiment, or what is left of it, and return a summary a seed.

    Parameters
    ----------
    experiment : Experiment
        What to run.
    folder : path
        Made if it is not there. A folder with another run in it is refused.
    resume : bool, default=False
        Continue the run in the folder; it must be of the same experiment.
    on_round : callable, optional
        Called with the records of every new round.
    dataset : Dataset, optional
        The data set, if it is loaded already.
    """
    place = Path(folder)
    _claim(place, experiment, resume)
    simulation = simulation_of(experiment, dataset or dataset_of(experiment.data))
    if (place / "checkpoint").exists():
        simulation.load_state_dict(checkpoint.load(place / "checkpoint"))
    lines = place / "rounds.jsonl"
    _keep_lines(lines, simulation.round_number * len(experiment.seeds))
    started = time.perf_counter()
    with lines.open("a", encoding="utf-8") as file:
        while simulation.round_number < experiment.rounds:
            records = simulation.step()
            file.writelines(json.dumps(asdict(r)) + "\n" for r in records)
            file.flush()
            _save_if_due(simulation, experiment, place)
            if on_round is not None:
                on_round(records)
    return _summarized(simulation, experiment, place, time.perf_counter() - started)


def read_histories(folder: str | os.PathLike[str]) -> list[History]:
    """Read the rounds of a run folder, one history a seed."""
    path = Path(folder) / "rounds.jsonl"
    if not path.exists():
        raise ConfigError(f"{folder}: no run here (there is no rounds.jsonl)")
    histories: dict[int, History] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = record_from(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: not a round record ({error})") from None
        histories.setdefault(record.seed, History(record.seed)).rounds.append(record)
    return list(histories.values())


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Write the configuration, or check that the folder's run is this one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    wanted = json.loads(json.dumps(config.dump(experiment)))
    if path.exists():
        if not resume:
            raise ConfigError(f"{folder} holds a run already: continue it with --resume")
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in wanted if found.get(key) != wanted[key]]
        if changed:
            raise ConfigError(f"{folder} holds another experiment: {', '.join(changed)} differ")
    else:
        write_atomically(path, json.dumps(wanted, indent=2).encode())


def _keep_lines(path: Path, count: int) -> None:
    """Drop the lines of rounds that the checkpoint does not know: they are run again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < count:
        raise ConfigError(f"{path} has {len(lines)} lines, its checkpoint knows {count} rounds")
    write_atomically(path, b"".join(lines[:count]))


def _save_if_due(simulation: Simulation, experiment: Experiment, folder: Path) -> None:
    number = simulation.round_number
    if number == experiment.rounds or number % experiment.checkpoint_every == 0:
        checkpoint.save(folder / "checkpoint", simulation.state_dict())


def _summarized(
    simulation: Simulation, experiment: Experiment, folder: Path, seconds: float
) -> list[Summary]:
    parts = zip(read_histories(folder), simulation.federations, simulation.sessions, strict=True)
    summaries = [
        summarize(history, federation, session.ledger, experiment.target, session.model_bytes)
        for history, federation, session in parts
    ]
    content: dict[str, Any] = {
        "policy": experiment.policy.name,
        "seconds": seconds,
        "seeds": [s._asdict() for s in summaries],
        "dropped_readings": [dict(s.signals.dropped) for s in simulation.sessions],
    }
    write_atomically(folder / "summary.json", json.dumps(content, indent=2).encode())
    return summaries
