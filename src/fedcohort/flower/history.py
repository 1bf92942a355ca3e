"""What happened in the rounds of a Flower run: a line in the log, a history, a run folder.

The folder has the files that ``fedcohort run`` leaves, so ``fedcohort report``, ``show`` and
``watch`` read both: ``config.json``, ``provenance.json``, ``rounds.jsonl`` (one line per round, as
soon as it has been evaluated) and, at the end, ``federation.json``, ``summary.json`` and
``session`` (what the policy knows about the clients).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcohort import storage
from fedcohort.exceptions import ConfigError
from fedcohort.flower.grid import LOG
from fedcohort.provenance import provenance
from fedcohort.rounds import ClientId
from fedcohort.session import Session
from fedcohort.storage import write_atomically

if TYPE_CHECKING:
    from fedcohort.simulate.history import History

ACCURACIES = ("accuracy", "eval_acc", "eval_accuracy", "acc", "test_accuracy", "val_accuracy")
LOSSES = ("loss", "eval_loss", "test_loss", "val_loss")


class RoundReport(NamedTuple):
    """What happened in a round; numbers start at 0."""

    round: int
    selected: tuple[ClientId, ...]
    finished: tuple[ClientId, ...]
    withheld: tuple[ClientId, ...]
    bytes_up: int
    bytes_down: int
    seconds: float = 0.0
    scores: dict[ClientId, float] = {}  # noqa: RUF012 - never changed
    failed: dict[ClientId, str] = {}  # noqa: RUF012
    accuracy: float | None = None
    loss: float | None = None

    def line(self, most: int = 12) -> str:
        """Return the round in one line, for the log.

        Examples
        --------
        >>> report = RoundReport(0, ("a", "b"), ("a",), (), 1500, 2000, 3.0, {"a": 0.5}, {"b": "x"})
        >>> report.line()
        'round 1: a (0.5), b; 1 of 2 uploaded; 1.5 kB up, 2.0 kB down; 3.0 s; failed: b (x)'
        """
        scores = {c: f" ({self.scores[c]:.3g})" for c in self.selected if c in self.scores}
        shown = [f"{c}{scores.get(c, '')}" for c in self.selected[:most]]
        rest = len(self.selected) - most
        uploads = f"{len(self.finished)} of {len(self.selected)} uploaded"
        if self.withheld:
            uploads += f", {len(self.withheld)} not asked"
        failed = [f"{c} ({why.strip()[:100]})" for c, why in list(self.failed.items())[:most]]
        return (
            f"round {self.round + 1}: {', '.join(shown)}"
            + (f" and {rest} more" if rest > 0 else "")
            + f"; {uploads}; {self.bytes_up / 1e3:.1f} kB up, {self.bytes_down / 1e3:.1f} kB down; "
            + f"{self.seconds:.1f} s"
            + (f"; failed: {', '.join(failed)}" if failed else "")
        )


def finish(
    session: Session,
    signals: dict[str, dict[ClientId, Any]],
    updates: Iterable[ClientId],
    scores: Mapping[ClientId, float] | None,
    seconds: float,
    failed: Mapping[ClientId, str],
) -> RoundReport:
    """End a session's round, log it, and return what happened."""
    number, ledger = session.round_number, session.ledger
    outcome = session.finish(signals, updates)
    report = RoundReport(
        number,
        outcome.selected,
        outcome.finished,
        outcome.withheld,
        ledger.total("up", number),
        ledger.total("down", number),
        round(seconds, 3),
        {c: float(scores[c]) for c in outcome.selected if c in scores} if scores else {},
        dict(failed),
    )
    LOG.info("%s", report.line())
    return report


def measured(report: RoundReport, metrics: Mapping[str, Any] | None) -> RoundReport:
    """Return a round with the accuracy and loss among an evaluation's metrics.

    Examples
    --------
    >>> measured(RoundReport(0, (), (), (), 0, 0), {"eval_acc": 0.5, "f1": 0.4}).accuracy
    0.5
    """
    known = {k: v for k, v in (metrics or {}).items() if isinstance(v, int | float)}
    accuracy, loss = (
        next((float(known[name]) for name in names if name in known), None)
        for names in (ACCURACIES, LOSSES)
    )
    return report._replace(
        accuracy=report.accuracy if accuracy is None else accuracy,
        loss=report.loss if loss is None else loss,
    )


def history_of(seed: int, reports: Sequence[RoundReport]) -> History:
    """Return the rounds as a simulation's history."""
    from fedcohort.simulate.history import History, RoundRecord

    records, elapsed = [], 0.0
    for report in reports:
        elapsed += report.seconds
        records.append(
            RoundRecord(
                seed,
                report.round,
                report.accuracy,
                report.loss,
                report.selected,
                report.finished,
                report.bytes_up,
                report.bytes_down,
                report.seconds,
                elapsed,
                bool(report.withheld) and not report.finished,
                report.withheld,
            )
        )
    return History(seed, records)


class RunFolder:
    """The folder of a Flower run, as ``fedcohort report`` reads it.

    Parameters
    ----------
    path : path
        Made if it does not exist. A folder with another run in it is refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._written: int | None = None

    def begin(self, session: Session, rounds: int, done: Sequence[RoundReport]) -> None:
        """Describe the run; `done` are the rounds that a checkpoint brought along."""
        lines = self.path / "rounds.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"out={str(self.path)!r}: a file is in the way of the folder"
            ) from None
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
        for name in ("federation.json", "summary.json", "session"):
            (self.path / name).unlink(missing_ok=True)
        write_atomically(lines, b"")
        self._written = 0

    def append(self, seed: int, reports: Sequence[RoundReport]) -> None:
        """Write the rounds that are not written yet."""
        records = history_of(seed, reports).rounds[self._written :]
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in records)
        self._written = len(reports)

    def end(self, session: Session, reports: Sequence[RoundReport], online: Iterable[str]) -> None:
        """Write what is known at the end: the clients, the bytes by kind, the session."""
        clients = sorted({*online, *(c for report in reports for c in report.selected)})
        federation = {"seed": session.seed, "clients": clients, "label_counts": [[]] * len(clients)}
        kinds = {
            f"{kind} {way}": size
            for way in ("up", "down")
            for kind, size in sorted(session.ledger.by_kind(way).items())
        }
        if clients:
            seeds = [federation]
            self._write("federation.json", {"model_bytes": session.model_bytes, "seeds": seeds})
        summary = {
            "policy": session.policy.name,
            "seconds": sum(report.seconds for report in reports),
            "seeds": [{"seed": session.seed, "bytes_by_kind": kinds}],
            "dropped_readings": [dict(session.signals.dropped)],
        }
        storage.save(self.path / "session", {"session": session.state_dict()})
        self._write("summary.json", summary)  # last: whoever waits for it finds everything

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=2).encode())
