"""What happened in the rounds of a Flower run: log lines, a run folder, a checkpoint, sketches.

The folder has the files that ``fedcohort run`` leaves, so ``fedcohort report``, ``show`` and
``watch`` read both: ``config.json``, ``provenance.json``, ``rounds.jsonl`` (one line per round, as
soon as it has been evaluated) and, at the end, ``federation.json`` and ``session`` (what the policy
knows about the clients) and ``durations.csv`` (client, seconds: as measured last).
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from fedcohort import storage
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.flower.server import inner
from fedcohort.flower.server.asking import GridCollector, Model
from fedcohort.flower.wire import LOG, is_float
from fedcohort.provenance import provenance
from fedcohort.rounds import ClientId, RoundRecord
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS

if TYPE_CHECKING:
    from fedcohort.flower.server.strategy import CohortStrategy

METRICS = {  # usual names, the most telling first
    "accuracy": ("accuracy", "eval_acc", "eval_accuracy", "acc", "test_accuracy", "val_accuracy"),
    "loss": ("loss", "eval_loss", "test_loss", "val_loss"),
}


@dataclass(frozen=True)
class RoundReport(RoundRecord):
    """What happened in a round; numbers start at 1.

    `available` counts the clients that were online, `failed` says why selected clients brought no
    update, `scores` are the policy's.
    """

    scores: dict[ClientId, float] = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)
    available: int = 0

    def plain(self) -> RoundRecord:
        """Return what a simulation records."""
        return RoundRecord(**{f.name: getattr(self, f.name) for f in fields(RoundRecord)})

    def line(self, most: int = 12) -> str:
        """Return the round in one line, for the log."""
        scores = {c: f" (score {self.scores[c]:.3g})" for c in self.selected if c in self.scores}
        shown = [f"{c}{scores.get(c, '')}" for c in self.selected[:most]]
        rest = len(self.selected) - most
        uploads = f"{len(self.finished)} of {len(self.selected)} uploaded"
        notes = [("not asked", self.withheld), ("too slow", self.cut), ("late", self.late)]
        uploads += "".join(f", {len(clients)} {what}" for what, clients in notes if clients)
        failed = [f"{c} ({why.strip()[:200]})" for c, why in list(self.failed.items())[:most]]
        return (
            f"round {self.round}: picked {len(self.selected)} of {self.available}: "
            + ", ".join(shown)
            + (f" and {rest} more" if rest > 0 else "")
            + f"; {uploads}; {self.bytes_up / 1e3:.1f} kB up, {self.bytes_down / 1e3:.1f} kB down; "
            + f"{self.seconds:.1f} s"
            + (f"; failed: {', '.join(failed)}" if failed else "")
        )

    def measured(self, metrics: Mapping[str, Any] | None) -> RoundReport:
        """Return the round with the accuracy and loss among an evaluation's metrics."""
        numbers = {k: v for k, v in (metrics or {}).items() if isinstance(v, int | float)}
        values = {k: [numbers[n] for n in names if n in numbers] for k, names in METRICS.items()}
        measured: dict[str, Any] = {k: float(each[0]) for k, each in values.items() if each}
        return replace(self, **measured)


