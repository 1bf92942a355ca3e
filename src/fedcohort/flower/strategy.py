"""`CohortStrategy`: a policy of ours picks the cohort, any Flower strategy does the rest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import inner as inners
from fedcohort.flower import progress
from fedcohort.flower.aggregation import reply_signals, weigh
from fedcohort.flower.arrays import flatten, payload
from fedcohort.flower.cohort import Cohort, Template
from fedcohort.flower.delivery import Delivery, Model
from fedcohort.flower.exchange import LOG, TimedGrid
from fedcohort.flower.identity import Directory, Identity
from fedcohort.flower.messages import RECORD, Request
from fedcohort.flower.queries import Queries
from fedcohort.flower.replies import (
    Update,
    by_client,
    odd_ones,
    received,
    sound_metrics,
    update_of,
)
from fedcohort.flower.waiting import PatientGrid
from fedcohort.gates import Gate, NoGate
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId
from fedcohort.session import Session
from fedcohort.signals.catalogue import SIGNALS

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class RoundReport(NamedTuple):
    """What happened in a round; numbers start at 0."""

    round: int
    selected: tuple[ClientId, ...]
    finished: tuple[ClientId, ...]
    withheld: tuple[ClientId, ...]
    bytes_up: int
    bytes_down: int


class CohortStrategy(Strategy):
    """Wraps a message-API strategy: the cohort from a policy, everything else from the inner one.

    It must be the outermost strategy. Before each round it finds out which clients are online,
    asks for exactly the signals that the policy declared, and sends the inner strategy's training
    messages to the cohort. Clients that leave, do not answer, answer with errors or with nonsense
    cost at most `timeout` and are counted; their replies never reach the inner strategy.

    Parameters
    ----------
    inner : Strategy
        FedAvg, FedProx, FedAdam, FedAvgM, Krum, one of the DP wrappers, or your own, as long as
        its models keep their shapes.
    policy : Policy
    cohort_size : int, optional
        Clients a round; by default as many as the inner strategy would sample.
    gate : Gate, optional
        Decides after local training who uploads: training then takes two messages,
        ``train.probe``, and ``train.upload`` to those that are needed.
    seed : int, default=0
        Of the selection and of the clients' batches.
    checkpoint : path, optional
        A file written after every round; `start` continues from it if it exists.
    timeout : float, default=600
        Seconds to wait for replies to a query and to a training message.
    wait : float, default=600
        Seconds to wait for clients while fewer are online than the inner strategy wants.
    identity : {"auto", "client", "name", "public-key"}
        Where the stable ids of clients come from; see `Directory`.
    center : array, optional
        Public centre of the data, for policies whose sketches are centred.
    max_bytes : int, default=64 MiB
        Largest reading accepted where its size does not follow from the policy's options.

    Attributes
    ----------
    session : Session
        With the policy, its `signals` (and how many readings were dropped) and the `ledger`.
    refused : Counter
        Training messages that brought no update, by reason: "error", "no reply", "invalid".
    history : list of RoundReport

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcohort.policies import PowerOfChoice
    >>> strategy = CohortStrategy(FedAvg(fraction_train=0.1), PowerOfChoice(d=20))
    >>> strategy.session.policy.name
    'power-of-choice'
    """

    def __init__(
        self,
        inner: Strategy,
        policy: Policy,
        *,
        cohort_size: int | None = None,
        gate: Gate | None = None,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        wait: float = 600.0,
        identity: Identity = "auto",
        center: ArrayLike | None = None,
        max_bytes: int = 1 << 26,
    ) -> None:
        if timeout <= 0 or wait < 0 or max_bytes < 1:
            raise ConfigError(
                f"CohortStrategy: timeout={timeout} and max_bytes={max_bytes} must be above 0, "
                f"wait={wait} not negative"
            )
        self.inner, self.cohort_size, self.checkpoint = inner, cohort_size, checkpoint
        self.gate = None if isinstance(gate, NoGate) else gate
        self.timeout, self.wait, self.max_bytes = timeout, wait, max_bytes
        self.center = None if center is None else np.asarray(center, np.float64).ravel()
        inners.check(inner, gate=self.gate is not None, checkpoint=checkpoint is not None)
        _check(policy, self.center is not None)
        size = 1 if cohort_size is None else cohort_size
        self.session = Session(policy, cohort_size=size, seed=seed, gate=self.gate)
        self.directory = Directory(identity, timeout)
        self.refused: Counter[str] = Counter()
        self.history: list[RoundReport] = []
        self.made_with = inners.settings(inner)
        self.initial: Model | None = None
        self.continuing: tuple[ClientId, ...] = ()
        self.rounds_before = 0
        self._delivery = Delivery(self.session)
        self._cohort: Cohort | None = None
        self._grid: TimedGrid | None = None

    def summary(self) -> None:
        """Log the policy, then the inner strategy's settings."""
        policy, gate = self.session.policy, self.gate
        LOG.info("\t├──> Cohort: policy %r, seed %d", policy, self.session.seed)
        LOG.info("\t│\t├── Signals: %s", policy.needs)
        LOG.info("\t│\t└── Gate: %s", None if gate is None else gate.name)
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run rounds as Flower does, from the checkpoint on where there is one.

        The parameters are Flower's; `timeout` is by default that of the strategy.
        """
        arrays = progress.resume(self, initial_arrays)
        limit = self.timeout if timeout is None else timeout
        self._grid = TimedGrid(grid, limit)
        before = self.rounds_before
        result = super().start(
            self._grid,
            arrays,
            max(num_rounds - before, 0),
            limit,
            train_config,
            evaluate_config,
            None if evaluate_fn is None else lambda number, a: evaluate_fn(number + before, a),
        )
        return progress.renumbered(result, before, arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort, and with a gate train it, before the messages of this round go out."""
        self._cohort = None
        patient = PatientGrid(grid, self.directory, self.wait, self.timeout)
        number = server_round + self.rounds_before
        messages = list(self.inner.configure_train(number, arrays, config, patient))
        if not messages:
            return []
        if self.cohort_size is None:
            self.session.cohort_size = len(messages)
        template = Template(messages)
        self._cohort = cohort = self._begun(template, Model(template.arrays or arrays), grid)
        if self.gate is None:
            return cohort.train()
        announced = self.session.announce(flatten(cohort.model.arrays))
        answers = cohort.probe(self.gate, announced, grid)
        return cohort.upload(self.session.admit(answers), answers)

    def _begun(self, template: Template, current: Model, grid: Grid) -> Cohort:
        """Ask for signals and let the policy pick."""
        session, nodes = self.session, dict(self.directory.nodes)
        policy, options = session.policy, session.policy.signal_options
        session.model_bytes = payload(current.arrays)
        self.initial = self.initial or current
        on = [c for c in self.continuing if c in nodes] if session.skipped else []
        self._delivery.begin(on)
        last = max((report.round for report in self.history if report.finished), default=-1)
        remember = not options.get("model_sketch", {}).get("fresh", True)
        request = Request(
            session.round_number,
            session.seed,
            arrays=template.name,
            held_round=last,
            remember=remember,
        )
        queries = Queries(
            grid,
            nodes,
            self._delivery,
            request,
            current=current,
            initial=self.initial,
            options=options,
            timeout=self.timeout,
            limit=self.max_bytes,
            center=self.center,
        )
        selection = session.begin(nodes, queries)
        self.continuing = selection.clients
        names = tuple(sorted(n for n in policy.needs.reply if SIGNALS[n].work != "server"))
        known = {name: options.get(name, {}) for name in names}
        request = replace(request, version=current.version, signals=names, options=known)
        return Cohort(selection, template, request, current, nodes, self._delivery, self.timeout)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average what is sound, and the policy learn from the round."""
        number, cohort = server_round + self.rounds_before, self._cohort
        if cohort is None:
            return self.inner.aggregate_train(number, replies)
        updates = self._sound(by_client(replies, cohort.sent), cohort)
        policy, model = self.session.policy, cohort.model
        seconds = cohort.seconds({} if self._grid is None else self._grid.seconds)
        signals = reply_signals(policy, updates, model, seconds, self.max_bytes)
        self._report(signals, updates)
        arrays, metrics = None, None
        if updates:
            key = inners.weight_key(self.inner)
            weigh(updates, cohort.selection, model, key)
            for update in updates.values():
                update.message.content.pop(RECORD, None)
            sound = [update.message for update in updates.values()]
            arrays, metrics = self.inner.aggregate_train(number, sound)
        if arrays is not None and self.gate is not None:
            self.gate.aggregated(flatten(model.arrays), flatten(arrays))
        progress.save(self, model.arrays if arrays is None else arrays)
        return arrays, metrics

    def _sound(self, replies: dict[ClientId, Message], cohort: Cohort) -> dict[ClientId, Update]:
        """Check replies; count and leave out what is no update."""
        self.refused["no reply"] += len(cohort.sent) - len(replies)
        key, updates = inners.weight_key(self.inner), {}
        for client, message in replies.items():
            if message.has_error():
                self._refuse(client, "error", message.error.reason)
                continue
            try:
                updates[client] = update_of(message, cohort.model.arrays, key)
            except DataError as error:
                self._refuse(client, "invalid", error)
                size = {client: received(message)}
                self.session.ledger.charge_each(self.session.round_number, "model", "up", size)
        for client in odd_ones({c: u.message.content for c, u in updates.items()}):
            self._refuse(client, "invalid", "metrics named otherwise than most clients'")
            del updates[client]
        return updates

    def _refuse(self, client: ClientId, reason: str, why: object) -> None:
        self.refused[reason] += 1
        LOG.warning("no update from %s (%s): %s", client, reason, why)

    def _report(self, signals: dict[str, Any], updates: Iterable[ClientId]) -> None:
        number, ledger = self.session.round_number, self.session.ledger
        outcome = self.session.finish(signals, updates)
        report = RoundReport(
            number,
            outcome.selected,
            outcome.finished,
            outcome.withheld,
            ledger.total("up", number),
            ledger.total("down", number),
        )
        self.history.append(report)
        LOG.info("cohort of round %d: %s", number + 1, ", ".join(outcome.selected))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy."""
        patient = PatientGrid(grid, self.directory, self.wait, self.timeout)
        number = server_round + self.rounds_before
        return self.inner.configure_evaluate(number, arrays, config, patient)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Leave evaluation to the inner strategy, without replies that would break it."""
        number = server_round + self.rounds_before
        return self.inner.aggregate_evaluate(number, sound_metrics(replies))


def _check(policy: Policy, has_center: bool) -> None:
    options = policy.signal_options
    if options.get("race_sketch", {}).get("center") and not has_center:
        raise ConfigError(
            "CohortStrategy: the policy's sketches are centred: pass center=, the mean of a "
            "public data set, or turn its centring off"
        )
    if options.get("update_distance", {}).get("insight_step"):
        raise ConfigError(
            "CohortStrategy: insight_step=True needs full gradients, which updates do not "
            "carry; use a policy with insight_step=False"
        )
