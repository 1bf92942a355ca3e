"""What every round cost in bytes, by client, kind of message and direction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from fedcohort.rounds import ClientId

Direction = Literal["up", "down"]


class Ledger:
    """Counts bytes that cross the network, by round and by client.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.charge(0, "model", "down", {"a": 1000, "b": 1000})
    >>> ledger.charge(0, "loss", "up", {"a": 8})
    >>> ledger.total("down"), ledger.total("up"), ledger.by_kind("up")
    (2000, 8, {'loss': 8})
    >>> ledger.by_client("down")
    {'a': 1000, 'b': 1000}
    """

    def __init__(self) -> None:
        self._rounds: dict[int, dict[tuple[str, str], int]] = {}
        self._clients: dict[tuple[str, str], dict[ClientId, int]] = {}

    def charge(
        self, round_number: int, kind: str, direction: Direction, sizes: Mapping[ClientId, int]
    ) -> None:
        """Charge each client its own number of bytes."""
        if not sizes:
            return
        totals = self._clients.setdefault((kind, direction), {})
        for client, size in sizes.items():
            totals[client] = totals.get(client, 0) + size
        kinds = self._rounds.setdefault(round_number, {})
        kinds[kind, direction] = kinds.get((kind, direction), 0) + sum(sizes.values())

    def total(self, direction: Direction, round_number: int | None = None) -> int:
        """Bytes in one direction, in all rounds or in one."""
        return sum(self.by_kind(direction, round_number).values())

    def by_kind(self, direction: Direction, round_number: int | None = None) -> dict[str, int]:
        """Bytes by kind of message, in all rounds or in one."""
        numbers = self._rounds if round_number is None else (round_number,)
        kinds: dict[str, int] = defaultdict(int)
        for charged in (self._rounds.get(number, {}) for number in numbers):
            for (kind, way), size in charged.items():
                if way == direction:
                    kinds[kind] += size
        return dict(kinds)

    def by_client(self, direction: Direction) -> dict[ClientId, int]:
        """Bytes by client."""
        totals: dict[ClientId, int] = defaultdict(int)
        for (_, way), clients in self._clients.items():
            if way == direction:
                for client, size in clients.items():
                    totals[client] += size
        return dict(totals)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        rounds = [[r, *key, n] for r, kinds in self._rounds.items() for key, n in kinds.items()]
        return {"rounds": rounds, "clients": [[*key, n] for key, n in self._clients.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._rounds, self._clients = {}, {}
        for number, kind, way, size in state["rounds"]:
            self._rounds.setdefault(number, {})[kind, way] = size
        for kind, way, sizes in state["clients"]:
            self._clients[kind, way] = dict(sizes)
