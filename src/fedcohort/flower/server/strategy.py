"""`CohortStrategy`: one of our policies picks the cohort, any Flower strategy does the rest."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.flower import wire
from fedcohort.flower.server import inner as inners
from fedcohort.flower.server import record
from fedcohort.flower.server.asking import CohortGrid, GridCollector, Model, Reply
from fedcohort.flower.server.identity import Directory, Identity
from fedcohort.flower.server.inner import Cohort, Template
from fedcohort.flower.server.record import KeptSketches, RoundReport, RunFolder
from fedcohort.flower.server.replies import (
    Late,
    Replies,
    Update,
    by_client,
    reply_signals,
    usable_evaluations,
)
from fedcohort.flower.wire import LOG, RECORD
from fedcohort.gates import Gate
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId, History, Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors
from fedcohort.simulate.clock import Arrivals, Pace

Known = Mapping[str, Any]


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
        Any of Flower's or your own; policies that compare updates want updates that are vectors.
    policy, gate : Policy and Gate, or str
        Whom to train with and who uploads then: ``"sketch-match:epsilon=1"``.
    cohort_size : int, optional
        By default what the inner strategy samples, or two fifths where it samples everybody.
    seed : int, default=0
        Of the selection and of the clients' batches.
    eligible : str, collection of str or callable, optional
        Who takes part: a pattern of ids such as ``"ward-*"``, a tag of the node config such as
        ``"tag:icu"`` (the client's own word), ids, or ``eligible(client, signals)`` with its
        readings by signal. Others are asked who they are, nothing else.
    pace : Pace, optional
        Ask more clients than needed and go on without the slowest, or after a deadline.
    sketches : path or KeptSketches, optional
        Keep profiles across runs, so that only newcomers are asked for them.
    checkpoint, out : path, optional
        A file that `start` continues from, and a folder for the rounds, as of ``fedcohort run``.
    on_round : callable, optional
        ``on_round(report)`` is called with the `RoundReport` of each round after its evaluation.
    timeout : float, default=600
        Seconds to wait for replies to a query and to a training message.
    identity : {"auto", "client", "name", "public-key"}
        Where the stable ids of clients come from; see `Directory`.
    center : array, optional
        Public center of the data, for policies whose sketches can be centered.

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
        eligible: str | Collection[ClientId] | Callable[[ClientId, Known], bool] | None = None,
        pace: Pace | None = None,
        sketches: str | os.PathLike[str] | KeptSketches | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        out: str | os.PathLike[str] | None = None,
        on_round: Callable[[RoundReport], Any] | None = None,
        timeout: float = 600.0,
        identity: Identity = "auto",
        center: ArrayLike | None = None,
    ) -> None:
        if timeout <= 0:
            raise ConfigError(f"CohortStrategy: timeout={timeout} must be above 0")
        self.inner, self.cohort_size, self.checkpoint = inner, cohort_size, checkpoint
        self.pace, self.on_round, self.timeout = pace or Pace(), on_round, timeout
        self.wanted = cohort_size or 1  # known once the inner strategy has sampled
        size = self.pace.asked(self.wanted)
        self.session = Session(policy, cohort_size=size, seed=seed, gate=gate, averaging="size")
        self.gate = self.session.gate
        inners.check(inner, self.gate is not None, checkpoint is not None, cohort_size, self.pace)
        inners.warn_of_exact(inner, self.session.policy)
        self.collector = GridCollector(self.session, timeout, center)
        if callable(eligible):
            eligible = partial(self._is_eligible, eligible)
        self.directory = Directory(identity, min(timeout, 120.0), eligible)
        check = partial(inners.check_trees, inner)
        self.replies = Replies(self.session, inners.weight_key(inner), check)
        self.refused = self.replies.refused
        self.history: list[RoundReport] = []
        self.out = None if out is None else RunFolder(out)
        self.sketches = sketches if isinstance(sketches, KeptSketches | None) else (
            KeptSketches(sketches)
        )  # fmt: skip
        self.made_with = inners.settings(inner)
        self.dtypes: dict[str, str] = {}
        self.rounds_before = 0
        self.run_token = ""
        self.unanswered: Counter[str] = Counter()
        self.durations: dict[ClientId, float] = {}
        self._handed_on = self._round = 0
        self._started = time.monotonic()
        self._cohort: Cohort | None = None
        self._is_made = True

    def __getattr__(self, name: str) -> Any:
        """Return what the inner strategy defines and this class does not."""
        if name.startswith("__") or "inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this class, or else of the inner strategy."""
        ours = "_is_made" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        object.__setattr__(self if ours else self.inner, name, value)

    def summary(self) -> None:
        policy, gate = self.session.policy, "none" if self.gate is None else self.gate.name
        LOG.info("\t├──> Cohort: policy %r, gate %s, seed %d", policy, gate, self.session.seed)
        self._call("summary")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run rounds as Flower does, starting from the checkpoint if it exists.

        The parameters are Flower's; `timeout` is by default that of the strategy. An inner strategy
        with a `start` of its own runs that one.
        """
        self.dtypes, self.run_token = wire.dtypes_of(initial_arrays), secrets.token_hex(8)
        arrays = record.resume(self, initial_arrays)
        limit = self.timeout if timeout is None else timeout
        before = self.rounds_before
        if self.out is not None:
            self.out.begin(self.session, num_rounds, self.history)
        if self.sketches is not None:
            self.sketches.recall(self.collector)

        def evaluate(number: int, model: ArrayRecord) -> MetricRecord | None:
            metrics = None if evaluate_fn is None else evaluate_fn(number + before, model)
            self._evaluated(number + before, metrics)
            self._hand_on()
            return metrics

        with inners.running(self.inner, self) as start:
            result = start(
                grid=CohortGrid(grid, limit),
                initial_arrays=arrays,
                num_rounds=max(num_rounds - before, 0),
                timeout=limit,
                train_config=train_config,
                evaluate_config=evaluate_config,
                evaluate_fn=None if evaluate_fn is None else evaluate,
            )
        self._hand_on()
        if self.out is not None:
            self.out.end(self.session, self.history, self.directory.nodes, self.durations)
        return record.renumbered(result, before, arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort, and with a gate train it, before the messages of this round go out."""
        self._hand_on()
        self._cohort, self._started = None, time.monotonic()
        self.replies.failed.clear()
        self.dtypes = self.dtypes or wire.dtypes_of(arrays)
        self._round = number = server_round + self.rounds_before
        unchanged = ConfigRecord(dict(config))
        collector = self.collector
        current = wire.in_dtypes(arrays, self.dtypes)
        entries = {"server-round": number, **config}
        held = max((r.round for r in self.history if r.finished), default=0) - 1
        collector.begin(grid, {}, current, entries, held_round=held, run=self.run_token)
        free = [name for name in collector.profile if collector.needed(name) == "none"]
        # With kept sketches, the ids come first: some profiles may be known.
        shown = self._shown(grid, sorted(free) if self.sketches is None else ())
        messages = list(self._call("configure_train", number, arrays, config, shown))
        if not messages:
            return []
        collector.nodes = nodes = dict(self.directory.nodes)
        if self.cohort_size is None and not self.history:
            self.wanted = inners.usual_cohort_size(self.inner, len(messages), len(nodes))
            self.session.cohort_size = self.pace.asked(self.wanted)
        template = Template(messages)
        if template.arrays is not None and template.arrays is not arrays:
            collector.current = Model(wire.in_dtypes(template.arrays, self.dtypes))
        collector.config = template.any.content.config_records.get(template.config, {})
        collector.request = replace(collector.request, arrays=template.name)
        model = collector.current
        self.replies.kind = inners.reply_kind(
            self.inner, model.arrays, self.session.policy, self.gate, self.pace
        )
        selection = self._selected()
        chosen = {client: nodes[client] for client in selection.clients}
        if template.missing(chosen):
            fixed = CohortGrid(grid, self.timeout, lambda: list(chosen.values()))
            with inners.full_participation(self.inner, len(chosen)):
                again = self._call("configure_train", number, arrays, unchanged, fixed)
                template = Template(list(again))
        if missing := template.missing(chosen):
            raise ConfigError(
                "CohortStrategy: the inner strategy sends each node a message of its own, but none "
                f"to {', '.join(missing)}; make its configure_train build one for every node of "
                "grid.get_node_ids()"
            )
        self._cohort = cohort = Cohort(selection, template, collector)
        if self.gate is None:
            if not self.pace.waits_for_all:
                collector.grid.until = self._until(min(self.wanted, len(chosen)))
            return cohort.train()
        announced = self.session.announce(Vectors(model.flat))
        answers = cohort.probe(self.gate, announced)
        self.replies.count("gate", cohort.problems)
        if not answers and not any(r.finished or r.withheld for r in self.history):
            remedy = "attach(app, data=..., model=...) on the clients, after @app.train()"
            raise self._missing(f"the gate {self.gate.name!r}", cohort.problems, remedy)
        return cohort.upload(self.session.admit(answers))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the inner strategy, also while `start` is left to it."""
        kind = type(self.inner)
        kind = kind.__mro__[1] if getattr(kind, "_fedcohort_hooked", False) else kind
        return getattr(kind, method)(self.inner, *arguments)

    def _shown(self, grid: Grid, names: Sequence[str] = ()) -> CohortGrid:
        """Return a grid with the clients that are online; newcomers are asked for signals too."""
        question, take = self.collector.content(names), partial(self.collector.take, names=names)
        refresh = partial(self.directory.refresh, grid, question, take)
        return CohortGrid(grid, self.timeout, lambda: sorted(refresh().values()))

    def _selected(self) -> Selection:
        """Ask for signals and let the policy pick."""
        session, collector, late = self.session, self.collector, self.replies.late
        nodes = collector.nodes
        there = [client for client in nodes if client not in late] or list(nodes)
        if session.round_number == 0 and session.policy.profile_first:
            session.profile(there, collector)
        selection = session.begin(there, collector)
        for client in selection.clients:  # a new task replaces the one at work
            late.pop(client, None)
        if self.sketches is not None:
            self.sketches.keep(collector, there)
        for name, problems in collector.problems.items():
            self._note_unanswered(name, problems, there)
        return selection

    def _is_eligible(self, eligible: Callable[[ClientId, Known], bool], client: ClientId) -> bool:
        signals, needs = self.session.signals, self.session.policy.needs
        names = needs.profile | needs.query | needs.reply
        known = [name for name in names if signals.known(name, (client,))]
        return eligible(client, {name: signals.values(name, (client,))[0] for name in known})

    def _note_unanswered(
        self, name: str, problems: Mapping[ClientId, str], clients: Sequence[ClientId]
    ) -> None:
        """Count and report who did not answer a signal; ConfigError if nobody ever did."""
        if not self.session.signals.known(name, clients):
            raise self._missing(f"the signal {name!r}", problems, SIGNALS[name].remedy)
        if problems and not self.unanswered[name]:  # said once
            client, why = next(iter(problems.items()))
            LOG.warning(
                "%d clients did not answer %s; %s: %s", len(problems), name, client, why.strip()
            )
        self.unanswered[name] += len(problems)

    def _missing(self, what: str, problems: Mapping[ClientId, str], remedy: str) -> ConfigError:
        """Return why the run stops where a policy or gate gets no answer: cohorts were uniform."""
        client, why = next(iter(problems.items()), ("the clients", "no valid reading"))
        if "Error" in why:  # a reason that clients gave says more than a remedy of ours
            remedy = ""
        return ConfigError(
            f"round {self._round}: nobody answered {what}, which "
            f"{type(self.session.policy).__name__} or its gate needs. {client}: {why.strip()}."
            + (f" Remedy: {remedy}." if remedy else "")
        )

    def _until(self, wanted: int) -> Callable[[Sequence[Reply], float], float]:
        """Return what ends the training exchange of a round that does not wait for everybody."""
        limit = self.pace.limit(self.durations.values())

        def left(replies: Sequence[Reply], elapsed: float) -> float:
            good = sum(reply.message.has_content() for reply in replies)
            if good >= wanted:
                return 0.0
            return max(limit - elapsed, 0.0) if good or elapsed < limit else math.inf

        return left

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        number, cohort = server_round + self.rounds_before, self._cohort
        if cohort is None:
            return self._call("aggregate_train", number, replies)  # type: ignore[no-any-return]
        session, model = self.session, cohort.model
        came = by_client(replies, cohort.sent)
        seconds = cohort.seconds()
        arrivals = self._close(cohort, came, seconds)
        cut = () if arrivals is None else arrivals.cut
        late = self.replies.late_updates(self.collector.grid, model)
        for client in cut if self.pace.late == "next" else ():
            sent = cohort.sent[client].metadata.message_id
            late_one = Late(session.round_number, sent, model, came.get(client))
            self.replies.late[client] = late_one
        in_time = [client for client in cohort.sent if client not in cut]
        updates = self.replies.accepted(came, in_time, model.arrays)
        self.durations.update({c: s for c, s in seconds.items() if c in updates})
        signals, unanswered = reply_signals(session.policy, updates, model, seconds)
        self.replies.weigh(updates, late, model, self.pace)
        self._finish_round(signals, updates, tuple(late), arrivals)
        if wire.payload(model.arrays):  # about an empty model, clients may have nothing to say
            for name, problems in unanswered.items():
                self._note_unanswered(name, problems, list(self.directory.nodes))
        arrays, metrics = None, None
        messages = [update.message for update in (*updates.values(), *late.values())]
        for message in messages:
            message.content.pop(RECORD, None)
        if messages:
            arrays, metrics = self._call("aggregate_train", number, messages)
        if arrays is not None and self.gate is not None:
            after = wire.in_dtypes(arrays, self.dtypes)
            self.gate.aggregated(Vectors(model.flat), Vectors(wire.flatten(after)))
        record.save_checkpoint(self, model.arrays if arrays is None else arrays)
        return arrays, metrics

    def _close(
        self, cohort: Cohort, came: Mapping[ClientId, Message], seconds: Mapping[ClientId, float]
    ) -> Arrivals | None:
        """Return who was in time, and for whom the round waited; None if nobody was asked."""
        if not cohort.sent:
            return None
        lost = {client for client, message in came.items() if not message.has_content()}
        each = {client: seconds.get(client, math.inf) for client in cohort.sent}
        pace = Pace() if self.collector.grid.elapsed >= self.timeout else self.pace
        wanted = len(each) if pace.waits_for_all else min(self.wanted, len(each))
        arrivals = pace.close(wanted, each, lost, pace.limit(self.durations.values()))
        if arrivals.extended:
            LOG.info("nobody met the deadline; the round waited for the first update")
        return arrivals

    def _finish_round(
        self,
        signals: Mapping[str, Mapping[ClientId, Any]],
        updates: Mapping[ClientId, Update],
        late: tuple[ClientId, ...],
        arrivals: Arrivals | None,
    ) -> None:
        session, number = self.session, self.session.round_number
        scores, cut = session.selection.scores or {}, () if arrivals is None else arrivals.cut
        rested, outcome = dict(session.resting), session.finish(signals, updates, cut)
        for client, until in session.resting.items():
            if rested.get(client) != until:
                LOG.info("%s failed again and sits out until round %d", client, until + 1)
        seconds = round(time.monotonic() - self._started, 3)
        report = RoundReport(
            session.seed,
            number + 1,
            accuracy=None,
            loss=None,
            selected=outcome.selected,
            finished=outcome.finished,
            bytes_up=session.ledger.total("up", number),
            bytes_down=session.ledger.total("down", number),
            seconds=seconds,
            elapsed=seconds + (self.history[-1].elapsed if self.history else 0.0),
            skipped=session.skipped,
            withheld=outcome.withheld,
            cut=outcome.cut,
            late=late,
            scores={c: float(scores[c]) for c in outcome.selected if c in scores},
            failed=dict(self.replies.failed),
            slowest=None if arrivals is None or arrivals.slowest in cut else arrivals.slowest,
            available=len(self.collector.nodes),
        )
        LOG.info("%s", report.line())
        self.history.append(report)

    def to_history(self) -> History:
        """Return the rounds as a simulation does, for tables and frames."""
        return History(self.session.seed, [report.plain() for report in self.history])

    def _evaluated(self, number: int, metrics: Mapping[str, Any] | None) -> None:
        """Note what an evaluation after round `number` (from 1) measured."""
        if self.history and self.history[-1].round == number:
            self.history[-1] = self.history[-1].measured(metrics)

    def _hand_on(self) -> None:
        """Write the rounds that are complete, and tell the user's function."""
        reports, self._handed_on = self.history[self._handed_on :], len(self.history)
        if self.out is not None:
            self.out.append(self.history)
        if self.on_round is not None:
            for report in reports:
                self.on_round(report)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        number = server_round + self.rounds_before
        self.collector.config = {"server-round": number, **config}
        sent, shown = wire.in_dtypes(arrays, self.dtypes), self._shown(grid)
        return self._call(  # type: ignore[no-any-return]
            "configure_evaluate", number, sent, config, shown
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        number, usable = server_round + self.rounds_before, usable_evaluations(replies)
        metrics: MetricRecord | None = None
        if usable:
            metrics = self._call("aggregate_evaluate", number, usable)
            self._evaluated(number, metrics)
        return metrics
