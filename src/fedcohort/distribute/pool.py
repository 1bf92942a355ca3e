"""A pool of Ray actors that outlives the loss of some."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fedcohort.distribute.cluster import blame, need_ray
from fedcohort.exceptions import ConfigError, FedcohortError

LOSSES = 3  # of each actor, on average, before the pool gives up


class Pool:
    """Actors that do numbered pieces of work, whoever is free the next.

    Parameters
    ----------
    make : callable
        Starts an actor; it must have a method `ready`.
    size : int
        How many actors to start.
    timeout : float
        Seconds to wait while not a single actor works.
    """

    def __init__(self, make: Callable[[], Any], size: int, timeout: float) -> None:
        self.make, self.size, self.timeout = make, size, timeout
        # By what an actor does last. One that finds no room on the cluster is never ready, and
        # nobody waits for it.
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
            self._check_patience(since)
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
        """Return what an actor made, None if the actor is no more."""
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
            raise blame(error, "training") from None

    def _check_patience(self, since: float) -> None:
        if time.monotonic() - since <= self.timeout:
            return
        room = need_ray().available_resources()
        free = ", ".join(f"{room.get(key, 0):g} {key}" for key in ("CPU", "GPU"))
        raise ConfigError(
            f"no worker started within {self.timeout:g} s; the cluster has {free} free"
        )
