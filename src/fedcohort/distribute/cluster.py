"""The cluster to work on: one that runs already, or one of this machine's own."""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedcohort.exceptions import ConfigError, FedcohortError

LOCAL, AUTO = "local", "auto"
PATIENCE = 5.0  # seconds


@contextmanager
def cluster(address: str, cpus: int | None = None) -> Iterator[None]:
    """Be connected to a Ray cluster; what was started or connected here ends here.

    Parameters
    ----------
    address : str
        "local" starts Ray on this machine, "auto" takes the cluster that this machine belongs to
        (or ``$RAY_ADDRESS``), ``HOST:PORT`` is a cluster's head. A program that is connected
        already stays connected.
    cpus : int, optional
        With "local", how many tasks run at a time; by default one a core.

    Examples
    --------
    >>> with cluster("somewhere"):
    ...     pass
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.ConfigError: --ray somewhere: write local, auto or HOST:PORT
    """
    if address not in (LOCAL, AUTO) and not re.fullmatch(r"[^\s/]+:\d{1,5}", address):
        raise ConfigError(f"--ray {address}: write local, auto or HOST:PORT")
    ray = need_ray()
    if ray.is_initialized():
        _check_same(ray, address)
        yield
        return
    _connect(ray, address, cpus)
    try:
        yield
    finally:
        ray.shutdown()


def need_ray() -> Any:
    """Return the module, or say how to install it."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'fedcohort[ray]'") from None
    return ray


def gpus_for(device: str) -> int:
    """Return the GPUs that a task on `device` asks for: "auto" takes one where there are some."""
    if device == "auto":
        return int(need_ray().cluster_resources().get("GPU", 0) > 0)
    return int(device.startswith("cuda"))


def blame(error: Exception, what: str) -> Exception:
    """Return the error to raise: a worker's own if it was raised on purpose, else what failed."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FedcohortError):
        return cause
    culprit = cause if isinstance(cause, Exception) else error
    text = str(culprit).strip().partition("\n")[0]
    return FedcohortError(f"{what} failed on the cluster: {type(culprit).__name__}: {text}")


def _check_answers(address: str) -> None:
    """Knock first: Ray itself tries for minutes where nobody answers."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address}: no cluster answers ({error}); start one with `ray start --head`, "
            "or use --ray local"
        ) from None


def _connect(ray: Any, address: str, cpus: int | None) -> None:
    if address not in (LOCAL, AUTO):
        _check_answers(address)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tips about Ray's future defaults
        try:
            if address == LOCAL:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"--ray {address}: no cluster to work on ({reason})") from None


def _check_same(ray: Any, address: str) -> None:
    connected = ray.get_runtime_context().gcs_address
    if address not in (LOCAL, AUTO, connected):
        raise ConfigError(f"--ray {address}: this program is connected to {connected} already")
