"""Asking clients for signals, as a session's `collect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.flower.delivery import Delivery, Model
from fedcohort.flower.exchange import LOG, exchange, failure
from fedcohort.flower.forms import fits, most_bytes
from fedcohort.flower.messages import RECORD, Request, from_record, pack, raw, refused
from fedcohort.policies.base import Option
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS

Readings = dict[ClientId, NDArray[Any]]


def reading_of(
    record: ConfigRecord | None, name: str, options: Mapping[str, Option], limit: int
) -> NDArray[Any] | None:
    """Return a reading from a reply, None if there is none.

    What is too large, malformed or of the wrong form comes back as opaque bytes, which the session
    charges, drops and counts.
    """
    data = raw(record, name)
    if record is None or data is None:
        return None
    try:
        reading = from_record(record, name, most_bytes(name, options, limit))
    except DataError as error:
        LOG.warning("signal %s: %s", name, error)
        return refused(data)
    return reading if fits(name, reading, options) else refused(data)


class Queries:
    """Sends ``query.<signal>`` to clients and returns the readings of those that answered.

    Parameters
    ----------
    grid : Grid
    nodes : mapping
        Node id by client.
    delivery : Delivery
    request : Request
        What all queries of the round have in common.
    current, initial : Model
        Profiles are taken under the initial model, so that a newcomer's is comparable.
    options : mapping
        The policy's `signal_options`.
    timeout, limit
        Seconds to wait for replies, bytes that a reading may have.
    center : array, optional
        Public center of the data, for sketches that want one.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[ClientId, int],
        delivery: Delivery,
        request: Request,
        *,
        current: Model,
        initial: Model,
        options: Mapping[str, Mapping[str, Option]],
        timeout: float,
        limit: int,
        center: NDArray[np.float64] | None = None,
    ) -> None:
        self.grid, self.nodes, self.delivery, self.request = grid, nodes, delivery, request
        self.current, self.initial, self.options = current, initial, options
        self.timeout, self.limit, self.center = timeout, limit, center

    def __call__(self, name: str, clients: Sequence[ClientId]) -> Readings:
        """Ask clients for one signal."""
        options = self.options.get(name, {})
        messages = {client: self._message(name, client, options) for client in clients}
        names = {self.nodes[client]: client for client in clients}
        readings: Readings = {}
        for reply in exchange(self.grid, messages.values(), self.timeout):
            client = names[reply.sent.metadata.dst_node_id]
            problem = failure(reply.message)
            if problem is not None:
                LOG.warning("%s did not answer %s: %s", client, name, problem)
                continue
            record = reply.message.content.config_records.get(RECORD)
            self.delivery.confirm(client, None if record is None else record.get("held"))
            reading = reading_of(record, name, options, self.limit)
            if reading is not None:
                readings[client] = reading
        return readings

    def _message(self, name: str, client: ClientId, options: Mapping[str, Option]) -> Message:
        model = self.initial if name == "feature_profile" else self.current
        request = replace(
            self.request, version=model.version, signals=(name,), options={name: options}
        )
        config = ConfigRecord({RECORD: request.to_json()})
        if name == "race_sketch" and options.get("center") and self.center is not None:
            config["center"], config["center.form"] = pack(self.center)
            session = self.delivery.session
            session.ledger.charge(session.round_number, name, "down", [client], self.center.nbytes)
        content = RecordDict({"config": config})
        if SIGNALS[name].needs_model and self.delivery.must_carry(client, model):
            content[request.arrays] = model.arrays
        node = self.nodes[client]
        return Message(content, node, f"query.{name}", ttl=self.timeout + 5)
