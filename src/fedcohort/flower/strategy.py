"""`CohortStrategy`: one of our policies picks the cohort, any Flower strategy does the rest."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.flower import checkpoint as checkpoints
from fedcohort.flower import history as histories
from fedcohort.flower import inner as inners
from fedcohort.flower.arrays import dtypes_of, flatten, in_dtypes, outputs_of, payload
from fedcohort.flower.cohort import Cohort, Queries, Template, first_request, training_request
from fedcohort.flower.grid import LOG, Delivery, Model, TimedGrid
from fedcohort.flower.history import RoundReport, RunFolder
from fedcohort.flower.identity import Directory, FixedGrid, IdentifiedGrid, Identity
from fedcohort.flower.messages import RECORD
from fedcohort.flower.replies import (
    Replies,
    Update,
    apply_weights,
    reply_signals,
    usable_evaluations,
)
from fedcohort.gates import GATES, Gate
from fedcohort.policies import POLICIES
from fedcohort.policies.base import Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId, Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors

if TYPE_CHECKING:
    from fedcohort.simulate.history import History

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class CohortStrategy(Strategy):
    """Wraps a message-API strategy: the cohort from a policy, everything else from the inner one.

    It must be the outermost strategy. Before each round it finds out which clients are online,
    asks for exactly the signals that the policy declared, and sends the inner strategy's training
    messages to the cohort. Clients that leave, do not answer or answer with errors or invalid
    updates cost at most `timeout` and are counted; the inner strategy never sees their replies.
    Attributes and methods that it does not define are the inner strategy's.

    Parameters
    ----------
    inner : Strategy
        Any of Flower's or your own. Where its updates are not vectors (serialized trees, several
        records, a part of the layers), policies and gates that compare updates are refused.
    policy : Policy or str
        A policy, or its name with options as in a run config: ``"sketch-match:epsilon=1"``.
    cohort_size : int, optional
        Clients per round; by default as many as the inner strategy would sample.
    gate : Gate or str, optional
        Decides after local training who uploads: training then takes two messages,
        ``train.probe``, and ``train.upload`` to those that are needed.
    seed : int, default=0
        Seed of the selection and of the clients' batches.
    checkpoint : path, optional
        A file written after every round; `start` continues from it if it exists.
    out : path, optional
        A folder for the rounds as they happen and their summary, the same files as those of
        ``fedcohort run``: ``fedcohort report FOLDER`` makes a page of them.
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
    on_missing : {"stop", "continue"}
        What to do where nobody answers a signal that the policy needs: stop with an error that
        says what clients raised, or go on with cohorts that are then uniform.

    Attributes
    ----------
    session : Session
        With the policy, its `signals` (and how many readings were dropped) and the `ledger`.
    refused : Counter
        Messages that brought no update, by reason: "no reply", "error", "invalid", "gate".
    unanswered : Counter
        Clients that did not answer a signal, by signal.
    history : list of RoundReport
        One per round; `to_history` gives them the form of a simulation's.

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
        policy: Policy | str,
        *,
        cohort_size: int | None = None,
        gate: Gate | str | None = None,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        out: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        wait: float = 600.0,
        identity: Identity = "auto",
        center: ArrayLike | None = None,
        max_bytes: int = 1 << 26,
        on_missing: Literal["stop", "continue"] = "stop",
    ) -> None:
        if on_missing not in ("stop", "continue"):
            raise ConfigError(f"CohortStrategy: on_missing={on_missing!r} is not stop or continue")
        if timeout <= 0 or wait < 0 or max_bytes < 1:
            raise ConfigError(
                f"CohortStrategy: timeout={timeout} and max_bytes={max_bytes} must be above 0, "
                f"wait={wait} not negative"
            )
        self.inner, self.cohort_size, self.checkpoint = inner, cohort_size, checkpoint
        chosen: Policy = make("policy", policy, POLICIES)
        gate = None if gate == "none" else make("gate", gate, GATES)
        self.gate, self.on_missing = gate, on_missing
        self.timeout, self.wait, self.max_bytes = timeout, wait, max_bytes
        self.center = None if center is None else np.asarray(center, np.float64).ravel()
        inners.check(inner, gate=self.gate is not None, checkpoint=checkpoint is not None)
        inners.check_cohort_size(inner, cohort_size)
        inners.check_policy(chosen, self.center is not None)
        size = 1 if cohort_size is None else cohort_size
        self.session = Session(
            chosen, cohort_size=size, seed=seed, gate=self.gate, averaging="size"
        )
        self.directory = Directory(identity, min(timeout, 120.0))
        check = partial(inners.check_trees, inner)
        self.replies = Replies(self.session, inners.weight_key(inner), check)
        self.refused = self.replies.refused
        self.history: list[RoundReport] = []
        self.out = None if out is None else RunFolder(out)
        self.made_with = inners.settings(inner)
        self.dtypes: dict[str, str] = {}
        self.initial: Model | None = None
        self.continuing: tuple[ClientId, ...] = ()
        self.rounds_before = 0
        self.run_token = ""
        self.unanswered: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._started = time.monotonic()
        self._delivery = Delivery(self.session)
        self._cohort: Cohort | None = None
        self._grid: TimedGrid | None = None
        self._request = first_request(self.session)
        self._made = True

    def __getattr__(self, name: str) -> Any:
        """Return what the inner strategy defines and this class does not."""
        if name.startswith("__") or "inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this class, or else of the inner strategy."""
        own = "_made" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        object.__setattr__(self if own else self.inner, name, value)

    def summary(self) -> None:
        """Log the policy, then the inner strategy's settings."""
        policy, gate = self.session.policy, self.gate
        LOG.info("\t├──> Cohort: policy %r, seed %d", policy, self.session.seed)
        LOG.info("\t│\t├── Signals: %s", policy.needs)
        LOG.info("\t│\t└── Gate: %s", None if gate is None else gate.name)
        self._call("summary")

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
        """Run rounds as Flower does, starting from the checkpoint if it exists.

        The parameters are Flower's; `timeout` is by default that of the strategy. An inner strategy
        with a `start` of its own runs that one.
        """
        self.dtypes, self.run_token = dtypes_of(initial_arrays), secrets.token_hex(8)
        arrays = checkpoints.resume(self, initial_arrays)
        limit = self.timeout if timeout is None else timeout
        self._grid = TimedGrid(grid, limit)
        before = self.rounds_before
        if self.out is not None:
            self.out.begin(self.session, num_rounds, self.history)

        def evaluate(number: int, model: ArrayRecord) -> MetricRecord | None:
            metrics = None if evaluate_fn is None else evaluate_fn(number + before, model)
            self._evaluated(number + before, metrics)
            self._record()
            return metrics

        with inners.running(self.inner, self) as start:
            result = start(
                grid=self._grid,
                initial_arrays=arrays,
                num_rounds=max(num_rounds - before, 0),
                timeout=limit,
                train_config=train_config,
                evaluate_config=evaluate_config,
                evaluate_fn=None if evaluate_fn is None else evaluate,
            )
        if self.out is not None:
            self._record()
            self.out.end(self.session, self.history, self.directory.nodes)
        return checkpoints.renumbered(result, before, arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort, and with a gate train it, before the messages of this round go out."""
        self._record()
        self._cohort, self._started = None, time.monotonic()
        self.replies.failed.clear()
        self.dtypes = self.dtypes or dtypes_of(arrays)
        number, unchanged = server_round + self.rounds_before, ConfigRecord(dict(config))
        entries = {"server-round": number, **config}
        known = IdentifiedGrid(grid, self.directory, self.wait, self.timeout, entries)
        messages = list(self._call("configure_train", number, arrays, config, known))
        if not messages:
            return []
        if self.cohort_size is None:
            self.session.cohort_size = len(messages)
        template = Template(messages)
        sent = template.arrays or arrays
        self.replies.kind = inners.reply_kind(self.inner, sent, self.session.policy, self.gate)
        current = Model(in_dtypes(sent, self.dtypes))
        selection = self._selected(template, current, grid)
        nodes = {c: self.directory.nodes[c] for c in selection.clients}
        if not template.covers(nodes.values()):
            fixed = FixedGrid(grid, nodes.values(), self.timeout)
            with inners.sampling_everybody(self.inner, len(nodes)):
                again = self._call("configure_train", number, arrays, unchanged, fixed)
                template = Template(list(again))
            template.check_covers(nodes)
        self._cohort = cohort = self._cohort_of(selection, template, current)
        if self.gate is None:
            return cohort.train()
        announced = self.session.announce(Vectors(flatten(current.arrays)))
        answers = cohort.probe(self.gate, announced, grid)
        self.replies.count("gate", cohort.problems)
        if not answers and not any(r.finished or r.withheld for r in self.history):
            remedy = "attach(app, data=..., model=...) on the clients, after @app.train()"
            self._missing(f"the gate {self.gate.name!r}", cohort.problems, remedy)
        return cohort.upload(self.session.admit(answers))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the inner strategy's class, also while `start` is hooked."""
        return getattr(type(self.inner), method)(self.inner, *arguments)

    def _selected(self, template: Template, current: Model, grid: Grid) -> Selection:
        """Ask for signals and let the policy pick."""
        session, nodes = self.session, dict(self.directory.nodes)
        session.model_bytes = payload(current.arrays)
        self.initial = self.initial or current
        on = [c for c in self.continuing if c in nodes] if session.skipped else []
        self._delivery.begin(on)
        last = max((report.round for report in self.history if report.finished), default=-1)
        request = replace(
            first_request(session),
            arrays=template.name,
            held_round=last,
            run=self.run_token,
            classes=outputs_of(current.arrays),
        )
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
            config=template.entries,
        )
        selection = session.begin(nodes, queries)
        for name, problems in queries.problems.items():
            known = session.signals.known(name, list(nodes))
            self._note_unanswered(name, problems, nobody=not known)
        self.continuing, self._request = selection.clients, request
        return selection

    def _note_unanswered(self, name: str, problems: Mapping[ClientId, str], nobody: bool) -> None:
        """Count and report clients that did not answer a signal; stop if nobody ever did."""
        self.unanswered[name] += len(problems)
        if nobody:
            self._missing(f"the signal {name!r}", problems, SIGNALS[name].remedy)
        elif problems and name not in self._reported:
            self._reported.add(name)
            client, why = next(iter(problems.items()))
            LOG.warning(
                "%d clients did not answer %s; %s: %s", len(problems), name, client, why.strip()
            )

    def _missing(self, what: str, problems: Mapping[ClientId, str], remedy: str) -> None:
        """Stop the run, or go on if the user says so, where a policy or gate gets no answer."""
        client, why = next(iter(problems.items()), ("the clients", "no valid reading"))
        text = (
            f"nobody answered {what}, which {type(self.session.policy).__name__} or its gate "
            f"needs. {client}: {why.strip()}. Remedy: {remedy}"
        )
        if self.on_missing == "stop":
            raise ConfigError(
                f"round {self.session.round_number + 1}: {text}. With on_missing='continue' the "
                "run goes on, and cohorts are then uniform"
            )
        if what not in self._reported:
            self._reported.add(what)
            LOG.warning("%s", text)

    def _cohort_of(self, selection: Selection, template: Template, current: Model) -> Cohort:
        request = training_request(self._request, self.session.policy)
        request = replace(request, version=current.version)
        nodes = dict(self.directory.nodes)
        return Cohort(selection, template, request, current, nodes, self._delivery, self.timeout)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average the accepted updates, and the policy learn from them."""
        number, cohort = server_round + self.rounds_before, self._cohort
        if cohort is None:
            out: tuple[ArrayRecord | None, MetricRecord | None]
            out = self._call("aggregate_train", number, replies)
            return out
        updates = self.replies.accepted(replies, cohort.sent, cohort.model.arrays)
        policy, model = self.session.policy, cohort.model
        seconds = cohort.seconds({} if self._grid is None else self._grid.seconds)
        signals = reply_signals(policy, updates, model, seconds, self.max_bytes)
        self._charge_other_sizes(updates)
        report = histories.finish(
            self.session,
            signals,
            updates,
            cohort.selection.scores,
            time.monotonic() - self._started,
            self.replies.failed,
        )
        self.history.append(report)
        self._check_reply_signals(signals, updates)
        arrays, metrics = None, None
        if updates:
            apply_weights(updates, cohort.selection, model, self.replies.weight_key)
            for update in updates.values():
                update.message.content.pop(RECORD, None)
            sound = [update.message for update in updates.values()]
            arrays, metrics = self._call("aggregate_train", number, sound)
        if arrays is not None and self.gate is not None:
            after = in_dtypes(arrays, self.dtypes)
            self.gate.aggregated(Vectors(flatten(model.arrays)), Vectors(flatten(after)))
        checkpoints.save(self, model.arrays if arrays is None else arrays)
        return arrays, metrics

    def _check_reply_signals(
        self, signals: Mapping[str, Mapping[ClientId, Any]], updates: Mapping[ClientId, Update]
    ) -> None:
        """Report the clients whose updates came without the signals that the policy needs."""
        for name in sorted(self.session.policy.needs.reply):
            silent = [c for c in updates if c not in signals.get(name, {})]
            problems = {c: _why_missing(updates[c], name) for c in silent}
            if updates and SIGNALS[name].work != "server":
                known = self.session.signals.known(name, list(self.directory.nodes))
                self._note_unanswered(name, problems, nobody=not known)

    def to_history(self) -> History:
        """Return the rounds in the form of a simulation's, for tables and frames."""
        return histories.history_of(self.session.seed, self.history)

    def _evaluated(self, number: int, metrics: Mapping[str, Any] | None) -> None:
        """Note what an evaluation after round `number` (from 1) measured."""
        if self.history and self.history[-1].round == number - 1:
            self.history[-1] = histories.measured(self.history[-1], metrics)

    def _record(self) -> None:
        if self.out is not None:
            self.out.append(self.session.seed, self.history)

    def _charge_other_sizes(self, updates: dict[ClientId, Update]) -> None:
        """Charge the difference where an update does not have the model's size."""
        expected, session = self.session.model_bytes, self.session
        sizes = {
            c: sum(map(payload, u.message.content.array_records.values())) - expected
            for c, u in updates.items()
        }
        other = {client: size for client, size in sizes.items() if size}
        session.ledger.charge_each(session.round_number, "model", "up", other)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy; clients get the dtypes that they started with."""
        number = server_round + self.rounds_before
        entries = {"server-round": number, **config}
        known = IdentifiedGrid(grid, self.directory, self.wait, self.timeout, entries)
        sent = in_dtypes(arrays, self.dtypes)
        messages: Iterable[Message]
        messages = self._call("configure_evaluate", number, sent, config, known)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Leave evaluation to the inner strategy, without replies that would break it."""
        usable = usable_evaluations(replies)
        number = server_round + self.rounds_before
        metrics: MetricRecord | None = None
        if usable:
            metrics = self._call("aggregate_evaluate", number, usable)
            self._evaluated(number, metrics)
        return metrics


def _why_missing(update: Update, name: str) -> str:
    record = update.message.content.config_records.get(RECORD)
    problem = None if record is None else record.get(f"{name}.error")
    return problem[:500] if isinstance(problem, str) else "its update came without it"
