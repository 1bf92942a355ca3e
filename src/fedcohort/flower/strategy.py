"""The grid that an inner strategy sees: clients that are known, and a limit to waiting.

`CohortStrategy`: a policy of ours picks the cohort, any Flower strategy does the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError, NoClients
from fedcohort.flower import checkpoint as checkpoints
from fedcohort.flower import inner as inners
from fedcohort.flower.arrays import flatten, payload
from fedcohort.flower.checkpoint import RoundReport
from fedcohort.flower.cohort import Cohort, Queries, Template, first_request, training_request
from fedcohort.flower.grid import LOG, Delivery, Model, TimedGrid
from fedcohort.flower.identity import Directory, Identity
from fedcohort.flower.messages import RECORD
from fedcohort.flower.replies import Replies, reply_signals, sound_metrics, weigh
from fedcohort.gates import Gate, NoGate
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId
from fedcohort.session import Session


class PatientGrid(TimedGrid):
    """Shows the nodes that said who they are; a strategy may wait for more, but not for ever.

    Flower's strategies ask for the nodes again and again until there are enough. The first
    question starts the clock.
    """

    def __init__(self, grid: Grid, directory: Directory, wait: float, timeout: float) -> None:
        super().__init__(grid, timeout)
        self.directory, self.wait = directory, wait
        self._asked = 0
        self._start = time.monotonic()

    def get_node_ids(self) -> Iterable[int]:
        """Return the known nodes; NoClients once the strategy has waited too long for more."""
        nodes = sorted(self.directory.refresh(self.grid).values())
        self._asked += 1
        waited = time.monotonic() - self._start
        if self._asked > 3 and waited > self.wait:
            raise NoClients(
                f"too few clients: {len(nodes)} online after {waited:.0f} s, and the strategy "
                "still waits for more; start more SuperNodes, lower its min_available_nodes and "
                "min_train_nodes, or raise CohortStrategy(wait=...)"
            )
        return nodes


Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


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
        Public center of the data, for policies whose sketches are centered.
    max_bytes : int, default=64 MiB
        Largest reading accepted where its size does not follow from the policy's options.

    Attributes
    ----------
    session : Session
        With the policy, its `signals` (and how many readings were dropped) and the `ledger`.
    refused : Counter
        Messages that brought no update, by reason: "no reply", "error", "invalid", "gate".
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
        inners.check_policy(policy, self.center is not None)
        size = 1 if cohort_size is None else cohort_size
        self.session = Session(policy, cohort_size=size, seed=seed, gate=self.gate)
        self.directory = Directory(identity, min(timeout, 120.0))
        self.replies = Replies(self.session, inners.weight_key(inner))
        self.refused = self.replies.refused
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
        arrays = checkpoints.resume(self, initial_arrays)
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
        return checkpoints.renumbered(result, before, arrays)

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
        self.replies.miss("gate", len(cohort.selection.clients) - len(answers))
        return cohort.upload(self.session.admit(answers))

    def _begun(self, template: Template, current: Model, grid: Grid) -> Cohort:
        """Ask for signals and let the policy pick."""
        session, nodes = self.session, dict(self.directory.nodes)
        session.model_bytes = payload(current.arrays)
        self.initial = self.initial or current
        on = [c for c in self.continuing if c in nodes] if session.skipped else []
        self._delivery.begin(on)
        last = max((report.round for report in self.history if report.finished), default=-1)
        request = replace(first_request(session), arrays=template.name, held_round=last)
        queries = Queries(
            grid,
            nodes,
            self._delivery,
            request,
            current=current,
            initial=self.initial,
            options=session.policy.signal_options,
            timeout=self.timeout,
            limit=self.max_bytes,
            center=self.center,
        )
        selection = session.begin(nodes, queries)
        self.continuing = selection.clients
        request = replace(training_request(request, session.policy), version=current.version)
        return Cohort(selection, template, request, current, nodes, self._delivery, self.timeout)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average what is sound, and the policy learn from the round."""
        number, cohort = server_round + self.rounds_before, self._cohort
        if cohort is None:
            return self.inner.aggregate_train(number, replies)
        updates = self.replies.sound(replies, cohort.sent, cohort.model.arrays)
        policy, model = self.session.policy, cohort.model
        seconds = cohort.seconds({} if self._grid is None else self._grid.seconds)
        signals = reply_signals(policy, updates, model, seconds, self.max_bytes)
        self.history.append(checkpoints.finish(self.session, signals, updates))
        arrays, metrics = None, None
        if updates:
            weigh(updates, cohort.selection, model, self.replies.weight_key)
            for update in updates.values():
                update.message.content.pop(RECORD, None)
            sound = [update.message for update in updates.values()]
            arrays, metrics = self.inner.aggregate_train(number, sound)
        if arrays is not None and self.gate is not None:
            self.gate.aggregated(flatten(model.arrays), flatten(arrays))
        checkpoints.save(self, model.arrays if arrays is None else arrays)
        return arrays, metrics

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
        sound = sound_metrics(replies)
        number = server_round + self.rounds_before
        return self.inner.aggregate_evaluate(number, sound) if sound else None