class RunFolder:
    """The folder of a Flower run, as ``fedcohort report`` reads it; another run's is refused."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._written: int | None = None

    def begin(self, session: Session, rounds: int, done: Sequence[RoundReport]) -> None:
        """Describe the run; `done` are the rounds that a checkpoint brought along."""
        lines = self.path / "rounds.jsonl"
        storage.make_folder(self.path)
        if self._written is not None:
            return  # a second `start` of the same strategy goes on
        if lines.exists() and lines.stat().st_size and not done:
            raise ConfigError(
                f"out={str(self.path)!r} holds a run already: choose another folder, or continue "
                "that run with the checkpoint= that it was started with"
            )
        gate = session.gate
        about = {
            "engine": "flower",
            "policy": repr(session.policy),
            "gate": "none" if gate is None else gate.name,
            "rounds": rounds,
            "seeds": [session.seed],
        }
        self._write("config.json", about)
        self._write("provenance.json", provenance(("fedcohort", "flwr", "numpy")))
        for name in ("federation.json", "session"):
            (self.path / name).unlink(missing_ok=True)
        storage.write_atomically(lines, b"")
        self._written = 0

    def append(self, reports: Sequence[RoundReport]) -> None:
        """Write the rounds that are not written yet."""
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(r)) + "\n" for r in reports[self._written :])
        self._written = len(reports)

    def end(
        self,
        session: Session,
        reports: Sequence[RoundReport],
        online: Iterable[str],
        durations: Mapping[ClientId, float],
    ) -> None:
        """Write what is known at the end: clients, their seconds, what the policy knows of them."""
        clients = sorted({*online, *(c for report in reports for c in report.selected)})
        seed = {"seed": session.seed, "clients": clients, "label_counts": [[]] * len(clients)}
        storage.save(self.path / "session", {"session": session.state_dict()})
        lines = [[c, f"{seconds:.3f}"] for c, seconds in sorted(durations.items())]
        with (self.path / "durations.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["client", "seconds"], *lines])
        if clients:
            content = {"model_bytes": session.model_bytes, "seeds": [seed]}
            self._write("federation.json", content)  # last: whoever waits for it finds everything

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        storage.write_atomically(self.path / name, json.dumps(content, indent=2).encode())


def save_checkpoint(strategy: CohortStrategy, arrays: ArrayRecord) -> None:
    """Write everything that the next round depends on, where the strategy has a checkpoint."""
    initial = strategy.collector.initial
    if strategy.checkpoint is None or initial is None:
        return
    state = {
        "session": strategy.session.state_dict(),
        "initial": inner.as_saved(initial.arrays),
        "arrays": inner.as_saved(arrays),
        "inner": inner.state_dict(strategy.inner, strategy.made_with),
        "wanted": strategy.wanted,
        "center": strategy.collector.center,
        "kinds": strategy.collector.kinds,
        "refused": dict(strategy.refused),
        "late": sorted(strategy.replies.late),
        "durations": strategy.durations,
        "weights": strategy.replies.weights,
        "run": strategy.run_token,
        "registered": sorted(strategy.directory.registered),
        "history": [asdict(report) for report in strategy.history],
    }
    storage.save(strategy.checkpoint, state)


def resume(strategy: CohortStrategy, arrays: ArrayRecord) -> ArrayRecord:
    """Load the checkpoint if it exists, and return the model to continue with."""
    if strategy.checkpoint is None:
        return arrays
    storage.remove_leftovers(Path(strategy.checkpoint).resolve().parent)
    if not Path(strategy.checkpoint).exists():
        return arrays
    state = storage.load(strategy.checkpoint)
    _check_like(strategy.checkpoint, state["initial"], arrays)
    center: Any = strategy.collector.center
    if not np.array_equal(state["center"], center):
        raise InvalidCheckpoint(f"{strategy.checkpoint}: its sketches have another center")
    storage.restore(strategy.checkpoint, lambda state: _restore(strategy, state), state)
    LOG.info("continuing %s after round %d", strategy.checkpoint, strategy.rounds_before)
    if late := state.get("late"):  # their messages belong to the run that ended
        LOG.warning("late updates that were lost: %d, of %s", len(late), ", ".join(late))
    return inner.from_saved(state["arrays"])


def _check_like(path: object, saved: dict[str, Any], arrays: ArrayRecord) -> None:
    """InvalidCheckpoint unless the model of this app has the names and shapes of the saved one."""
    shapes = {name: np.shape(array) for name, array in saved.items()}
    here = {name: tuple(array.shape) for name, array in arrays.items()}
    unlike = shapes.keys() ^ here.keys()
    if any(is_float(array) for array in arrays.values()):  # trees change their size
        unlike |= {name for name in shapes.keys() & here.keys() if shapes[name] != here[name]}
    if unlike:
        one = min(unlike)
        raise InvalidCheckpoint(
            f"{path}: its model has the array {one!r} of shape {shapes.get(one)}, this app's "
            f"{here.get(one)}; give this run a checkpoint of its own"
        )


def _restore(strategy: CohortStrategy, state: dict[str, Any]) -> None:
    inner.from_saved(state["arrays"])
    session = strategy.session
    if strategy.cohort_size is None:
        session.cohort_size = int(state["session"]["cohort_size"])
    session.load_state_dict(state["session"])
    inner.load_state_dict(strategy.inner, state["inner"])
    strategy.wanted = int(state["wanted"])
    strategy.collector.kinds = {name: dict(each) for name, each in state["kinds"].items()}
    strategy.collector.initial = Model(inner.from_saved(state["initial"]))
    strategy.directory.registered.update(state["registered"])
    strategy.durations.update(state.get("durations", {}))
    strategy.replies.weights.update(state.get("weights", {}))
    strategy.run_token = str(state["run"])
    strategy.rounds_before = session.round_number
    strategy.refused.clear()
    strategy.refused.update(state["refused"])
    strategy.history[:] = [RoundReport(**_tuples(saved)) for saved in state["history"]]


def _tuples(saved: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}


def renumbered(result: Result, before: int, arrays: ArrayRecord) -> Result:
    """Return Flower's result with the rounds numbered from the first of all runs."""
    if before == 0:
        return result
    for name in vars(result).keys() - {"arrays"}:  # all others are metrics by round
        rounds = {number + before: metrics for number, metrics in getattr(result, name).items()}
        setattr(result, name, rounds)
    if not result.arrays:
        result.arrays = arrays
    return result


