"""Run an experiment in a folder of its own, so that nothing is lost when it is interrupted.

The folder holds ``config.json`` (every default filled in), ``provenance.json`` (command, versions),
``federation.json`` (who holds which labels), ``rounds.jsonl`` (one line per round and seed, flushed
as it happens), ``checkpoint`` (all that the next round depends on) and, at the end,
``summary.json``. A run that was killed continues with ``resume=True`` and leaves the same lines as
one that was not. A finished run continues with more rounds or more seeds.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedcohort
from fedcohort import storage
from fedcohort.datasets import Dataset, Federation, federate, from_arrays, load
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.experiments import config
from fedcohort.experiments.config import DataConfig, Experiment, NamedConfig
from fedcohort.experiments.results import read_histories, read_json
from fedcohort.experiments.summary import Summary, summarize
from fedcohort.gates import GATES, Gate
from fedcohort.options import checked_options
from fedcohort.policies import POLICIES, Policy
from fedcohort.registry import import_file, in_file, load_object, make
from fedcohort.simulate.aggregation import AGGREGATIONS, Aggregation
from fedcohort.simulate.availability import AVAILABILITIES, Availability
from fedcohort.simulate.history import RoundRecord, record_from
from fedcohort.simulate.models import build as build_model
from fedcohort.simulate.simulation import Simulation
from fedcohort.storage import locked_folder, remove_leftovers, sync_folder, write_atomically

OnRound = Callable[[Sequence[RoundRecord]], None]


def dataset_of(data: DataConfig) -> Dataset:
    """Load the data set that the experiment names; images of bytes are scaled to [0, 1]."""
    dataset = _own_dataset(data) if in_file(data.dataset) else load(data.dataset, data.root)
    if dataset.x.dtype == np.uint8:
        x, x_test = (part.astype(np.float32) / 255 for part in (dataset.x, dataset.x_test))
        dataset = dataclasses.replace(dataset, x=x, x_test=x_test)
    return dataset.standardized() if data.standardize else dataset


def _own_dataset(data: DataConfig) -> Dataset:
    """Call FILE.py:FUNCTION, which returns a Dataset or the first arguments of `from_arrays`."""
    function = load_object("data set", data.dataset)
    takes_root = "root" in inspect.signature(function).parameters
    found = function(root=data.root) if takes_root else function()
    if isinstance(found, Dataset):
        return found
    if isinstance(found, tuple) and 2 <= len(found) <= 5:
        return from_arrays(*found, name=data.dataset.rpartition(":")[2])
    raise ConfigError(
        f"data set {data.dataset!r} must return a Dataset or arrays (x, y, client_ids, x_test, "
        f"y_test), the last three optional; it returned {type(found).__name__}"
    )


def federation_of(data: DataConfig, dataset: Dataset, seed: int) -> Federation:
    """Split the data set over the clients of one seed."""
    partition = data.partition
    split = load_object("partition", partition) if in_file(partition) else partition
    try:
        return federate(dataset, split, data.num_clients, seed, **data.options)
    except TypeError as error:
        raise ConfigError(f"[data] options of partition {data.partition!r}: {error}") from None


def policy_of(config: NamedConfig) -> Policy:
    """Make the policy, with errors that name its options."""
    policy: Policy = make("policy", config.name, POLICIES, config.options)
    return policy


def gate_of(config: NamedConfig) -> Gate | None:
    """Make the gate; None if the experiment has none."""
    gate: Gate | None = make("gate", config.name, {"none": _no_gate, **GATES}, config.options)
    return gate


def _no_gate() -> None:
    return None


def check(experiment: Experiment) -> None:
    """Find wrong names and options before anything is loaded; this runs the `imports`."""
    for path in experiment.imports:
        import_file(path)
    policy_of(experiment.policy)
    gate_of(experiment.gate)
    make("aggregation", experiment.aggregation.name, AGGREGATIONS, experiment.aggregation.options)
    _availability(experiment)


def simulation_of(experiment: Experiment, dataset: Dataset) -> Simulation:
    """Put the whole experiment together, at round 0."""
    check(experiment)
    named = experiment.aggregation
    aggregation: Aggregation = make("aggregation", named.name, AGGREGATIONS, named.options)
    return Simulation(
        lambda seed: federation_of(experiment.data, dataset, seed),
        lambda seed: model_of(experiment.model, dataset, seed),
        lambda: policy_of(experiment.policy),
        cohort_size=experiment.cohort_size,
        local=experiment.local,
        aggregation=aggregation,
        availability=_availability(experiment),
        dropout=experiment.dropout,
        gate=gate_of(experiment.gate),
        seeds=experiment.seeds,
        device=experiment.device,
        evaluate_every=experiment.evaluate_every,
    )


def model_of(config: NamedConfig, dataset: Dataset, seed: int) -> nn.Module:
    """Build the model and let it answer for one sample, so that a wrong model is named."""
    shape, what = dataset.sample_shape, f"model {config.name!r}"
    own = load_object("model", config.name) if in_file(config.name) else config.name
    if isinstance(own, str):
        if config.options:
            raise ConfigError(f"{what} has no options; write your own as FILE.py:CLASS")
        model = build_model(own, shape, dataset.classes, seed=seed)
    else:
        model = build_model(_own_model(what, own, config.options), shape, dataset.classes, seed)
    try:
        with torch.no_grad():
            outputs = model(torch.as_tensor(dataset.x[:1]))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot take the samples of {dataset.name}, {dataset.x.dtype} of shape "
            f"{shape}: choose another model ({error})"
        ) from None
    if outputs.shape != (1, dataset.classes):
        raise ConfigError(
            f"{what} answers with shape {tuple(outputs.shape)} for one sample of {dataset.name}; "
            f"it must be (1, {dataset.classes})"
        )
    return model


def _own_model(
    what: str, maker: Callable[..., nn.Module], options: Mapping[str, Any]
) -> Callable[..., nn.Module]:
    """Call it with (input_shape, classes) if it takes those, and with its options."""
    given = checked_options(what, maker, options)
    free = [
        p
        for p in inspect.signature(maker).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.default is p.empty
        and p.name not in given
    ]

    def built(shape: Sequence[int], classes: int) -> nn.Module:
        return maker(*(shape, classes)[: len(free)], **given)

    return built


def _availability(experiment: Experiment) -> Availability:
    named = experiment.availability
    availability: Availability = make("availability", named.name, AVAILABILITIES, named.options)
    return availability


def run(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
) -> list[Summary]:
    """Run an experiment, or what is left of it, and return one summary per seed.

    Parameters
    ----------
    experiment : Experiment
        What to run.
    folder : path
        Made if it is not there. A folder with another run in it is refused.
    resume : bool, default=False
        Continue the run in the folder. It must be of the same experiment, but `rounds` may be
        larger, `seeds` may be longer, and `target` and `checkpoint_every` may be others.
    on_round : callable, optional
        Called with the records of every new round.
    dataset : Dataset, optional
        The data set, if it is loaded already.
    """
    place = made(Path(folder))
    check(experiment)
    with locked_folder(place):
        remove_leftovers(place)
        _claim(place, experiment, resume)
        dataset = dataset or dataset_of(experiment.data)
        _add_seeds(place, experiment, dataset, on_round)
        return _run_on(place, experiment, dataset, on_round)


def _run_on(
    place: Path, experiment: Experiment, dataset: Dataset, on_round: OnRound | None
) -> list[Summary]:
    """Run from the checkpoint, if there is one, to the last round."""
    simulation = simulation_of(experiment, dataset)
    _describe(place, simulation)
    state = _checkpoint(place)
    if state is not None:
        storage.restore(place / "checkpoint", simulation.load_state_dict, state)
    started = time.perf_counter() - _seconds(state)
    lines = place / "rounds.jsonl"
    _keep_lines(lines, experiment.seeds, simulation.round_number)
    with lines.open("a", encoding="utf-8") as file:
        sync_folder(place)
        while simulation.round_number < experiment.rounds:
            records = simulation.step()
            file.writelines(json.dumps(asdict(r)) + "\n" for r in records)
            file.flush()
            number = simulation.round_number
            if number == experiment.rounds or number % experiment.checkpoint_every == 0:
                os.fsync(file.fileno())  # a checkpoint never knows rounds that can be lost
                seconds = time.perf_counter() - started
                storage.save(
                    place / "checkpoint", {**simulation.state_dict(), "wall_seconds": seconds}
                )
            if on_round is not None:
                on_round(records)
    return _summarized(simulation, experiment, place, _seconds(_checkpoint(place)))


def _seconds(state: Mapping[str, Any] | None) -> float:
    """Return the wall-clock time of the rounds in a checkpoint."""
    seconds = 0.0 if state is None else state.get("wall_seconds", 0.0)
    return seconds if isinstance(seconds, float) else 0.0


def made(folder: Path) -> Path:
    """Make the folder if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{folder}: a run needs a folder, and a file is in the way") from None
    return folder


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Write the configuration, or check that the folder's run is this one."""
    path = folder / "config.json"
    wanted = json.loads(json.dumps(config.dump(experiment)))
    if path.exists():
        if not resume:
            raise ConfigError(f"{folder} holds a run already: continue it with --resume")
        found = read_json(path)
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: not a configuration")
        _check_same(folder, wanted, found)
        if found == wanted:
            return
    write_atomically(path, json.dumps(wanted, indent=2).encode())


