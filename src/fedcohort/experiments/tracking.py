"""Log the rounds of runs to TensorBoard or MLflow, where one of them is installed.

A run keeps its name and is continued as the same run: TensorBoard's events lie in the run's folder,
MLflow's run id is kept there in ``mlflow-run-id``. A round that is run again after an interruption
is logged again under the same step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError
from fedcohort.experiments.config import Experiment, dump
from fedcohort.registry import lookup
from fedcohort.simulate.history import RoundRecord

Log = Callable[[Sequence[RoundRecord]], None]
LogOfSetting = Callable[[str, Sequence[RoundRecord]], None]


@contextmanager
def track(
    kind: str | None, folder: str | os.PathLike[str], experiments: Mapping[str, Experiment]
) -> Iterator[LogOfSetting]:
    """Yield a function of (name, records) that logs a round of the named run.

    Parameters
    ----------
    kind : {"tensorboard", "mlflow"} or None
        None logs nothing.
    folder : path
        Of all runs. MLflow's store goes there, unless ``MLFLOW_TRACKING_URI`` says otherwise.
    experiments : mapping of str to Experiment
        By name; each run's folder is `folder`/name, and `folder` itself for the name ".".
    """
    if kind is None:
        yield lambda name, records: None
        return
    start = lookup("tracker", kind, TRACKERS)
    with ExitStack() as stack:
        logs: dict[str, Log] = {}

        def log(name: str, records: Sequence[RoundRecord]) -> None:
            if name not in logs:
                run = start(Path(folder), name, flat(dump(experiments[name])))
                logs[name] = stack.enter_context(run)
            logs[name](records)

        yield log


def metrics_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record, by name and seed."""
    values = {
        "accuracy": record.accuracy,
        "loss": record.loss,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
    }
    return {f"{k}/seed-{record.seed}": float(v) for k, v in values.items() if v is not None}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested tables as one, with dotted keys.

    Examples
    --------
    >>> flat({"rounds": 3, "local": {"lr": 0.1, "schedule": None}})
    {'rounds': '3', 'local.lr': '0.1', 'local.schedule': 'None'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


@contextmanager
def _tensorboard(folder: Path, name: str, parameters: Mapping[str, str]) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--track tensorboard: it is not installed; pip install 'fedcohort[track]'"
        ) from None
    writer = SummaryWriter(str(folder / name / "tensorboard"))
    rows = [f"| {key} | {value} |" for key, value in parameters.items()]
    writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def log(records: Sequence[RoundRecord]) -> None:
        for record in records:
            for metric, value in metrics_of(record).items():
                writer.add_scalar(metric, value, record.round)
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _mlflow(folder: Path, name: str, parameters: Mapping[str, str]) -> Iterator[Log]:
    try:
        import mlflow
    except ImportError:
        raise ConfigError(
            "--track mlflow: it is not installed; pip install 'fedcohort[track]'"
        ) from None
    if "MLFLOW_TRACKING_URI" not in os.environ:
        store = (folder / "mlflow").absolute()
        store.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{store / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    run_id = _mlflow_run(client, folder / name, name if name != "." else folder.name)
    for key, value in parameters.items():
        if key not in ("rounds", "seeds", "target", "checkpoint_every"):  # these may change later
            client.log_param(run_id, key, value)

    def log(records: Sequence[RoundRecord]) -> None:
        for record in records:
            for metric, value in metrics_of(record).items():
                client.log_metric(run_id, metric, value, step=record.round)

    finished = False
    try:
        yield log
        finished = True
    finally:
        client.set_terminated(run_id, "FINISHED" if finished else "KILLED")


def _mlflow_run(client: Any, folder: Path, name: str) -> str:
    """Return the id of the folder's run, which goes on, or of a new one."""
    kept = folder / "mlflow-run-id"
    if kept.exists():
        run_id = kept.read_text(encoding="utf-8").strip()
        client.update_run(run_id, status="RUNNING")
        return run_id
    experiment = client.get_experiment_by_name("fedcohort")
    number = (
        client.create_experiment("fedcohort") if experiment is None else experiment.experiment_id
    )
    run_id = str(client.create_run(number, run_name=name).info.run_id)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(run_id + "\n", encoding="utf-8")
    return run_id


TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow}
