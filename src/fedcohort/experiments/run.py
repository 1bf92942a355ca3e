"""Run an experiment in a folder of its own, so that nothing is lost when it is interrupted.

The folder holds ``config.json`` (every default filled in), ``provenance.json`` (versions),
``federation.json`` (who holds which labels), ``rounds.jsonl`` (one line per round and seed, flushed
as it happens: the truth about the run) and ``checkpoint`` (all that the next round depends on). A
run that was killed continues with ``resume=True`` and leaves the same lines as one that was not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcohort import storage
from fedcohort.datasets import Dataset, federate, load
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.experiments import config
from fedcohort.experiments.config import DataConfig, Experiment, NamedConfig
from fedcohort.experiments.results import Run, read_histories, read_json, read_run
from fedcohort.gates import GATES
from fedcohort.options import checked_options
from fedcohort.policies import POLICIES
from fedcohort.provenance import provenance
from fedcohort.registry import import_file, in_file, load_object, make
from fedcohort.rounds import History, RoundRecord
from fedcohort.simulate.aggregation import AGGREGATIONS
from fedcohort.simulate.clock import AVAILABILITIES, Durations
from fedcohort.simulate.models import build as build_model
from fedcohort.simulate.simulation import Simulation
from fedcohort.storage import write_atomically

OnRound = Callable[[Sequence[RoundRecord]], None]
FREE = {"rounds", "seeds", "target", "patience", "checkpoint_every"}  # may change on resume


def run(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
) -> Run:
    """Run an experiment, or what is left of it.

    Parameters
    ----------
    folder : path
        Made if it is not there. A folder with another run in it is refused.
    resume : bool, default=False
        Continue the run in the folder. It must be of the same experiment, but `rounds` may be
        larger, `seeds` longer, and `target`, `patience` and `checkpoint_every` others.
    on_round : callable, optional
        Called with the records of every new round. If it raises, the run is saved first.
    dataset : Dataset, optional
        The data set, if it is loaded already.
    """
    place = storage.make_folder(folder)
    check(experiment)
    with storage.locked_folder(place):
        storage.remove_leftovers(place)
        _claim(place, experiment, resume)
        dataset = dataset or dataset_of(experiment.data)
        _add_seeds(place, experiment, dataset, on_round)
        simulation = simulation_of(experiment, dataset)
        _advance(place, simulation, experiment, on_round)
        return read_run(place)


def _advance(
    place: Path, simulation: Simulation, experiment: Experiment, on_round: OnRound | None
) -> None:
    """Run from the checkpoint, if there is one, until the experiment is over."""
    _describe(place, simulation)
    checkpoint = place / "checkpoint"
    if checkpoint.exists():
        storage.restore(checkpoint, simulation.load_state_dict, storage.load(checkpoint))
    histories = _histories(place, experiment.seeds, simulation.round_number)
    _write(place, histories)
    with (place / "rounds.jsonl").open("a", encoding="utf-8") as file:
        storage.sync_folder(place)

        def keep(records: Sequence[RoundRecord]) -> None:
            file.writelines(map(_line, records))
            file.flush()
            at_checkpoint = simulation.round_number % experiment.checkpoint_every == 0
            due = at_checkpoint or experiment.is_over(histories)
            try:
                if on_round is not None:
                    on_round(records)
            except BaseException:  # Ctrl-C, for example
                due = True
                raise
            finally:
                if due:
                    os.fsync(file.fileno())  # a checkpoint never knows rounds that can be lost
                    storage.save(checkpoint, simulation.state_dict())

        simulation.advance(histories, experiment.rounds, experiment.patience, keep)


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Write the configuration, or check that the folder's run is this one."""
    path, wanted = folder / "config.json", config.dump(experiment)
    if path.exists():
        if not resume:
            raise ConfigError(f"{folder} holds a run already: continue it with --resume")
        with config.naming(path):  # keys that came after it was written have their defaults
            saved = config.dump(config.parse(read_json(path)))
        changed = [key for key in wanted if key not in FREE and wanted[key] != saved[key]]
        seeds = saved["seeds"]
        if wanted["seeds"][: len(seeds)] != seeds:
            changed.append(f"seeds (the first must be {list(seeds)})")
        if changed:
            raise ConfigError(f"{folder} holds another experiment: {', '.join(changed)} differ")
    write_atomically(path, json.dumps(wanted, indent=2).encode())


def _describe(folder: Path, simulation: Simulation) -> None:
    """Write what a report needs beyond the rounds: where the run comes from, and its clients."""
    if not (folder / "provenance.json").exists():
        write_atomically(folder / "provenance.json", json.dumps(provenance(), indent=2).encode())
    content = {
        "model_bytes": simulation.seeds[0].session.model_bytes,
        "seeds": [
            {
                "seed": seed.seed,
                "clients": list(seed.federation.clients),
                "label_counts": seed.federation.label_counts().tolist(),
            }
            for seed in simulation.seeds
        ],
    }
    write_atomically(folder / "federation.json", json.dumps(content).encode())