def _check_same(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    free = {"rounds", "seeds", "target", "checkpoint_every"}
    full = _completed(found)
    same = [key for key in wanted if wanted[key] in (found.get(key), full.get(key))]
    changed = [key for key in wanted if key not in free and key not in same]
    seeds = found.get("seeds", [])
    if not isinstance(seeds, list) or wanted["seeds"][: len(seeds)] != seeds:
        changed.append(f"seeds (the first must be {seeds})")
    if changed:
        raise ConfigError(f"{folder} holds another experiment: {', '.join(changed)} differ")


def _completed(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the defaults of fields that came after it was written."""
    try:
        full: dict[str, Any] = json.loads(json.dumps(config.dump(config.parse(found))))
    except ConfigError:
        return found
    return full


def _describe(folder: Path, simulation: Simulation) -> None:
    """Write what a report needs beyond the rounds: where the run comes from, and its clients."""
    if not (folder / "provenance.json").exists():
        write_atomically(folder / "provenance.json", json.dumps(provenance(), indent=2).encode())
    content = {
        "model_bytes": simulation.sessions[0].model_bytes,
        "seeds": [
            {
                "seed": session.seed,
                "clients": list(federation.clients),
                "label_counts": federation.label_counts().tolist(),
            }
            for session, federation in zip(simulation.sessions, simulation.federations, strict=True)
        ],
    }
    write_atomically(folder / "federation.json", json.dumps(content).encode())


def provenance() -> dict[str, Any]:
    """Return the command of this process and the versions that its results depend on."""
    versions = {"fedcohort": fedcohort.__version__, "python": platform.python_version()}
    for name in ("numpy", "scipy", "scikit-learn", "torch"):
        versions[name] = importlib.metadata.version(name)
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"command": shlex.join(command), "versions": versions, "machine": platform.machine()}


def _checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / "checkpoint"
    return storage.load(path) if path.exists() else None


def _add_seeds(
    place: Path, experiment: Experiment, dataset: Dataset, on_round: OnRound | None
) -> None:
    """Bring seeds that the folder's run does not have to the round that it has reached."""
    state = _checkpoint(place)
    if state is None:
        return
    try:
        reached, old = int(state["round_number"]), [int(saved["seed"]) for saved in state["seeds"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidCheckpoint(f"{place / 'checkpoint'}: not the checkpoint of a run") from None
    if reached > experiment.rounds:
        raise ConfigError(f"{place} has {reached} rounds already: rounds = {experiment.rounds}")
    new, added = experiment.seeds[len(old) :], place / "added-seeds"
    if not new:
        shutil.rmtree(added, ignore_errors=True)  # merged already
        return
    run(
        dataclasses.replace(experiment, seeds=new, rounds=reached),
        added,
        resume=True,
        on_round=on_round,
        dataset=dataset,
    )
    other = storage.load(added / "checkpoint")
    rows = _rows(place / "rounds.jsonl", old, reached) + _rows(added / "rounds.jsonl", new, reached)
    rows.sort(key=lambda row: (row[0], experiment.seeds.index(row[1])))
    merged = {**state, "seeds": [*state["seeds"], *other["seeds"]]}
    merged["wall_seconds"] = _seconds(state) + _seconds(other)
    write_atomically(place / "rounds.jsonl", b"".join(line for _, _, line in rows))
    storage.save(place / "checkpoint", merged)
    shutil.rmtree(added)


def _keep_lines(path: Path, seeds: Sequence[int], rounds: int) -> None:
    """Drop the lines of rounds that the checkpoint does not know: they are run again."""
    if path.exists():
        rows = _rows(path, seeds, rounds)
        write_atomically(path, b"".join(line for _, _, line in rows))


def _rows(path: Path, seeds: Sequence[int], rounds: int) -> list[tuple[int, int, bytes]]:
    """Return round, seed and text of the lines of these seeds before a round."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = record_from(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue  # torn; the count below tells whether it was needed
        if record.round < rounds and record.seed in seeds:
            rows.append((record.round, record.seed, line))
    if len(rows) != rounds * len(seeds):
        raise ConfigError(
            f"{path} has {len(rows)} whole lines, its checkpoint knows {rounds} rounds of "
            f"{len(seeds)} seeds"
        )
    return rows


def _summarized(
    simulation: Simulation, experiment: Experiment, folder: Path, seconds: float
) -> list[Summary]:
    parts = zip(read_histories(folder), simulation.federations, simulation.sessions, strict=True)
    summaries = [
        summarize(history, federation, session.ledger, experiment.target, session.model_bytes)
        for history, federation, session in parts
    ]
    content: dict[str, Any] = {
        "policy": experiment.policy.label,
        "seconds": seconds,
        "seeds": [s.as_dict() for s in summaries],
        "dropped_readings": [dict(s.signals.dropped) for s in simulation.sessions],
    }
    write_atomically(folder / "summary.json", json.dumps(content, indent=2).encode())
    return summaries
