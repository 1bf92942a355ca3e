"""From an experiment's description to the simulation it describes.

Run an experiment in a folder of its own, so that nothing is lost when it is interrupted.

The folder holds ``config.json`` (every default filled in), ``provenance.json`` (command, versions),
``federation.json`` (who holds which labels), ``rounds.jsonl`` (one line per round and seed, flushed
as it happens), ``checkpoint`` (all that the next round depends on) and, at the end,
``summary.json``. A run that was killed continues with ``resume=True`` and leaves the same lines as
one that was not.

Logging to TensorBoard or MLflow, where one of them is installed.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedcohort
from fedcohort import checkpoint
from fedcohort.atomic import locked_folder, remove_leftovers, sync_folder, write_atomically
from fedcohort.datasets import Dataset, Federation, federate, load
from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.config import DataConfig, Experiment, LocalConfig, NamedConfig
from fedcohort.experiments.results import read_histories, read_json
from fedcohort.experiments.summary import Summary, summarize
from fedcohort.gates import GATES, Gate
from fedcohort.policies import POLICIES, Policy
from fedcohort.registry import lookup, unknown
from fedcohort.simulate.aggregation import AGGREGATIONS
from fedcohort.simulate.availability import AVAILABILITIES, Availability
from fedcohort.simulate.history import RoundRecord
from fedcohort.simulate.local import LocalTraining, Schedule
from fedcohort.simulate.models import build as build_model
from fedcohort.simulate.seed import Aggregation
from fedcohort.simulate.simulation import Simulation


def dataset_of(data: DataConfig) -> Dataset:
    """Load the data set that the experiment names."""
    dataset = load(data.dataset, data.root)
    return dataset.standardized() if data.standardize else dataset


def federation_of(data: DataConfig, dataset: Dataset, seed: int) -> Federation:
    """Split the data set over the clients of one seed."""
    options = {} if data.partition == "natural" else {"clients": data.clients}
    try:
        return federate(dataset, data.partition, seed=seed, **options, **data.options)
    except TypeError as error:
        raise ConfigError(f"[data] options of partition {data.partition!r}: {error}") from None


def policy_of(config: NamedConfig) -> Policy:
    """Make the policy, with errors that name its options."""
    policy: Policy = _made("policy", POLICIES, config)
    return policy


def gate_of(config: NamedConfig) -> Gate | None:
    """Make the gate; "none" is no gate at all."""
    if config.name == "none":
        return None
    gate: Gate = _made("gate", GATES, config)
    return gate


def simulation_of(experiment: Experiment, dataset: Dataset) -> Simulation:
    """Put the whole experiment together, at round 0."""
    shape = dataset.x.shape[1:]
    policy_of(experiment.policy)  # a wrong option is reported before anything is loaded
    aggregation: Aggregation = _made("aggregation", AGGREGATIONS, experiment.aggregation)
    availability: Availability = _made("availability", AVAILABILITIES, experiment.availability)
    return Simulation(
        lambda seed: federation_of(experiment.data, dataset, seed),
        lambda seed: build_model(experiment.model.name, shape, dataset.classes, seed=seed),
        lambda: policy_of(experiment.policy),
        cohort_size=experiment.cohort_size,
        local=local_of(experiment.local),
        aggregation=aggregation,
        availability=availability,
        dropout=experiment.dropout,
        gate=gate_of(experiment.gate),
        seeds=experiment.seeds,
        device=experiment.device,
        evaluate_every=experiment.evaluate_every,
    )


def local_of(config: LocalConfig) -> LocalTraining:
    """Translate the flat table of a config file."""
    if config.halve_at and config.round_decay != 1.0:
        raise ConfigError("[local] give halve_at or round_decay, not both")
    schedule = None
    if config.halve_at:
        schedule = Schedule(0.5, config.halve_at)
    elif config.round_decay != 1.0:
        schedule = Schedule(config.round_decay)
    return LocalTraining(
        epochs=config.epochs,
        steps=config.steps,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        prox_mu=config.prox_mu,
        epoch_decay=config.epoch_decay,
        schedule=schedule,
    )


def _made(what: str, registry: Mapping[str, Callable[..., Any]], config: NamedConfig) -> Any:
    """Call a registry's entry with the configured options."""
    maker = lookup(what, config.name, registry)
    allowed = list(inspect.signature(maker).parameters)
    for key in config.options:
        if key not in allowed:
            raise unknown("option", key, allowed, f"of {what} {config.name!r}")
    try:
        return maker(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{what}] {config.name!r}: {error}") from None


