"""One policy moved through rounds: who is asked, who is picked, what it cost.

The session does no I/O and trains nothing. An engine, be it the simulator or a Flower strategy,
calls `begin` with the clients that are there and a function that fetches signals, trains the
selection in its own way, and calls `finish` with what came back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import InvalidCheckpoint, NoClients, PolicyError
from fedcohort.gates.base import Gate
from fedcohort.ledger import Ledger
from fedcohort.policies.base import Policy, pick
from fedcohort.rounds import ClientId, Outcome, Round, Selection, stream
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.table import Signals, as_array

Readings = Mapping[ClientId, ArrayLike | None]
Collect = Callable[[str, tuple[ClientId, ...]], Readings]

MAX_ASKS = 3  # a client that does not answer a profile query this often is left alone


class Session:
    """Runs a policy round after round.

    Parameters
    ----------
    policy : Policy
        The policy; the session calls it and keeps its state with its own.
    cohort_size : int
        Clients wanted in each round.
    seed : int
        All randomness of the selection is a function of it and of the round.
    gate : Gate, optional
        Decides after local training who uploads; see `announce` and `admit`.
    model_bytes : int, default=0
        Size of the model, charged for each download and upload.

    Examples
    --------
    >>> from fedcohort.policies import PowerOfChoice
    >>> session = Session(PowerOfChoice(d=2), cohort_size=1, seed=0, model_bytes=100)
    >>> readings = {"num_examples": {"a": 10, "b": 10}, "loss": {"a": 0.3, "b": 0.9}}
    >>> def collect(signal, clients):
    ...     return {client: readings[signal][client] for client in clients}
    >>> session.begin(["a", "b"], collect).clients
    ('b',)
    >>> session.finish({}, ["b"])
    Outcome(selected=('b',), finished=('b',), withheld=())
    >>> session.ledger.by_kind("down")
    {'model': 200}
    """

    def __init__(
        self,
        policy: Policy,
        *,
        cohort_size: int,
        seed: int,
        gate: Gate | None = None,
        model_bytes: int = 0,
    ) -> None:
        if cohort_size < 1:
            raise ValueError(f"Session: cohort_size={cohort_size} must be at least 1")
        self.policy = policy
        self.gate = gate
        self.cohort_size = cohort_size
        self.seed = seed
        self.model_bytes = model_bytes
        self.signals = Signals()
        self.ledger = Ledger()
        self.round_number = 0
        self._asks: Counter[str] = Counter()
        self._round: Round | None = None
        self._available: tuple[Iterable[ClientId], tuple[ClientId, ...]] = ((), ())
        self._selection = Selection(())
        self._holding: set[ClientId] = set()
        self._admitted: tuple[ClientId, ...] | None = None
        self._withheld: tuple[ClientId, ...] = ()
        self.skipped = False

    def begin(self, available: Iterable[ClientId], collect: Collect) -> Selection:
        """Start a round: collect the signals that the policy needs and pick the cohort.

        Parameters
        ----------
        available : iterable of str
            The clients that can take part.
        collect : callable
            ``collect(signal_name, clients)`` returns a mapping from client to reading; a client
            that did not answer is missing or None.

        Returns
        -------
        Selection
            As many clients as wanted, or all if fewer are available. After a round that a gate
            skipped, the same clients go on: nobody is asked and no model is sent.
        """
        clients = self._sorted(available)
        if not clients:
            raise NoClients(f"round {self.round_number}: no client is available")
        self._round = round = Round(self.round_number, clients, self.cohort_size)
        self._admitted, self._withheld = None, ()
        if self.skipped:
            present = set(clients)
            same = tuple(c for c in self._selection.clients if c in present)
            if same:
                self._selection = _restricted(self._selection, same)
                return self._selection
        self.skipped = False
        self._holding = set()
        for name in sorted(self.policy.needs.profile):
            self._gather(name, self._unprofiled(name, clients), collect, retry=True)
        asked = self.policy.candidates(round, self.signals, self._rng("candidates"))
        if len(asked):
            ordered = self._checked(asked, "candidates")
            for name in sorted(self.policy.needs.query):
                self._gather(name, ordered, collect)
        selection = self.policy.select(round, self.signals, self._rng("select"))
        self._selection = self._completed(selection, round)
        self._send_model(self._selection.clients)
        return self._selection

    def announce(self, model: NDArray[np.floating[Any]]) -> NDArray[Any] | None:
        """Return what the gate tells the selected clients about the global model."""
        message = None if self.gate is None else self.gate.announce(model)
        if message is not None:
            self.ledger.charge(
                self.round_number, "gate", "down", self._selection.clients, message.nbytes
            )
        return message

    def admit(self, answers: Mapping[ClientId, NDArray[Any]]) -> tuple[ClientId, ...]:
        """Let the gate decide, from the clients' answers after training, who uploads.

        Answers of clients that failed are missing. Nobody admitted means that the round is
        skipped: call `finish` without updates, and leave the global model as it is.
        """
        if self.gate is None:
            self._admitted = tuple(answers)
            return self._admitted
        number = self.round_number
        sizes = {c: a.nbytes for c, a in answers.items()}
        self.ledger.charge_each(number, "gate", "up", sizes)
        self._admitted = self.gate.decide(answers)
        asked = set(self._admitted)
        self._withheld = tuple(c for c in answers if c not in asked)
        self.skipped = not self._admitted and bool(answers)
        if any(sizes.values()):  # a byte asks for an upload; silence means no
            self.ledger.charge(number, "gate", "down", self._admitted, 1)
        return self._admitted

    def finish(self, replies: Mapping[str, Readings], finished: Iterable[ClientId]) -> Outcome:
        """End the round: store the reply signals, charge the uploads, let the policy learn.

        Parameters
        ----------
        replies : mapping
            Reply signals by name, each a mapping from client to reading.
        finished : iterable of str
            The selected clients whose update arrived.
        """
        if self._round is None:
            raise RuntimeError("Session.finish was called before Session.begin")
        done = set(finished)
        asked = self._selection.clients if self._admitted is None else self._admitted
        strangers = done - set(asked)
        if strangers:
            raise ValueError(f"Session.finish: {min(strangers)!r} was not selected this round")
        outcome = Outcome(
            self._selection.clients,
            tuple(c for c in self._selection.clients if c in done),
            self._withheld,
        )
        for name in sorted(self.policy.needs.reply):
            sent = replies.get(name, {})
            self._store(name, {c: sent[c] for c in outcome.finished if c in sent})
        self.ledger.charge(self._round.number, "model", "up", outcome.finished, self.model_bytes)
        if not self.skipped:
            self.policy.observe(self._round, outcome, self.signals)
        self.round_number += 1
        self._round = None
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on; call it between rounds."""
        if self._round is not None:
            raise RuntimeError("Session.state_dict: finish the round first")
        return {
            "policy": type(self.policy).__name__,
            "seed": self.seed,
            "cohort_size": self.cohort_size,
            "round_number": self.round_number,
            "policy_state": self.policy.state_dict(),
            "signals": self.signals.state_dict(),
            "ledger": self.ledger.state_dict(),
            "asks": dict(self._asks),
            "gate": None if self.gate is None else self.gate.name,
            "gate_state": {} if self.gate is None else self.gate.state_dict(),
            "skipped": self.skipped,
            "cohort": list(self._selection.clients) if self.skipped else [],
            "weights": self._selection.weights if self.skipped else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same policy, seed and cohort size."""
        gate = None if self.gate is None else self.gate.name
        expected = (type(self.policy).__name__, self.seed, self.cohort_size, gate)
        found = tuple(state.get(key) for key in ("policy", "seed", "cohort_size", "gate"))
        if found != expected:
            raise InvalidCheckpoint(
                f"the checkpoint is of (policy, seed, cohort_size, gate) = {found}, "
                f"this is {expected}"
            )
        if self.gate is not None:
            self.gate.load_state_dict(state["gate_state"])
        self.skipped = bool(state["skipped"])
        weights = state["weights"]
        self._selection = Selection(
            tuple(state["cohort"]), None if weights is None else tuple(weights)
        )
        self.round_number = int(state["round_number"])
        self.policy.load_state_dict(state["policy_state"])
        self.signals.load_state_dict(state["signals"])
        self.ledger.load_state_dict(state["ledger"])
        self._asks = Counter(state["asks"])

    def _sorted(self, available: Iterable[ClientId]) -> tuple[ClientId, ...]:
        """Sort the clients, or reuse the last round's result for the very same tuple."""
        if available is self._available[0] and isinstance(available, tuple):
            return self._available[1]
        self._available = (available, tuple(sorted(set(available))))
        return self._available[1]

    def _rng(self, phase: str) -> np.random.Generator:
        return stream(self.seed, "session", self.round_number, phase)

    def _unprofiled(self, name: str, clients: tuple[ClientId, ...]) -> tuple[ClientId, ...]:
        unknown = np.flatnonzero(self.signals.rounds(name, clients) < 0)
        asks = self._asks
        return tuple(clients[i] for i in unknown if asks[f"{name}/{clients[i]}"] < MAX_ASKS)

    def _gather(
        self, name: str, clients: tuple[ClientId, ...], collect: Collect, *, retry: bool = False
    ) -> None:
        """Ask `clients` for a signal, sending the model first where it takes one."""
        if not clients:
            return
        if SIGNALS[name].needs_model:
            self._send_model(clients)
        answers = collect(name, clients)
        kept = set(self._store(name, {c: answers[c] for c in clients if c in answers}))
        if retry:
            self._asks.update(f"{name}/{c}" for c in clients if c not in kept)

    def _store(self, name: str, readings: Readings) -> tuple[ClientId, ...]:
        """Record readings; every byte that arrived is charged, used or not."""
        if SIGNALS[name].work != "server":
            arrays = {c: as_array(r) for c, r in readings.items() if r is not None}
            sizes = {c: 0 if a is None else a.nbytes for c, a in arrays.items()}
            self.ledger.charge_each(self.round_number, name, "up", sizes)
        return self.signals.record(name, readings, self.round_number)

    def _send_model(self, clients: Iterable[ClientId]) -> None:
        """Charge a download to each client that does not hold this round's model yet."""
        fresh = [c for c in clients if c not in self._holding]
        self._holding.update(fresh)
        self.ledger.charge(self.round_number, "model", "down", fresh, self.model_bytes)

    def _checked(self, clients: Sequence[ClientId], what: str) -> tuple[ClientId, ...]:
        """Refuse strangers and repeats; return the clients sorted."""
        assert self._round is not None
        chosen = set(clients)
        name = type(self.policy).__name__
        if len(chosen) < len(clients):
            raise PolicyError(f"{name}.{what}: a client appears twice")
        strangers = chosen.difference(self._round.available)
        if strangers:
            raise PolicyError(f"{name}.{what}: {min(strangers)!r} is not available")
        return tuple(sorted(chosen))

    def _completed(self, selection: Selection, round: Round) -> Selection:
        """Check the policy's cohort and top it up uniformly if it falls short."""
        name = type(self.policy).__name__
        self._checked(selection.clients, "select")
        if len(selection.clients) > round.size:
            raise PolicyError(
                f"{name}.select: {len(selection.clients)} clients for a cohort of {round.size}"
            )
        weights = selection.weights
        if weights is not None and len(weights) != len(selection.clients):
            raise PolicyError(f"{name}.select: {len(weights)} weights for its clients")
        missing = round.size - len(selection.clients)
        if not missing:
            return selection
        taken = set(selection.clients)
        rest = [c for c in round.available if c not in taken]
        extra = pick(rest, missing, self._rng("top-up"))
        if weights is not None:
            fill = float(np.mean(weights)) if weights else 1.0
            weights = (*weights, *(fill for _ in extra))
        return Selection(selection.clients + extra, weights, selection.scores)


def _restricted(selection: Selection, clients: tuple[ClientId, ...]) -> Selection:
    """Return the part of a selection that concerns `clients`."""
    weights = None
    if selection.weights is not None:
        known = dict(zip(selection.clients, selection.weights, strict=True))
        weights = tuple(known[c] for c in clients)
    return Selection(clients, weights, selection.scores)
