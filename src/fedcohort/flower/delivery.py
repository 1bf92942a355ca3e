"""Which client holds which model, so that no model is sent twice in a round."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord

from fedcohort.flower.arrays import version
from fedcohort.rounds import ClientId
from fedcohort.session import Session


class Model:
    """A model on its way to clients, with its name."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self.arrays = arrays
        self.version = version(arrays)


class Delivery:
    """Decides whether a message must carry the model, and keeps the session's ledger true.

    A session charges one download to a client and round. A client that says it kept the model gets
    no other copy; one that did not, or that was asked about another model before, gets one more,
    which is charged here.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._held: dict[ClientId, str] = {}
        self._charged: set[ClientId] = set()

    def begin(self, continuing: Iterable[ClientId] = ()) -> None:
        """Start a round; `continuing` clients go on after one that a gate skipped.

        The session takes it that those hold the model still, and charges them nothing.
        """
        self._charged = set(continuing)
        self._held = {c: held for c, held in self._held.items() if c in self._charged}

    def confirm(self, client: ClientId, held: object) -> None:
        """Note which model a client says it holds."""
        if isinstance(held, str) and held:
            self._held[client] = held

    def must_carry(self, client: ClientId, model: Model) -> bool:
        """Whether a message to the client must carry the model; it is then charged."""
        if self._held.get(client) == model.version:
            return False
        if client in self._charged:
            session = self.session
            number, size = session.round_number, session.model_bytes
            session.ledger.charge(number, "model", "down", [client], size)
        self._charged.add(client)
        return True
