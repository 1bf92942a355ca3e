"""What every round cost in bytes, by client, kind of message and direction."""

from __future__ import annotations

from collections import Counter, defaultdict
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
        self._rounds: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._clients: defaultdict[tuple[str, str], Counter[ClientId]] = defaultdict(Counter)

    def charge(
        self, round_number: int, kind: str, direction: Direction, sizes: Mapping[ClientId, int]
    ) -> None:
        """Charge each client its own number of bytes."""
        if sizes:
            self._clients[kind, direction].update(sizes)
            self._rounds[round_number][kind, direction] += sum(sizes.values())

    def total(self, direction: Direction, round_number: int | None = None) -> int:
        """Bytes in one direction, in all rounds or in one."""
        return sum(self.by_kind(direction, round_number).values())

    def by_kind(self, direction: Direction, round_number: int | None = None) -> dict[str, int]:
        """Bytes by kind of message, in all rounds or in one."""
        numbers = self._rounds if round_number is None else (round_number,)
        kinds = Counter[str]()
        for number in numbers:
            for (kind, way), size in self._rounds.get(number, {}).items():
                if way == direction:
                    kinds[kind] += size
        return dict(kinds)

    def by_client(self, direction: Direction) -> dict[ClientId, int]:
        """Bytes by client."""
        totals = Counter[ClientId]()
        for (_, way), sizes in self._clients.items():
            if way == direction:
                totals.update(sizes)
        return dict(totals)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        rounds = [[r, *key, n] for r, kinds in self._rounds.items() for key, n in kinds.items()]
        return {"rounds": rounds, "clients": [[*key, n] for key, n in self._clients.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._rounds.clear()
        self._clients.clear()
        for number, kind, way, size in state["rounds"]:
            self._rounds[number][kind, way] = size
        for kind, way, sizes in state["clients"]:
            self._clients[kind, way] = Counter(sizes)
