"""Connect to a Ray cluster, or start one on this machine, and keep a pool of actors.

The pool replaces actors that are lost.
"""

from __future__ import annotations

import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedcohort.exceptions import ConfigError, FedcohortError

LOCAL, AUTO = "local", "auto"
CONNECT_SECONDS = 5.0


@contextmanager
def cluster(address: str, cpus: int | None = None) -> Iterator[None]:
    """Connect to a Ray cluster inside the block; disconnect, or stop it, at the end.

    Parameters
    ----------
    address : str
        "local" starts Ray on this machine, "auto" takes the cluster that this machine belongs to
        (or ``$RAY_ADDRESS``), ``HOST:PORT`` is a cluster's head. A program that is connected
        already stays connected.
    cpus : int, optional
        With "local", how many tasks run at a time; by default one per core.

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
    """Return the module `ray`; ConfigError says how to install it."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'fedcohort[ray]'") from None
    return ray


def gpus_for(device: str) -> int:
    """Return the GPUs that a task on `device` asks for: "auto" takes one where there are some.

    Examples
    --------
    >>> gpus_for("cpu"), gpus_for("cuda"), gpus_for("cuda:0,cuda:1")
    (0, 1, 2)
    """
    if device == "auto":
        return int(need_ray().cluster_resources().get("GPU", 0) > 0)
    return sum(name.strip().startswith("cuda") for name in device.split(","))


def cluster_error(error: Exception, what: str) -> Exception:
    """Return the error to raise: a worker's own FedcohortError, else one that says what failed."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FedcohortError):
        return cause
    culprit = cause if isinstance(cause, Exception) else error
    text = str(culprit).strip().partition("\n")[0]
    return FedcohortError(f"{what} failed on the cluster: {type(culprit).__name__}: {text}")


def _check_answers(address: str) -> None:
    """Check the port first; Ray retries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
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


LOSSES = 3  # of each actor, on average, before the pool gives up


class Pool:
    """Actors that do numbered pieces of work; a free actor takes the next piece.

    Parameters
    ----------
    make : callable
        Starts an actor; it must have a method `ready`.
    size : int
        How many actors to start.
    timeout : float
        Seconds to wait while no actor is working.
    """

    def __init__(self, make: Callable[[], Any], size: int, timeout: float) -> None:
        self.make, self.size, self.timeout = make, size, timeout
        # Actors by the task they run. An actor that finds no room on the cluster is never ready,
        # and nothing waits for it.
        self.actors: dict[Any, Any] = {}
        self.losses = 0
        for _ in range(size):
            self._start()

    def run(self, pieces: int, begin: Callable[[Any, int], Any]) -> list[Any]:
        """Return the results of ``begin(actor, i)`` for every i below `pieces`, in this order.

        Pieces of an actor that was lost are done by others.
        """
        todo, running = list(reversed(range(pieces))), dict[Any, int]()
        done: dict[int, Any] = {}
        since = time.monotonic()
        while len(done) < pieces:
            watched = [ref for ref in self.actors if todo or ref in running]
            ready, _ = need_ray().wait(watched, timeout=1.0)
            if ready or running:
                since = time.monotonic()
            self._check_timeout(since)
            for ref in ready:
                actor, number = self.actors.pop(ref), running.pop(ref, None)
                result = self._result(ref)
                if result is None:
                    todo += [] if number is None else [number]
                    self._start()
                    continue
                if number is not None:
                    done[number] = result[0]
                if todo:
                    number = todo.pop()
                    ref = begin(actor, number)
                    running[ref] = number
                self.actors[ref] = actor
        return [done[number] for number in range(pieces)]

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors.values():
            need_ray().kill(actor)
        self.actors.clear()

    def _start(self) -> None:
        actor = self.make()
        self.actors[actor.ready.remote()] = actor

    def _result(self, ref: Any) -> tuple[Any] | None:
        """Return the result of an actor, None if the actor was lost."""
        errors = need_ray().exceptions
        try:
            return (need_ray().get(ref),)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self.losses += 1
            if self.losses > LOSSES * self.size:
                raise FedcohortError(
                    f"{self.losses} workers were lost, the last: {error}"
                ) from None
            return None
        except errors.RayError as error:
            raise cluster_error(error, "training") from None

    def _check_timeout(self, since: float) -> None:
        if time.monotonic() - since <= self.timeout:
            return
        room = need_ray().available_resources()
        free = ", ".join(f"{room.get(key, 0):g} {key}" for key in ("CPU", "GPU"))
        raise ConfigError(
            f"no worker started within {self.timeout:g} s; the cluster has {free} free"
        )
