"""The federation of one seed: its session, its clients' answers, its aggregation, its clock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError
from fedcohort.gates import Gate
from fedcohort.partition import IndexArray
from fedcohort.policies.base import Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId, RoundRecord, stream
from fedcohort.session import LOG, Session
from fedcohort.signals.catalog import SIGNALS
from fedcohort.simulate.aggregation import AGGREGATIONS, Mean
from fedcohort.simulate.clients import Embed, Insight, SimulatedClients, TensorVectors
from fedcohort.simulate.clock import Arrivals, Availability, Durations, Pace
from fedcohort.simulate.local import Data, Trainer

Readings = dict[ClientId, Any]


class Pending(NamedTuple):
    """An update that is still on its way: its round, when it arrives, and the trained step."""

    round: int
    arrival: float
    step: torch.Tensor


class Seed:
    """One seed's federation; `Simulation` trains the cohorts of all seeds as one batch."""

    # Of the round at hand: how it ends, who trains, whose updates and late updates it uses.
    arrivals: Arrivals
    training: tuple[ClientId, ...] = ()
    finished: tuple[ClientId, ...] = ()
    late: tuple[ClientId, ...] = ()

    def __init__(
        self,
        seed: int,
        federation: Federation,
        trainer: Trainer,
        data: Data,
        model: torch.Tensor,
        *,
        policy: str | Policy,
        cohort_size: int,
        aggregation: str | Mean,
        durations: Durations | Callable[[Sequence[ClientId], int], Durations] | None,
        pace: Pace,
        gate: str | Gate | None,
        insight: Insight | None,
        embed: Embed | None,
        holdout: float,
    ) -> None:
        self.clients, asked = federation.clients, pace.asked(cohort_size)
        if asked > len(self.clients):
            raise ConfigError(
                f"simulate: cohort_size={cohort_size} exceeds the {len(self.clients)} clients: "
                f"{asked} are asked in a round"
            )
        if gate is not None and not pace.waits_for_all:
            raise ConfigError(
                f"simulate: gate={gate!r} decides when all have answered; drop {pace}"
            )
        self.federation, self.held_out = split_off(federation, holdout, seed)
        self.seed, self.trainer, self.data, self.model = seed, trainer, data, model
        self.insight, self.embed = insight, embed
        self.model_bytes = model.numel() * model.element_size()
        self.aggregation: Mean = copy.deepcopy(make("aggregation", aggregation, AGGREGATIONS))
        self.session = Session(
            copy.deepcopy(policy),
            cohort_size=asked,
            seed=seed,
            gate=copy.deepcopy(gate),
            model_bytes=self.model_bytes,
            averaging="size" if self.aggregation.weighted else "equal",
        )
        self.initial = self.embedder = model  # profiles are taken under the initial model
        self.round_number = self.embedder_round = 0
        self.held: dict[ClientId, torch.Tensor] = {}
        if not isinstance(durations, Durations):
            durations = (durations or partial(Durations.draw, sigma=0.0))(self.clients, seed)
        self.durations = durations
        self.cohort_size, self.pace = cohort_size, pace
        self.differences: dict[ClientId, torch.Tensor] = {}  # to models that a gate held back
        self.pending: dict[ClientId, Pending] = {}
        self.clock = 0.0
        self._measured: dict[ClientId, float] = {}

    def select(self, number: int, availability: Availability, dropout: float) -> None:
        """Pick the cohort, draw who drops out, and find whose updates the round will use."""
        rng = stream(self.seed, "availability", number)
        available = availability.available(number, self.clients, rng)
        if self.pending:  # whoever is still at work is not asked, unless nobody else is there
            available = [c for c in available if c not in self.pending] or available
        self.round_number = number
        if number == 0 and self.session.policy.profile_first:
            self.session.profile(self.clients, self.collect)
        selected = self.session.begin(available, self.collect).clients
        gone = stream(self.seed, "dropout", number).random(len(selected)) < dropout
        lost = {c for c, is_gone in zip(selected, gone, strict=True) if is_gone}
        self._round_seconds = seconds = {c: self.seconds_of(c) for c in selected}
        limit = self.pace.limit(self._measured.values())
        wanted = min(self.cohort_size, len(selected))
        self.arrivals = self.pace.close(wanted, seconds, lost, limit)
        if self.arrivals.extended:
            LOG.info("round %d: nobody met the deadline; it waited for one update", number + 1)
        training = {*self.arrivals.used, *(self.arrivals.cut if self.pace.late == "next" else ())}
        self.training = tuple(c for c in selected if c in training)
        for client in selected:  # a new task replaces the one at work
            self.pending.pop(client, None)
        end = self.clock + self.arrivals.seconds
        self.late = tuple(c for c, update in self.pending.items() if update.arrival <= end)

    def takes_plain_mean(self) -> bool:
        """Whether the next model is the mean of all trained models, if all are finite."""
        plain = type(self.aggregation) is Mean and self.session.gate is None
        in_time = bool(self.training) and self.training == self.arrivals.used and not self.late
        return plain and self.session.selection.weights is None and in_time

    def aggregate(self, trained: torch.Tensor, mean: torch.Tensor | None = None) -> int:
        """Take the trained models, one row per training client, through gate and aggregation.

        Clients whose model is not finite have not answered; the number of the others is returned.
        `mean` is the next model, where it is known to be finite. `finish` must follow; in between,
        a GPU can evaluate the new model.
        """
        if mean is None and self.takes_plain_mean():
            mean = self.aggregation.step(self.model, trained, [1] * len(trained))
            mean = mean if bool(torch.isfinite(mean.sum())) else None
        row_of = {client: row for row, client in enumerate(self.training)}
        if mean is None:  # a finite mean shows that all models are
            finite = torch.isfinite(trained.sum(dim=1)).tolist()
            row_of = {client: row for client, row in row_of.items() if finite[row]}
        still_out = {c: trained[row_of[c]] for c in self.arrivals.cut if c in row_of}
        clients = tuple(c for c in row_of if c not in still_out)
        self.finished = self._admitted(clients, _rows(trained, [row_of[c] for c in clients]))
        models = _rows(trained, [row_of[c] for c in self.finished])
        before = self.model
        self._replies = self._replies_of(models) if self.finished else {}
        if self.finished or self.late:
            self.model = self._next_model(models) if mean is None else mean
        if self.finished and self.session.gate is not None:
            self.session.gate.aggregated(TensorVectors(before), TensorVectors(self.model))
            if not self.session.gate.carries_over:
                self.differences.clear()
        for client, model in still_out.items():
            arrival = self.clock + self._round_seconds[client]
            self.pending[client] = Pending(self.round_number, arrival, model - before)
        return len(row_of)

    def collect(
        self, name: str, clients: Sequence[ClientId], arrived: torch.Tensor | None = None
    ) -> Readings:
        """Answer a signal for some clients, as a session asks for it."""
        options = self.session.policy.signal_options.get(name, {})
        refresh = int(options.get("refresh", 0))
        due = self.round_number - self.round_number % refresh if refresh else 0
        if due > self.embedder_round:  # all sketches since the last refresh are comparable
            self.embedder, self.embedder_round = self.model, due
        model = self.initial if SIGNALS[name].model == "initial" else self.model
        asked = SimulatedClients(clients, self, model, arrived)
        return SIGNALS[name].readings(asked, options)

    def _replies_of(self, trained: torch.Tensor) -> dict[str, Readings]:
        """Return what comes with the updates, and charge gradients that are sent beside them."""
        options = self.session.policy.signal_options
        for name, stated in options.items():
            if stated.get("insight_step"):
                sent = dict.fromkeys(self.finished, self.model_bytes)
                self.session.charge(name, "up", sent)
        names = sorted(self.session.policy.needs.reply)
        replies = {name: self.collect(name, self.finished, trained) for name in names}
        if any(not stated.get("fresh", True) for stated in options.values()):  # asks for these
            self.held = dict(zip(self.finished, trained.clone(), strict=True))
        return replies

    def finish(self) -> None:
        """End the session's round and advance the clock."""
        self._outcome = self.session.finish(self._replies, self.finished, self.arrivals.cut)
        self._measured.update((c, self._round_seconds[c]) for c in self.finished)
        self.clock += self.arrivals.seconds

    def record(
        self, accuracy: float | None, loss: float | None, train_accuracy: float | None
    ) -> RoundRecord:
        """Return what became of the round that was finished last."""
        return RoundRecord(
            seed=self.seed,
            round=self.round_number + 1,
            accuracy=accuracy,
            loss=loss,
            selected=self.session.selection.clients,
            finished=self.finished,
            bytes_up=self.session.ledger.total("up", self.round_number),
            bytes_down=self.session.ledger.total("down", self.round_number),
            seconds=self.arrivals.seconds,
            elapsed=self.clock,
            skipped=self.session.skipped,
            withheld=self._outcome.withheld,
            cut=self.arrivals.cut,
            late=self.late,
            slowest=self.arrivals.slowest,
            working=self.arrivals.working,
            waiting=self.arrivals.waiting,
            train_accuracy=train_accuracy,
        )

    def _admitted(
        self, clients: tuple[ClientId, ...], models: torch.Tensor
    ) -> tuple[ClientId, ...]:
        """Ask the gate who uploads, and let the others keep what they learned."""
        gate = self.session.gate
        if gate is None:
            return clients
        start = TensorVectors(self.model)
        announced = self.session.announce(start)
        answers = gate.probe(announced, start, TensorVectors(models))
        admitted = self.session.admit(dict(zip(clients, answers, strict=True)))
        for client, model in zip(clients, models, strict=True):
            if client in admitted or gate.on_skip == "reset":
                self.differences.pop(client, None)
            else:
                self.differences[client] = model - self.model
        return admitted

    def _next_model(self, updates: torch.Tensor) -> torch.Tensor:
        """Return the global model after the round's updates and the late ones that arrive in it."""
        sizes = [len(self.federation.parts[c]) for c in (*self.finished, *self.late)]
        weights = self.session.selection.weights_of(self.finished)
        if self.late:
            arrived, fresh = [self.pending.pop(c) for c in self.late], len(self.finished)
            self.session.charge("model", "up", dict.fromkeys(self.late, self.model_bytes))
            rows = [self.model + update.step for update in arrived]
            updates = torch.cat([updates, torch.stack(rows)])
            if weights:
                shares = [*weights, *[sum(weights) / fresh] * len(arrived)]
            else:
                each = sizes if self.aggregation.weighted else [1] * len(sizes)
                shares = [size / sum(each[:fresh] or each) for size in each]
            ages = [self.round_number - update.round for update in arrived]
            gaps = updates[fresh:] - updates[:fresh].mean(0)
            weights = self.pace.stale_weights(
                shares[:fresh],
                list(zip(shares[fresh:], ages, strict=True)),
                gaps.square().sum(1).tolist() if fresh else (),
            )
        return self.aggregation.step(self.model, updates, sizes, weights)

    def seconds_of(self, client: ClientId) -> float:
        """Return how long a round takes a client."""
        local, n = self.trainer.training, len(self.federation.parts[client])
        samples = n * local.epochs if local.steps is None else local.steps * local.batch_size
        return self.durations.seconds(client, samples, 2 * self.model_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on, the data aside."""
        return {
            "seed": self.seed,
            "clock": self.clock,
            "model": self.model.cpu().numpy(),
            "session": self.session.state_dict(),
            "initial": self.initial.cpu().numpy(),
            "embedder": self.embedder.cpu().numpy() if self.embedder_round else np.empty(0),
            "embedder_round": self.embedder_round,
            "held": {c: model.cpu().numpy() for c, model in self.held.items()},
            "aggregation": self.aggregation.state_dict(),
            "differences": {c: d.cpu().numpy() for c, d in self.differences.items()},
            "pending": {c: [*p[:2], p.step.cpu().numpy()] for c, p in self.pending.items()},
            "measured": dict(self._measured),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""

        def tensor(array: NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(array.copy()).to(self.model.device)

        self.clock = float(state["clock"])
        self.model = tensor(state["model"])
        self.session.load_state_dict(state["session"])
        self.initial = self.embedder = tensor(state["initial"])
        if state["embedder_round"]:
            self.embedder = tensor(state["embedder"])
        self.embedder_round = int(state["embedder_round"])
        self.held = {c: tensor(model) for c, model in state["held"].items()}
        self.aggregation.load_state_dict(state["aggregation"])
        self.differences = {c: tensor(d) for c, d in state["differences"].items()}
        pending = state["pending"].items()
        self.pending = {c: Pending(n, arrival, tensor(step)) for c, (n, arrival, step) in pending}
        self._measured = dict(state["measured"])


def _rows(models: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return some rows; the usual case, all of them in order, copies nothing."""
    return models if rows == list(range(len(models))) else models[rows]


def split_off(
    federation: Federation, share: float, seed: int
) -> tuple[Federation, Mapping[ClientId, IndexArray]]:
    """Hold out a share of each client's examples, one at least, on which it measures its loss."""
    if not share:
        return federation, federation.parts
    kept, held_out = {}, {}
    for client, part in federation.parts.items():
        order = stream(seed, "holdout", client).permutation(part)
        count = max(1, round(share * len(part)))
        held_out[client] = np.sort(order[:count])
        kept[client] = np.sort(order[count:]) if count < len(part) else part
    return replace(federation, parts=kept), held_out