class KeptSketches:
    """Profiles of clients, kept at the server across runs, so that only newcomers are asked.

    `folder` holds what clients sent: guard it as you would them. A profile that is older than
    `max_days` is asked for again.
    """

    def __init__(self, folder: str | os.PathLike[str], max_days: float = 30.0) -> None:
        if not max_days > 0:
            raise ConfigError(f"KeptSketches: max_days={max_days} must be above 0")
        self.folder, self.max_days = Path(folder), max_days
        self._days: dict[str, dict[ClientId, float]] = {}

    def _path(self, collector: GridCollector, name: str) -> Path:
        digest = hashlib.sha256(json.dumps(collector.options(name), sort_keys=True).encode())
        if collector.center is not None:
            digest.update(collector.center.tobytes())
        return self.folder / f"{name}-{digest.hexdigest()[:16]}"

    def recall(self, collector: GridCollector) -> None:
        """Enter what is kept and not too old into the session's signals, where they have none."""
        session, today = collector.session, time.time() / 86400
        for name in sorted(session.policy.needs.profile):
            if SIGNALS[name].model != "none":
                continue
            path = self._path(collector, name)
            self._days[name] = {}
            if not path.exists():
                continue
            state = storage.load(path)
            rows = zip(*(state[k] for k in ("clients", "days", "kinds", "values")), strict=True)
            fresh = {c: rest for c, *rest in rows if today - rest[0] <= self.max_days}
            unknown = sorted(fresh.keys() - session.signals.known(name, sorted(fresh)))
            form = SIGNALS[name].form(session.policy.signal_options.get(name, {}))
            readings = {client: fresh[client][2] for client in unknown}
            entered = session.signals.record(name, readings, session.round_number, form)
            for client in session.signals.known(name, sorted(fresh)):
                self._days[name][client], kind, _ = fresh[client]
                if kind:
                    collector.kinds.setdefault(name, {})[client] = kind
            if entered:
                LOG.info("%s of %d clients is known from %s", name, len(entered), self.folder)

    def keep(self, collector: GridCollector, clients: Collection[ClientId]) -> None:
        """Write the profiles of clients that are new."""
        signals = collector.session.signals
        for name, days in self._days.items():
            entered = signals.known(name, sorted({*clients, *days}))
            if set(entered) <= days.keys():
                continue
            days.update({c: time.time() / 86400 for c in entered if c not in days})
            storage.make_folder(self.folder)
            kinds = collector.kinds.get(name, {})
            state = {
                "clients": list(entered),
                "days": [days[client] for client in entered],
                "kinds": [kinds.get(client, "") for client in entered],
                "values": np.array(signals.values(name, entered)),
            }
            storage.save(self._path(collector, name), state)
