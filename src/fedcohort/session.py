"""A policy in action, round after round: who is asked, who is picked, what it costs.

The session does no I/O and trains nothing. An engine calls `begin` with the clients that are there
and a function that fetches signals, trains the selection, and calls `finish` with what came back.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import filterfalse, islice
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import InvalidCheckpoint, NoClients, PolicyError
from fedcohort.gates.base import GATES, Gate
from fedcohort.ledger import Direction, Ledger
from fedcohort.options import Count, Whole, typed
from fedcohort.policies import POLICIES
from fedcohort.policies.base import Policy, pick
from fedcohort.policies.readings import sizes
from fedcohort.registry import make
from fedcohort.rounds import Averaging, ClientId, Outcome, Round, Selection, check_id, stream
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors
from fedcohort.signals.table import Signals, as_array

Readings = Mapping[ClientId, ArrayLike | None]
Collect = Callable[[str, tuple[ClientId, ...]], Readings]

LOG = logging.getLogger("fedcohort")
MAX_ASKS = 3  # a client that does not answer a profile query this often is not asked again
MAX_FAILURES = 2  # failed rounds in a row after which a client sits out for a while
MAX_REST = 64  # rounds; longer where clients are selected less often


class Session:
    """Runs a policy round after round.

    A client that did not finish `MAX_FAILURES` rounds in a row sits out: 4 rounds, then 8, 16 and
    so on, at most `MAX_REST` or twice the rounds that a turn of everybody takes, until it finishes
    a round again, or too few others are available.

    Parameters
    ----------
    policy, gate : Policy, Gate or str
        Objects, or names with options (``"oort:alpha=2"``).
    cohort_size : int
        Clients wanted in each round.
    seed : int
        All randomness of the selection is a function of it and of the round.
    model_bytes : int, default=0
        Charged for each download and upload of the model.
    averaging : {"equal", "size"}, optional
        How the engine averages models, for policies that match the average.

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
    Outcome(selected=('b',), finished=('b',), withheld=(), cut=())
    >>> session.ledger.by_kind("down")
    {'model': 200}
    """

    def __init__(
        self,
        policy: Policy | str,
        *,
        cohort_size: int,
        seed: int,
        gate: Gate | str | None = None,
        model_bytes: int = 0,
        averaging: Averaging | None = None,
    ) -> None:
        self.policy: Policy = make("policy", policy, POLICIES)
        self.gate: Gate | None = make("gate", None if gate == "none" else gate, GATES)
        self.cohort_size: int = typed(Count, cohort_size, "Session: cohort_size")
        self.seed: int = typed(int, seed, "Session: seed")
        self.model_bytes: int = typed(Whole, model_bytes, "Session: model_bytes")
        self.averaging = typed(Averaging | None, averaging, "Session: averaging")
        self.signals = Signals()
        self.ledger = Ledger()
        self.round_number = 0
        self._asks: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._known_ids: set[ClientId] = set()
        self._failures: Counter[ClientId] = Counter()
        self.resting: dict[ClientId, int] = {}  # who sits out, and until which round
        self._round: Round | None = None
        self._available: tuple[Iterable[ClientId], tuple[ClientId, ...]] = ((), ())
        self.selection = Selection(())  # of this round; `admit` may set its weights
        self._holding: set[ClientId] = set()
        self._admitted: tuple[ClientId, ...] | None = None
        self._withheld: tuple[ClientId, ...] = ()
        self.skipped = False

    def begin(self, available: Iterable[ClientId], collect: Collect) -> Selection:
        """Start a round: collect the signals that the policy needs and pick the cohort.

        ``collect(signal_name, clients)`` returns a mapping from client to reading; a client that
        did not answer is missing or None. After a round that a gate skipped, the same clients go
        on.
        """
        clients = self._sorted(available)
        if not clients:
            raise NoClients(f"round {self.round_number + 1}: no client is available")
        clients = self._rested(clients)
        self._round = round = Round(self.round_number, clients, self.cohort_size, self.averaging)
        self._admitted, self._withheld = None, ()
        present = set(clients) if self.skipped else set()
        same = tuple(c for c in self.selection.clients if c in present)
        self.skipped, self._holding = bool(same), set(same)
        if same:  # those that left are replaced
            given = self.selection.weights_of(same)
            weights = tuple(given) if given else None
            selection = dataclasses.replace(self.selection, clients=same, weights=weights)
        else:
            selection = self._selected(round, collect)
        self.selection = self._completed(selection, round)
        self._send_model(self.selection.clients)
        return self.selection

    def _selected(self, round: Round, collect: Collect) -> Selection:
        self._profile(round.available, collect)
        if query := sorted(self.policy.needs.query):
            asked = self.policy.candidates(round, self.signals, self._rng("candidates"))
            ordered = self._checked(asked, "candidates")
            for name in query:
                self._gather(name, ordered, collect)
        return self.policy.select(round, self.signals, self._rng("select"))

    def profile(self, clients: Iterable[ClientId], collect: Collect) -> None:
        """Ask all clients for their profile signals, for a policy with `profile_first`."""
        self._profile(self._sorted(clients), collect)

    def announce(self, model: Vectors) -> NDArray[Any] | None:
        """Return what the gate tells the selected clients about the global model."""
        message = None if self.gate is None else self.gate.announce(model)
        if message is not None:
            self.charge("gate", "down", dict.fromkeys(self.selection.clients, message.nbytes))
        return message

    def charge(self, kind: str, direction: Direction, sizes: Mapping[ClientId, int]) -> None:
        """Charge bytes of this round that only the engine can see."""
        self.ledger.charge(self.round_number, kind, direction, sizes)

    def admit(self, answers: Mapping[ClientId, NDArray[Any]]) -> tuple[ClientId, ...]:
        """Let the gate decide, from the clients' answers after training, who uploads.

        Nobody means that the round is skipped: call `finish` without updates.
        """
        if self.gate is None:
            self._admitted = tuple(answers)
            return self._admitted
        sent = {c: a.nbytes for c, a in answers.items()}
        self.charge("gate", "up", sent)
        shares = self._shares()
        factors = self.gate.admit(answers, shares, self._rng("gate"))
        self._admitted = tuple(factors)
        if any(factor != 1 for factor in factors.values()):
            weights = tuple(shares[c] * factors.get(c, 0.0) for c in self.selection.clients)
            self.selection = dataclasses.replace(self.selection, weights=weights)
        self._withheld = tuple(c for c in answers if c not in factors)
        self.skipped = not self._admitted and bool(answers)
        if any(sent.values()):  # a byte asks for an upload; silence means no
            self.charge("gate", "down", dict.fromkeys(self._admitted, 1))
        return self._admitted

    def _shares(self) -> dict[ClientId, float]:
        clients, weights = self.selection.clients, self.selection.weights
        if weights is None:
            by_size = self.averaging == "size"
            counts = sizes(self.signals, clients) if by_size else np.ones(len(clients))
            weights = tuple((counts / counts.sum()).tolist())
        return dict(zip(clients, weights, strict=True))

    def finish(
        self,
        replies: Mapping[str, Readings],
        finished: Iterable[ClientId],
        cut: Iterable[ClientId] = (),
    ) -> Outcome:
        """End the round: store the reply signals, charge the uploads, let the policy learn.

        `replies` are readings by signal and client. Updates of the `finished` arrived. For those
        that are `cut` the round did not wait: they count as neither finished nor failed.
        """
        if self._round is None:
            raise RuntimeError("Session.finish was called before Session.begin")
        done, late, clients = set(finished), set(cut), self.selection.clients
        asked = clients if self._admitted is None else self._admitted
        if strangers := done.difference(asked) | late.difference(clients) | (done & late):
            raise ValueError(f"Session.finish: {min(strangers)!r} was not selected this round")
        finishers, cut = (tuple(c for c in clients if c in some) for some in (done, late))
        outcome = Outcome(clients, finishers, self._withheld, cut)
        if unwanted := set(replies).difference(self.policy.needs.reply):
            self._warn(f"replies under {min(unwanted)!r}, which the policy does not need")
        for name in sorted(self.policy.needs.reply):
            sent = replies.get(name, {})
            self._store(name, {c: sent[c] for c in outcome.finished if c in sent})
        self.charge("model", "up", dict.fromkeys(outcome.finished, self.model_bytes))
        self._note_failures(outcome)
        if not self.skipped:
            self.policy.observe(self._round, outcome, self.signals)
        self.round_number += 1
        self._round = None
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on; call it between rounds."""
        if self._round is not None:
            raise RuntimeError("Session.state_dict: finish the round first")
        gate = self.gate
        return {
            "policy": repr(self.policy),
            "seed": self.seed,
            "cohort_size": self.cohort_size,
            "round_number": self.round_number,
            "policy_state": self.policy.state_dict(),
            "signals": self.signals.state_dict(),
            "ledger": self.ledger.state_dict(),
            "asks": dict(self._asks),
            "failures": dict(self._failures),
            "resting": dict(self.resting),
            "gate": gate and repr(gate),
            "gate_state": gate.state_dict() if gate else {},
            "skipped": self.skipped,
            "cohort": list(self.selection.clients) if self.skipped else [],
            "weights": self.selection.weights if self.skipped else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same policy and options, seed and size."""
        expected = (repr(self.policy), self.seed, self.cohort_size, self.gate and repr(self.gate))
        saved = tuple(state.get(key) for key in ("policy", "seed", "cohort_size", "gate"))
        if saved != expected:
            what = f"(policy, seed, cohort_size, gate) = {saved}"
            raise InvalidCheckpoint(f"the checkpoint is of {what}, this is {expected}")
        self.policy.load_state_dict(state["policy_state"])
        if self.gate:
            self.gate.load_state_dict(state["gate_state"])
        self.signals.load_state_dict(state["signals"])
        self.ledger.load_state_dict(state["ledger"])
        self.skipped, weights = bool(state["skipped"]), state["weights"]
        self.selection = Selection(tuple(state["cohort"]), tuple(weights) if weights else None)
        self.round_number = int(state["round_number"])
        self._asks = Counter(state["asks"])
        self._failures = Counter(state["failures"])
        self.resting = dict(state["resting"])

    def _sorted(self, available: Iterable[ClientId]) -> tuple[ClientId, ...]:
        """Sort the clients, or reuse the last round's result for the very same tuple."""
        if available is self._available[0] and isinstance(available, tuple):
            return self._available[1]
        clients = list(available)
        new = list(filterfalse(self._known_ids.__contains__, clients))
        for client in new:
            check_id(client)
        self._known_ids.update(new)
        clients.sort()
        if any(map(eq, clients, islice(clients, 1, None))):
            clients = sorted(set(clients))
        self._available = (available, tuple(clients))
        return self._available[1]

    def _rested(self, clients: tuple[ClientId, ...]) -> tuple[ClientId, ...]:
        """Leave out the clients that sit out, unless too few others are there."""
        resting = {c for c, until in self.resting.items() if until > self.round_number}
        others = tuple(filterfalse(resting.__contains__, clients)) if resting else clients
        return others if len(others) >= self.cohort_size else clients

    def _note_failures(self, outcome: Outcome) -> None:
        """Let clients that keep failing sit out, longer each time; one success forgives all."""
        for client in (*outcome.finished, *outcome.withheld):
            self._failures.pop(client, None)
            self.resting.pop(client, None)
        longest = max(MAX_REST, 2 * len(self._available[1]) // self.cohort_size)
        for client in outcome.dropped:
            self._failures[client] += 1
            excess = self._failures[client] - MAX_FAILURES
            if excess >= 0:
                rest = min(4 << min(excess, 30), longest)
                self.resting[client] = self.round_number + 1 + rest

    def _rng(self, phase: str) -> np.random.Generator:
        return stream(self.seed, "session", self.round_number, phase)

    def _profile(self, clients: tuple[ClientId, ...], collect: Collect) -> None:
        asks = self._asks
        for name in sorted(self.policy.needs.profile | (self.gate.profile if self.gate else set())):
            unknown = np.flatnonzero(self.signals.rounds(name, clients) < 0)
            asked = tuple(clients[i] for i in unknown if asks[f"{name}/{clients[i]}"] < MAX_ASKS)
            known = self._gather(name, asked, collect)
            asks.update(f"{name}/{c}" for c in asked if c not in known)

    def _gather(self, name: str, clients: tuple[ClientId, ...], collect: Collect) -> set[ClientId]:
        """Ask for a signal, sending the model first where it takes one; return who answered."""
        if not clients:
            return set()
        signal, options = SIGNALS[name], self.policy.signal_options.get(name, {})
        if signal.when == "profile" and self.round_number and signal.needs_model(options):
            self.charge("model", "down", dict.fromkeys(clients, self.model_bytes))
        elif signal.needs_model(options):
            self._send_model(clients)
        answers = collect(name, clients)
        if strangers := set(answers).difference(clients):
            one = min(map(str, strangers))
            self._warn(f"{name}: answers of clients that were not asked, such as {one!r}")
        kept = set(self._store(name, {c: answers[c] for c in clients if c in answers}))
        if not kept:
            self._warn(f"{name}: none of the {len(clients)} clients asked gave a usable answer")
        return kept

    def _store(self, name: str, readings: Readings) -> tuple[ClientId, ...]:
        """Record readings; every byte that arrived is charged, used or not."""
        signal = SIGNALS[name]
        if signal.work != "server":
            arrays = {c: as_array(r) for c, r in readings.items() if r is not None}
            self.charge(name, "up", {c: 0 if a is None else a.nbytes for c, a in arrays.items()})
        form = signal.form(self.policy.signal_options.get(name, {}))
        return self.signals.record(name, readings, self.round_number, form)

    def _warn(self, message: str) -> None:
        """Log a likely mistake of the engine, once."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning("round %d: %s", self.round_number + 1, message)

    def _send_model(self, clients: Iterable[ClientId]) -> None:
        """Charge a download to each client that does not hold this round's model yet."""
        fresh = [c for c in clients if c not in self._holding]
        self._holding.update(fresh)
        self.charge("model", "down", dict.fromkeys(fresh, self.model_bytes))

    def _checked(self, clients: Sequence[ClientId], what: str) -> tuple[ClientId, ...]:
        """Refuse strangers and repeats; return the clients sorted."""
        assert self._round is not None
        available = self._round.available
        if clients is available:
            return available
        chosen = set(clients)
        name = type(self.policy).__name__
        if len(chosen) < len(clients):
            raise PolicyError(f"{name}.{what}: a client appears twice")
        if strangers := chosen.difference(available):
            raise PolicyError(f"{name}.{what}: {min(strangers)!r} is not available")
        return tuple(sorted(chosen))

    def _completed(self, selection: Selection, round: Round) -> Selection:
        """Check the policy's cohort and top it up uniformly if it falls short."""
        clients, weights = selection.clients, selection.weights
        taken, where = set(self._checked(clients, "select")), f"{type(self.policy).__name__}.select"
        if len(clients) > round.size:
            raise PolicyError(f"{where}: {len(clients)} clients for a cohort of {round.size}")
        if weights is not None and len(weights) != len(clients):
            raise PolicyError(f"{where}: {len(weights)} weights for its clients")
        missing = round.size - len(clients)
        if not missing:
            return selection
        rest = [c for c in round.available if c not in taken]
        extra = pick(rest, missing, self._rng("top-up"))
        if weights:  # the others get the mean weight, and the sum is kept
            share = len(weights) / (len(weights) + missing)
            mean = sum(weights) / len(weights)
            weights = (*(w * share for w in weights), *([mean * share] * missing))
        return Selection(clients + extra, weights or None, selection.scores)