OnRound = Callable[[Sequence[RoundRecord]], None]


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
        Made if it does not exist. It is locked while it is written; a folder of another run is
        refused.
    resume : bool, default=False
        Continue the run in the folder; it must be of the same experiment.
    on_round : callable, optional
        Called with the records of every new round.
    dataset : Dataset, optional
        The data set, if it is loaded already.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with locked_folder(place):
        remove_leftovers(place)
        _claim(place, experiment, resume)
        simulation = simulation_of(experiment, dataset or dataset_of(experiment.data))
        _describe(place, simulation)
        started = time.perf_counter() - _restored(simulation, place)
        lines = place / "rounds.jsonl"
        _keep_lines(lines, simulation.round_number * len(experiment.seeds))
        with lines.open("a", encoding="utf-8") as file:
            sync_folder(place)
            while simulation.round_number < experiment.rounds:
                records = simulation.step()
                file.writelines(json.dumps(asdict(r)) + "\n" for r in records)
                file.flush()
                if _save_is_due(simulation, experiment):
                    os.fsync(file.fileno())  # a checkpoint never knows rounds that can be lost
                    _save(simulation, place, time.perf_counter() - started)
                if on_round is not None:
                    on_round(records)
        return _summarized(simulation, experiment, place, time.perf_counter() - started)


def _restored(simulation: Simulation, folder: Path) -> float:
    """Continue from the folder's checkpoint, if there is one, and return the seconds so far."""
    path = folder / "checkpoint"
    if not path.exists():
        return 0.0
    state = checkpoint.load(path)
    checkpoint.restore(path, simulation.load_state_dict, state)
    seconds = state.get("wall_seconds", 0.0)
    return seconds if isinstance(seconds, float) else 0.0


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
        changed = [key for key in wanted if found.get(key) != wanted[key]]
        if changed:
            raise ConfigError(f"{folder} holds another experiment: {', '.join(changed)} differ")
    else:
        write_atomically(path, json.dumps(wanted, indent=2).encode())


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


def _keep_lines(path: Path, count: int) -> None:
    """Drop the lines of rounds that the checkpoint does not know: they are run again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < count:
        raise ConfigError(f"{path} has {len(lines)} lines, its checkpoint knows {count} rounds")
    write_atomically(path, b"".join(lines[:count]))


def _save_is_due(simulation: Simulation, experiment: Experiment) -> bool:
    number = simulation.round_number
    return number == experiment.rounds or number % experiment.checkpoint_every == 0


def _save(simulation: Simulation, folder: Path, seconds: float) -> None:
    state = {**simulation.state_dict(), "wall_seconds": seconds}
    checkpoint.save(folder / "checkpoint", state)


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
        "seeds": [s.as_dict() for s in summaries],
        "dropped_readings": [dict(s.signals.dropped) for s in simulation.sessions],
    }
    write_atomically(folder / "summary.json", json.dumps(content, indent=2).encode())
    return summaries


Log = Callable[[Sequence[RoundRecord]], None]


@contextmanager
def tracker(kind: str | None, folder: Path, parameters: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs a round's records; with `kind` None it does nothing.

    TensorBoard events and the MLflow store go into the run folder; MLflow's own variables, such as
    ``MLFLOW_TRACKING_URI``, are honoured if set.
    """
    if kind is None:
        yield lambda records: None
    elif kind == "tensorboard":
        with _tensorboard(folder) as log:
            yield log
    elif kind == "mlflow":
        with _mlflow(folder, parameters) as log:
            yield log
    else:
        raise unknown("tracker", kind, ["tensorboard", "mlflow"])


def metrics_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record, by name and seed."""
    values = {
        "accuracy": record.accuracy,
        "loss": record.loss,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
    }
    return {f"{k}/seed-{record.seed}": float(v) for k, v in values.items() if v is not None}


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("track: tensorboard is not installed (pip install tensorboard)") from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(records: Sequence[RoundRecord]) -> None:
        for record in records:
            for name, value in metrics_of(record).items():
                writer.add_scalar(name, value, record.round)
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _mlflow(folder: Path, parameters: Mapping[str, Any]) -> Iterator[Log]:
    try:
        import mlflow
    except ImportError:
        raise ConfigError("track: mlflow is not installed (pip install mlflow-skinny)") from None
    if "MLFLOW_TRACKING_URI" not in os.environ:
        store = (folder / "mlflow").absolute()
        store.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{store / 'mlflow.db'}")
    with mlflow.start_run():
        mlflow.log_params({k: str(v) for k, v in parameters.items()})

        def log(records: Sequence[RoundRecord]) -> None:
            for record in records:
                mlflow.log_metrics(metrics_of(record), step=record.round)

        yield log
