"""Logging to TensorBoard or MLflow, where one of them is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.history import RoundRecord

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
        raise ConfigError(f"track = {kind!r} is unknown; known: tensorboard, mlflow")


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