def _add_seeds(
    place: Path, experiment: Experiment, dataset: Dataset, on_round: OnRound | None
) -> None:
    """Bring seeds that the folder's run does not have to the round that it has reached."""
    checkpoint = place / "checkpoint"
    if not checkpoint.exists():
        return
    state = storage.load(checkpoint)
    try:
        reached, old = int(state["round_number"]), [int(saved["seed"]) for saved in state["seeds"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidCheckpoint(f"{checkpoint}: not the checkpoint of a run") from None
    if reached > experiment.rounds:
        raise ConfigError(
            f"rounds={experiment.rounds}: {place} has {reached} rounds already; ask for more"
        )
    new, added = experiment.seeds[len(old) :], place / "added-seeds"
    if not new:
        shutil.rmtree(added, ignore_errors=True)  # merged already
        return
    younger = dataclasses.replace(experiment, seeds=new, rounds=reached, patience=None)
    run(younger, added, resume=True, on_round=on_round, dataset=dataset)
    other = storage.load(added / "checkpoint")
    _write(place, _histories(place, old, reached) + _histories(added, new, reached))
    storage.save(checkpoint, {**state, "seeds": [*state["seeds"], *other["seeds"]]})
    shutil.rmtree(added)


def _histories(place: Path, seeds: Sequence[int], rounds: int) -> list[History]:
    """Read the rounds that the checkpoint knows; later ones are run again."""
    path = place / "rounds.jsonl"
    written = read_histories(place) if path.exists() else []
    known = {history.seed: history.rounds[:rounds] for history in written}
    if any(len(known.get(seed, ())) < rounds for seed in seeds):
        raise ConfigError(f"{path}: its checkpoint knows {rounds} rounds of all seeds, it does not")
    return [History(seed, known.get(seed, [])) for seed in seeds]


def _write(place: Path, histories: Sequence[History]) -> None:
    rounds = zip(*(history.rounds for history in histories), strict=True)
    lines = "".join(_line(record) for records in rounds for record in records)
    write_atomically(place / "rounds.jsonl", lines.encode())


def _line(record: RoundRecord) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"


#: How fast clients are, from their names and a seed.
DURATIONS: dict[str, Callable[..., Callable[[Sequence[str], int], Durations]]] = {
    "alike": lambda: partial(Durations.draw, sigma=0.0),
    "log-normal": lambda sigma=0.5: partial(Durations.draw, sigma=sigma),
    "phones": lambda: Durations.phones,
    "file": lambda path: lambda clients, seed: Durations.read(path),
}


def check(experiment: Experiment) -> dict[str, Any]:
    """Run the `imports`, and make all that has a name but data and model: mistakes show early."""
    for path in experiment.imports:
        import_file(path)
    known: dict[str, Mapping[str, Any]] = {
        "policy": POLICIES,
        "gate": {"none": lambda: None, **GATES},
        "aggregation": AGGREGATIONS,
        "availability": AVAILABILITIES,
        "durations": DURATIONS,
    }
    named = {kind: getattr(experiment, kind) for kind in known}
    return {k: make(k, named[k].name, known[k], named[k].options) for k in known}


def simulation_of(experiment: Experiment, dataset: Dataset) -> Simulation:
    """Put the whole experiment together, before its first round."""
    data = experiment.data
    same = "cohort_size local pace dropout holdout train_accuracy seeds device evaluate_every"
    return Simulation(
        lambda seed: federate(dataset, data.partition, data.num_clients, seed, **data.options),
        lambda seed: model_of(experiment.model, dataset, seed),
        **check(experiment),
        **{name: getattr(experiment, name) for name in same.split()},
    )


def dataset_of(data: DataConfig) -> Dataset:
    """Load the data set that the experiment names; images of bytes are scaled to [0, 1]."""
    if in_file(data.dataset):
        dataset = load_object("data set", data.dataset)()
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                f"data set {data.dataset!r} returned {type(dataset).__name__}: let it return "
                "fedcohort.datasets.from_arrays(x, y, client_ids)"
            )
    else:
        dataset = load(data.dataset, data.root)
    if dataset.x.dtype == np.uint8:
        x, x_test = (part.astype(np.float32) / 255 for part in (dataset.x, dataset.x_test))
        dataset = dataclasses.replace(dataset, x=x, x_test=x_test)
    return dataset.standardized(data.mean, data.std) if data.standardize else dataset


def model_of(named: NamedConfig, dataset: Dataset, seed: int) -> nn.Module:
    """Build the model and let it answer for one sample, so that a wrong model is named.

    A model of one's own, FILE.py:CLASS, is made as ``CLASS(input_shape, classes, **options)``.
    """
    shape, what = dataset.sample_shape, f"model {named.name!r}"
    architecture: Any = named.name
    options = dict(named.options)
    if in_file(named.name):
        maker = load_object("model", named.name)
        architecture, options = partial(maker, **checked_options(what, maker, options)), {}
    elif options.keys() - {"init"}:
        raise ConfigError(f"{what} has the option init only; write your own as FILE.py:CLASS")
    try:
        model = build_model(architecture, shape, dataset.classes, seed, **options)
        with torch.no_grad():
            outputs = tuple(model.eval()(torch.as_tensor(dataset.x[:1])).shape)
            model.train()  # one sample is too few for a batch norm, which is refused with a remedy
    except (RuntimeError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{what} cannot take the samples of {dataset.name}, {dataset.x.dtype} of shape "
            f"{shape}: choose another model ({error})"
        ) from None
    if outputs != (1, dataset.classes):
        raise ConfigError(
            f"{what} answers with shape {outputs} for one sample of {dataset.name}; "
            f"it must be (1, {dataset.classes})"
        )
    return model
