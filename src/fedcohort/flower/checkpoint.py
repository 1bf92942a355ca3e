"""The state of a run in one file, from which a restart continues with the next round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from fedcohort import storage
from fedcohort.exceptions import InvalidCheckpoint
from fedcohort.flower import inner
from fedcohort.flower.arrays import as_saved, from_saved, is_float
from fedcohort.flower.grid import LOG, Model
from fedcohort.flower.history import RoundReport
from fedcohort.storage import remove_leftovers

if TYPE_CHECKING:
    from fedcohort.flower.strategy import CohortStrategy


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
    storage.save(strategy.checkpoint, state)


def resume(strategy: CohortStrategy, arrays: ArrayRecord) -> ArrayRecord:
    """Load the checkpoint if it exists, and return the model to continue with."""
    if strategy.checkpoint is None:
        return arrays
    remove_leftovers(Path(strategy.checkpoint).resolve().parent)
    if not Path(strategy.checkpoint).exists():
        return arrays
    state = storage.load(strategy.checkpoint)
    _check_like(strategy.checkpoint, state["initial"], arrays)
    storage.restore(strategy.checkpoint, lambda state: _restore(strategy, state), state)
    LOG.info("continuing %s after round %d", strategy.checkpoint, strategy.rounds_before)
    return from_saved(state["arrays"])


def _check_like(path: object, saved: dict[str, Any], arrays: ArrayRecord) -> None:
    """InvalidCheckpoint unless the model of this app has the names and shapes of the saved one."""
    shapes = dict(zip(saved["names"], (np.shape(a) for a in saved["arrays"]), strict=True))
    fixed = any(is_float(array) for array in arrays.values())  # trees change their size
    here = {name: tuple(array.shape) for name, array in arrays.items()}
    names = shapes.keys() ^ here.keys()
    if fixed:
        names |= {name for name in shapes.keys() & here.keys() if shapes[name] != here[name]}
    if names:
        one = min(names)
        raise InvalidCheckpoint(
            f"{path}: its model has the array {one!r} of shape {shapes.get(one)}, this app's "
            f"{here.get(one)}; give this run a checkpoint of its own"
        )


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
