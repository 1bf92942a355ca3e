"""The interface of a gate: what the server announces, what clients answer, who uploads.

In every round the server announces a small message with the model's version. Each selected client
trains, compares, and answers in a few bytes. The server then asks some, all or none of them for
their models. A gate does no I/O and holds no models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.options import Configurable
from fedcohort.rounds import ClientId
from fedcohort.signals.projection import Vectors


class Gate(Configurable, ABC):
    """Decides who uploads.

    Attributes
    ----------
    on_skip : {"keep", "reset"}
        What a client does if it was not asked for its model: keep what it learned, or start again
        from the global model.
    profile : frozenset of str
        Profile signals that the gate needs, beside those of the policy.
    carries_over : bool
        Whether what a client kept is still of use after the global model changed: so where clients
        upload one by one (error feedback), not where all of a cohort upload or none.
    state : dataclass instance or None
        All that the gate remembers between rounds, at the server.
    """

    name: ClassVar[str] = ""
    on_skip: Literal["keep", "reset"] = "keep"
    carries_over: bool = True
    profile: frozenset[str] = frozenset()

    @property
    def client_options(self) -> Mapping[str, int | float | str | bool]:
        """The options that a remote client needs to build its own gate and answer a probe."""
        return {}

    @abstractmethod
    def announce(self, model: Vectors) -> NDArray[Any] | None:
        """Return what the server sends to each selected client; None for nothing."""

    @abstractmethod
    def probe(
        self, announced: NDArray[Any] | None, start: Vectors, models: Vectors
    ) -> NDArray[Any]:
        """Return each client's answer, one row per client.

        `start` is the global model, a single row; `models` are the trained ones.
        """

    @abstractmethod
    def decide(self, answers: Mapping[ClientId, NDArray[Any]]) -> tuple[ClientId, ...]:
        """Return who uploads, of those that answered; nobody means that the round is skipped."""

    def admit(
        self,
        answers: Mapping[ClientId, NDArray[Any]],
        shares: Mapping[ClientId, float],
        rng: Generator,
    ) -> dict[ClientId, float]:
        """Return who uploads, and the factor by which its weight grows; 1 by default.

        `shares` are the selected clients' weights in the average, as far as they are known.
        """
        return dict.fromkeys(self.decide(answers), 1.0)

    def aggregated(self, before: Vectors, after: Vectors) -> None:
        """Learn the global model's step after a round that was not skipped."""


GATES: dict[str, type[Gate]] = {}
G = TypeVar("G", bound=type[Gate])


def register(name: str) -> Callable[[G], G]:
    """Class decorator: enter a gate into `GATES` under a kebab-case name."""

    def enter(gate: G) -> G:
        gate.name = name
        GATES[name] = gate
        return gate

    return enter
