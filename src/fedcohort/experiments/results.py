"""Results of runs: read from their folders, summarized per seed, handed on as tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort import metrics
from fedcohort.exceptions import ConfigError
from fedcohort.experiments import config
from fedcohort.experiments.config import NO_GATE, Experiment, NamedConfig
from fedcohort.rounds import ClientId, History, RoundRecord, check_id
from fedcohort.storage import refuse_links_in

if TYPE_CHECKING:
    import pyarrow as pa

#: Names of the run that others are compared with, where settings are unknown.
BASELINES = ("fedavg", "uniform")
COHORTS = ("selected", "finished", "withheld", "cut", "late")
MAX_LAST_ROUNDS = 50  # evaluations that `accuracy` is the mean of


class Summary(NamedTuple):
    """The result of one seed of a run; NaN is what cannot be known."""

    seed: int
    rounds: int
    accuracy: float  # over the last 50 evaluated rounds, or the last fifth of fewer than 250
    accuracy_deviation: float
    last_accuracy: float
    best_accuracy: float
    mean_accuracy: float  # over all evaluated rounds: the area under the curve
    rounds_to_target: int | None  # until it was first reached
    seconds_to_target: float | None  # in simulated time
    gemd: float  # group earth mover's distance (paper 4, eq. 15), mean over the cohorts
    participation_entropy: float  # 1 if all took part equally often, 0 if one did all the work
    bytes_up: int
    bytes_down: int
    skipped: float  # percent of the rounds in which no model was uploaded
    overhead_up: float  # percent of what plain FedAvg sends (paper 2, section 4.1)
    overhead_down: float


def summarize(
    history: History,
    clients: Sequence[ClientId],
    label_counts: NDArray[np.int64],
    target: float | None,
    model_bytes: int,
) -> Summary:
    """Summarize one seed's rounds."""
    rounds, accuracy = history.rounds, history.accuracy
    measured = accuracy[np.isfinite(accuracy)]
    measured = measured if len(measured) else np.array([np.nan])
    last = measured[-min(MAX_LAST_ROUNDS, max(1, len(measured) // 5)) :]
    up, down = sum(r.bytes_up for r in rounds), sum(r.bytes_down for r in rounds)
    fedavg = sum(len(r.selected) for r in rounds) * model_bytes or math.nan
    seconds = np.array([r.seconds for r in rounds])
    reached = None if target is None else metrics.rounds_to_target(accuracy, target)
    return Summary(
        seed=history.seed,
        rounds=len(rounds),
        accuracy=float(last.mean()),
        accuracy_deviation=float(last.std()),
        last_accuracy=float(last[-1]),
        best_accuracy=float(measured.max()),
        mean_accuracy=float(measured.mean()),
        rounds_to_target=reached,
        seconds_to_target=None if reached is None else float(seconds[:reached].sum()),
        gemd=spread(gemd_by_round(history, clients, label_counts)).mean,
        participation_entropy=metrics.participation_entropy(
            metrics.participation(history.selections, clients)
        ),
        bytes_up=up,
        bytes_down=down,
        skipped=100 * sum(r.skipped for r in rounds) / len(rounds),
        overhead_up=100 * up / fedavg,
        overhead_down=100 * down / fedavg,
    )


def gemd_by_round(
    history: History, clients: Sequence[ClientId], label_counts: NDArray[np.int64]
) -> list[float]:
    """Return the GEMD of each round's finished clients; NaN if none finished or without labels."""
    position = {client: i for i, client in enumerate(clients)}
    try:
        cohorts = [[position[c] for c in r.finished] for r in history.rounds]
    except KeyError as error:
        raise ConfigError(f"a round lists client {error!s:.80}, which is not a member") from None
    labeled = label_counts.shape[1] > 0
    return [metrics.gemd(label_counts, c) if labeled and c else math.nan for c in cohorts]


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float  # NaN for fewer than two values
    missing: int  # seeds without a value


def spread(values: Sequence[float | None]) -> Spread:
    """Return the mean and sample standard deviation of the values that are finite."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    mean = float(np.mean(finite)) if finite else math.nan
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return Spread(mean, std, len(values) - len(finite))


class Members(NamedTuple):
    """The clients of one seed and how many examples of each class they hold."""

    clients: list[ClientId]
    label_counts: NDArray[np.int64]


class Run(NamedTuple):
    """All seeds of one run; in a comparison, `policy` is the name of the policy."""

    policy: str
    summaries: list[Summary]
    histories: list[History]
    experiment: Experiment | None = None
    folder: Path | None = None
    members: Sequence[Members] = ()  # of each seed; while no file lists them, those selected

    @property
    def finished(self) -> bool:
        """Whether all rounds are there, or it ended early for want of progress."""
        if not self.histories or self.experiment is None:
            return bool(self.histories)
        return self.experiment.is_over(self.histories)


class Results(list[Run]):
    """The runs of a comparison or a sweep, or a single run."""

    @property
    def target(self) -> float | None:
        """The target accuracy, if all runs have the same."""
        targets = {None if r.experiment is None else r.experiment.target for r in self}
        return targets.pop() if len(targets) == 1 else None

    def state(self) -> str:
        """Say how many runs there are, and how many of them are not finished."""
        unfinished = sum(not r.finished for r in self)
        runs = "1 run" if len(self) == 1 else f"{len(self)} runs"
        which = "" if len(self) == 1 else f"{unfinished} of them "
        return f"{runs}, {which}not finished" if unfinished else runs

    def baseline(self, result: Run) -> Run | None:
        """Return the run with uniform cohorts, no gate and otherwise the settings of `result`."""
        for other in self:
            if result.experiment is None or other.experiment is None:
                if other.policy in BASELINES:
                    return other
            elif other.experiment == dataclasses.replace(
                result.experiment, policy=NamedConfig("uniform"), gate=NO_GATE
            ):
                return other
        return None

    def varied(self) -> dict[str, list[Any]]:
        """Return the settings in which the runs differ, by dotted key: one value per run."""
        flat = [
            {} if r.experiment is None else config.flat(config.dump(r.experiment)) for r in self
        ]
        keys = dict.fromkeys(key for values in flat for key in values)
        columns = {key: [values.get(key) for values in flat] for key in keys}
        return {key: values for key, values in columns.items() if len(set(map(repr, values))) > 1}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one flat record per run, seed and round; rounds count from 1."""
        varied = self.varied()
        for i, run in enumerate(self):
            settings = {"run": run.policy, **{key: values[i] for key, values in varied.items()}}
            for history in run.histories:
                for row in history.records():
                    yield {**settings, **row}

    def to_arrow(self) -> pa.Table:
        """Return one row per run, seed and round as an Arrow table (needs PyArrow)."""
        import pyarrow as pa

        rows = list(self.records())
        names = list(rows[0]) if rows else []
        return pa.table({name: _column([row[name] for row in rows]) for name in names})


def _column(values: Sequence[Any]) -> list[Any]:
    """Return values of one type: words where a swept setting mixes types."""
    kinds = {type(v) for v in values if v is not None}
    plain = kinds <= {int, float} or len(kinds) < 2
    return list(values) if plain else [None if v is None else json.dumps(v) for v in values]


def read(*folders: str | os.PathLike[str]) -> Results:
    """Read the runs in folders of runs, comparisons or sweeps, as far as they got."""
    runs = [(Path(folder), run) for folder in folders for run in run_folders(folder)]
    names = [run.resolve().name for _, run in runs]
    results = Results()
    for (folder, run), name in zip(runs, names, strict=True):
        if names.count(name) > 1:  # the folders tell them apart
            name = f"{folder.resolve().name}/{name}" if folder != run else str(run)
        results.append(read_run(run, name))
    return results


def run_folders(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run folders at or below `folder`: those that ``runs.json`` names, then by age."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of a run or a comparison")
    refuse_links_in(root)
    if (root / "config.json").exists():
        return [root]
    runs = {p.parent.name: p.parent for p in root.glob("*/config.json")}
    if not runs:
        raise ConfigError(f"{folder}: no run found (no config.json in it or one level below)")
    listed = read_json(root / "runs.json", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{root / 'runs.json'}: not a list of names")
    order = {name: position for position, name in enumerate(map(str, listed))}
    ages = {name: (run / "config.json").stat().st_mtime for name, run in runs.items()}
    names = sorted(runs, key=lambda name: (order.get(name, math.inf), ages[name], name))
    return [runs[name] for name in names]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read one run, as far as it got."""
    histories = read_histories(folder)
    values = read_json(folder / "config.json")
    try:
        experiment = None if "engine" in values else config.parse(values)
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    model_bytes, listed = _federation(folder)
    members = [listed.get(h.seed) or _selected_members(h) for h in histories]
    target = None if experiment is None else experiment.target
    summaries = [
        summarize(h, *each, target, model_bytes) for h, each in zip(histories, members, strict=True)
    ]
    return Run(name or folder.name, summaries, histories, experiment, folder, members)


def read_histories(folder: str | os.PathLike[str]) -> list[History]:
    """Read the rounds of a run folder, one history per seed, without a line half written."""
    path = Path(folder) / "rounds.jsonl"
    if path.parent.is_dir():
        refuse_links_in(folder)
    if not path.exists():
        raise ConfigError(f"{folder}: not a run folder (it has no rounds.jsonl)")
    histories: dict[int, History] = {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}"
        record = _record(line, where)
        history = histories.setdefault(record.seed, History(record.seed))
        expected = len(history.rounds) + 1
        if record.round != expected:
            wrong = f"round {record.round} in place of {expected}"
            raise ConfigError(f"{where}: not a round record ({wrong})")
        history.rounds.append(record)
    return list(histories.values())


def new_rounds(path: Path, start: int, seeds: int) -> Iterator[tuple[int, list[RoundRecord]]]:
    """Yield the rounds that a run has written after `start` bytes, each with where it ends."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        while len(lines := list(islice(file, seeds))) == seeds and lines[-1].endswith(b"\n"):
            records = [_record(line, f"{path}, after byte {start}") for line in lines]
            if len({record.round for record in records}) > 1:  # not all seeds have been added yet
                return
            start += sum(map(len, lines))
            yield start, records


def _record(line: bytes, where: str) -> RoundRecord:
    try:
        return _checked_record(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: not a round record ({str(error)[:200]})") from None


def _checked_record(values: Any) -> RoundRecord:
    """Make a record from what was read from disk; ValueError or TypeError if it is not one."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{str(values)[:80]} is not an object")
    cohort = {key: _clients(values.get(key, [])) for key in COHORTS}
    more = ("failed", "scores", "available")  # of a Flower run, for people
    record = RoundRecord(**{k: v for k, v in values.items() if k not in more} | cohort)
    for name in ("seed", "round", "bytes_up", "bytes_down"):
        whole_number(getattr(record, name))
    measured = ("accuracy", "loss", "train_accuracy")
    for name in (*measured, "seconds", "elapsed", "working", "waiting"):
        value = getattr(record, name)
        if type(value) is int:
            whole_number(value)
        elif not (isinstance(value, float) or (value is None and name in measured)):
            raise ValueError(f"{name}={str(value)[:80]} is not a float")
    if record.slowest is not None:
        check_id(record.slowest)
    if not isinstance(record.skipped, bool):
        raise ValueError(f"skipped={str(record.skipped)[:80]} is not true or false")
    return record


def _clients(values: Any) -> tuple[ClientId, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{str(values)[:80]} is not a list of clients")
    return tuple(check_id(client) for client in values)


def whole_number(value: Any) -> int:
    """Return an integer of at most 63 bits; ValueError for anything else."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{str(value)[:80]} is not a whole number")
    return value


def read_json(path: Path, default: Any = None) -> Any:
    """Read a JSON file; a missing file is the default, or an error if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is not None:
            return default
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); "
            "the file is damaged, or its folder is not a run's"
        ) from None


def _federation(folder: Path) -> tuple[int, dict[int, Members]]:
    """Return the size of a model and the clients of each seed, as far as the folder says so."""
    path = folder / "federation.json"
    written = read_json(path, {})
    try:
        seeds = {whole_number(s["seed"]): _members(**s) for s in written.get("seeds", [])}
        return whole_number(written.get("model_bytes", 0)), seeds
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not a federation ({error!r})") from None


def _members(seed: Any, clients: Any, label_counts: Any) -> Members:
    """Return the clients and their label counts; ValueError unless there is one row per client."""
    names, counts = [check_id(client) for client in clients], np.array(label_counts, np.int64)
    if counts.ndim != 2 or len(counts) != len(names) or (counts < 0).any():
        raise ValueError(f"label_counts of shape {counts.shape} for {len(names)} clients")
    if len(set(names)) < len(names):
        raise ValueError("a client is listed twice")
    return Members(names, counts)


def _selected_members(history: History) -> Members:
    clients = sorted({client for cohort in history.selections for client in cohort})
    return Members(clients, np.zeros((len(clients), 0), np.int64))
