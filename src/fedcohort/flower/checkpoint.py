"""The state of a run in one file, from which a restart continues with the next round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from fedcohort import checkpoint
from fedcohort.atomic import remove_leftovers
from fedcohort.flower import inner
from fedcohort.flower.arrays import as_saved, from_saved
from fedcohort.flower.grid import LOG, Model
from fedcohort.rounds import ClientId
from fedcohort.session import Session

if TYPE_CHECKING:
    from fedcohort.flower.strategy import CohortStrategy


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


def save(strategy: CohortStrategy, arrays: ArrayRecord) -> None:
    """Write everything that the next round depends on, where the strategy has a checkpoint."""
    if strategy.checkpoint is None or strategy.initial is None:
        return
    state = {
        "session": strategy.session.state_dict(),
        "initial": as_saved(strategy.initial.arrays),
        "arrays": as_saved(arrays),
        "inner": inner.state_dict(strategy.inner, strategy.made_with),
        "refused": dict(strategy.refused),
        "run": strategy.run_token,
        "registered": sorted(strategy.directory.registered),
        "history": [report._asdict() for report in strategy.history],
    }
    checkpoint.save(strategy.checkpoint, state)


def resume(strategy: CohortStrategy, arrays: ArrayRecord) -> ArrayRecord:
    """Load the checkpoint if it exists, and return the model to continue with."""
    if strategy.checkpoint is None or not Path(strategy.checkpoint).exists():
        return arrays
    remove_leftovers(Path(strategy.checkpoint).resolve().parent)
    state = checkpoint.load(strategy.checkpoint)
    checkpoint.restore(strategy.checkpoint, lambda state: _restore(strategy, state), state)
    return from_saved(state["arrays"])


def _restore(strategy: CohortStrategy, state: dict[str, Any]) -> None:
    from_saved(state["arrays"])
    session = strategy.session
    if strategy.cohort_size is None:
        session.cohort_size = int(state["session"]["cohort_size"])
    session.load_state_dict(state["session"])
    inner.load_state_dict(strategy.inner, state["inner"])
    strategy.initial = Model(from_saved(state["initial"]))
    strategy.directory.registered.update(state["registered"])
    strategy.run_token = str(state["run"])
    strategy.continuing = tuple(state["session"]["cohort"])
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
    for name in (
        "train_metrics_clientapp",
        "evaluate_metrics_clientapp",
        "evaluate_metrics_serverapp",
    ):
        found = {number + before: metrics for number, metrics in getattr(result, name).items()}
        setattr(result, name, found)
    if not result.arrays:
        result.arrays = arrays
    return result
