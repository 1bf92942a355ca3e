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

Message = NDArray[Any] | None  # what the server announces
Answers = Mapping[ClientId, NDArray[Any]]  # one row of `Gate.probe` by client


class Gate(Configurable, ABC):
    """Decides who uploads; all that it remembers, at the server, is in `state`.

    A client that was not asked for its model keeps what it learned or starts again from the global
    model (`on_skip`). What it kept is still of use after the global model changed if clients upload
    one by one (`carries_over`), not if all of a cohort upload or none.
    """

    name: ClassVar[str] = ""
    on_skip: Literal["keep", "reset"] = "keep"
    carries_over: bool = True
    profile: frozenset[str] = frozenset()  # signals that it needs, beside those of the policy

    @property
    def client_options(self) -> Mapping[str, int | float | str | bool]:
        """The options that a remote client needs to build its own gate and answer a probe."""
        return {}

    @abstractmethod
    def announce(self, model: Vectors) -> Message:
        """Return what the server sends to each selected client; None for nothing."""

    @abstractmethod
    def probe(self, announced: Message, start: Vectors, models: Vectors) -> NDArray[Any]:
        """Return a row for each client, its answer; `start` is the global model."""

    @abstractmethod
    def decide(self, answers: Answers) -> tuple[ClientId, ...]:
        """Return who uploads, of those that answered; nobody means that the round is skipped."""

    def admit(
        self, answers: Answers, shares: Mapping[ClientId, float], rng: Generator
    ) -> dict[ClientId, float]:
        """Return who uploads, and the factor by which its share in the average grows."""
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


def numbers(answers: Answers, kinds: str = "f") -> dict[ClientId, float]:
    """Return the answers that are one number, at least 0, of such a dtype; others count as none."""
    fit = {c: a for c, a in answers.items() if a.shape == (1,) and a.dtype.kind in kinds}
    return {c: float(a[0]) for c, a in fit.items() if a[0] >= 0}
