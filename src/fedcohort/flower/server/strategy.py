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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.server import inner as inners
from fedcohort.flower.server import record
from fedcohort.flower.server.asking import (
    CohortGrid,
    Delivery,
    GridCollector,
    Model,
    Reply,
    first_request,
    why_missing,
)
from fedcohort.flower.server.identity import Directory, Identity
from fedcohort.flower.server.record import KeptSketches, RoundReport, RunFolder
from fedcohort.flower.server.replies import (
    Late,
    Replies,
    Update,
    apply_weights,
    by_client,
    moved_to,
    reply_signals,
    usable_evaluations,
)
from fedcohort.flower.server.training import Cohort, Template, training_request
from fedcohort.flower.wire import (
    LOG,
    RECORD,
    dtypes_of,
    error_reason,
    flatten,
    in_dtypes,
    outputs_of,
    payload,
)
from fedcohort.gates import GATES, Gate
from fedcohort.policies import POLICIES
from fedcohort.policies.base import Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId, Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors
from fedcohort.simulate.clock import Arrivals, Pace

if TYPE_CHECKING:
    from fedcohort.simulate.history import History

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
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
        Any of Flower's or your own. Where its updates are not vectors (serialized trees, several
        records, a part of the layers), policies and gates that compare updates are refused.
    policy : Policy or str
        A policy, or its name with options as in a run config: ``"sketch-match:epsilon=1"``.
    cohort_size : int, optional
        Clients per round; by default as many as the inner strategy samples, or two fifths where it
        samples everybody.
    gate : Gate or str, optional
        Decides after local training who uploads: training then takes two messages, a probe, and an
        upload from those that are needed.
    seed : int, default=0
        Seed of the selection and of the clients' batches.
    eligible : str, collection of str or callable, optional
        The clients that take part: a pattern of ids such as ``"ward-*"``, a tag of the node config
        such as ``"tag:icu"``, a list of ids, or ``eligible(client, signals)`` with the client's id
        and its known readings by signal. Others are asked who they are, and nothing else.
    pace : Pace, optional
        Ask more clients than needed and go on without the slowest, or after a deadline; what
        happens to updates that arrive later.
    sketches : path or KeptSketches, optional
        Keep profiles across runs, so that only newcomers are asked for them.
    checkpoint : path, optional
        A file written after every round; `start` continues from it if it exists.
    out : path, optional
        A folder for the rounds as they happen and their summary, the same files as those of
        ``fedcohort run``: ``fedcohort report FOLDER`` makes a page of them.
    on_round : callable, optional
        ``on_round(report)`` is called with the `RoundReport` of each round after its evaluation.
    timeout : float, default=600
        Seconds to wait for replies to a query and to a training message.
    wait : float, default=600
        Seconds to wait for clients while fewer are online than the inner strategy wants.
    identity : {"auto", "client", "name", "public-key"}
        Where the stable ids of clients come from; see `Directory`.
    center : array, optional
        Public center of the data, for policies whose sketches can be centered.
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
        eligible: str | Collection[ClientId] | Callable[[ClientId, Known], bool] | None = None,
        pace: Pace | None = None,
        sketches: str | os.PathLike[str] | KeptSketches | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        out: str | os.PathLike[str] | None = None,
        on_round: Callable[[RoundReport], Any] | None = None,
        timeout: float = 600.0,
        wait: float = 600.0,
        identity: Identity = "auto",
        center: ArrayLike | None = None,
        on_missing: Literal["stop", "continue"] = "stop",
    ) -> None:
        if on_missing not in ("stop", "continue"):
            raise ConfigError(
                f"CohortStrategy: on_missing={on_missing!r} must be 'stop' or 'continue'"
            )
        if timeout <= 0 or wait < 0:
            raise ConfigError(
                f"CohortStrategy: timeout={timeout} must be above 0, wait={wait} not negative"
            )
        self.inner, self.cohort_size, self.checkpoint = inner, cohort_size, checkpoint
        chosen: Policy = make("policy", policy, POLICIES)
        self.gate: Gate | None = None if gate in (None, "none") else make("gate", gate, GATES)
        self.pace, self.on_round, self.on_missing = pace or Pace(), on_round, on_missing
        self.timeout, self.wait = timeout, wait
        self.center = None if center is None else np.asarray(center, np.float64).ravel()
        inners.check(inner, self.gate is not None, checkpoint is not None, cohort_size, self.pace)
        inners.check_policy(inner, chosen, self.center is not None)
        self.session = Session(
            chosen,
            cohort_size=self.pace.asked(cohort_size or 1),
            seed=seed,
            gate=self.gate,
            averaging="size",
        )
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
        self.initial: Model | None = None
        self.continuing: tuple[ClientId, ...] = ()
        self.rounds_before = 0
        self.run_token = ""
        self.unanswered: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._kinds: dict[str, dict[ClientId, str]] = {}
        self._late: dict[ClientId, Late] = {}
        self._durations: dict[ClientId, float] = {}
        self._announced_rest: dict[ClientId, int] = {}
        self._handed_on = 0
        self._wanted = 1
        self._started = time.monotonic()
        self._delivery = Delivery(self.session)
        self._cohort: Cohort | None = None
        self._grid: CohortGrid | None = None
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
        arrays = record.resume(self, initial_arrays)
        limit = self.timeout if timeout is None else timeout
        self._grid = CohortGrid(grid, limit)
        before = self.rounds_before
        if self.out is not None:
            self.out.begin(self.session, num_rounds, self.history)
        if self.sketches is not None:
            self.sketches.recall(self.session)

        def evaluate(number: int, model: ArrayRecord) -> MetricRecord | None:
            metrics = None if evaluate_fn is None else evaluate_fn(number + before, model)
            self._evaluated(number + before, metrics)
            self._hand_on()
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
        self._hand_on()
        if self.out is not None:
            self.out.end(self.session, self.history, self.directory.nodes)
        return record.renumbered(result, before, arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort, and with a gate train it, before the messages of this round go out."""
        self._hand_on()
        self._cohort, self._started = None, time.monotonic()
        self.replies.failed.clear()
        self.dtypes = self.dtypes or dtypes_of(arrays)
        number, unchanged = server_round + self.rounds_before, ConfigRecord(dict(config))
        current = Model(in_dtypes(arrays, self.dtypes))
        collector = self._collector(grid, current, {"server-round": number, **config})
        shown = self._shown(grid, collector)
        messages = list(self._call("configure_train", number, arrays, config, shown))
        if not messages:
            return []
        nodes = dict(self.directory.nodes)
        if self.cohort_size is None and not self.history:
            size = inners.usual_cohort_size(self.inner, len(messages), len(nodes))
            self.session.cohort_size = self.pace.asked(size)
            self._wanted = size
        elif self.cohort_size is not None:
            self._wanted = self.cohort_size
        template = Template(messages)
        if template.arrays is not None and template.arrays is not arrays:
            current = Model(in_dtypes(template.arrays, self.dtypes))
        collector.config, collector.current = template.entries, current
        collector.request = replace(collector.request, arrays=template.name)
        kind = inners.reply_kind(
            self.inner, current.arrays, self.session.policy, self.gate, self.pace
        )
        self.replies.kind = kind
        selection = self._selected(collector, nodes)
        chosen = {client: nodes[client] for client in selection.clients}
        if not template.covers(chosen.values()):
            fixed = CohortGrid(grid, self.timeout, lambda: list(chosen.values()))
            with inners.full_participation(self.inner, len(chosen)):
                again = self._call("configure_train", number, arrays, unchanged, fixed)
                template = Template(list(again))
            template.check_covers(chosen)
        request = training_request(collector.request, self.session.policy)
        request = replace(request, version=current.version)
        self._cohort = cohort = Cohort(
            selection, template, request, current, nodes, self._delivery, self.timeout
        )
        if self.gate is None:
            if self._grid is not None and not self.pace.waits_for_all:
                self._grid.until = self._until(min(self._wanted, len(chosen)))
            return cohort.train()
        announced = self.session.announce(Vectors(flatten(current.arrays)))
        answers = cohort.probe(self.gate, announced, grid)
        self.replies.count("gate", cohort.problems)
        if not answers and not any(r.finished or r.withheld for r in self.history):
            remedy = "attach(app, data=..., model=...) on the clients, after @app.train()"
            self._missing(f"the gate {self.gate.name!r}", cohort.problems, remedy)
        return cohort.upload(self.session.admit(answers))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the inner strategy, also while `start` is left to it."""
        kind = type(self.inner)
        kind = kind.__mro__[1] if getattr(kind, "_fedcohort_hooked", False) else kind
        return getattr(kind, method)(self.inner, *arguments)

    def _collector(self, grid: Grid, current: Model, config: Mapping[str, Any]) -> GridCollector:
        """Return what asks the clients of this round."""
        session = self.session
        session.model_bytes = payload(current.arrays)
        self.initial = self.initial or current
        last = max((report.round for report in self.history if report.finished), default=-1)
        request = replace(
            first_request(session),
            held_round=last,
            run=self.run_token,
            classes=outputs_of(current.arrays),
        )
        return GridCollector(
            grid,
            session,
            current,
            self.directory.nodes,
            initial=self.initial,
            delivery=self._delivery,
            request=request,
            timeout=self.timeout,
            center=self.center,
            config=config,
            kinds=self._kinds,
        )

    def _shown(self, grid: Grid, collector: GridCollector) -> CohortGrid:
        """Return a grid with the clients that are online; newcomers are asked for profiles too."""
        needs = self.session.policy.needs
        free = sorted(name for name in needs.profile if collector.needed(name) == "none")
        if self.sketches is not None:
            free = []  # the ids first: some profiles may be known
        shown = self.directory.shown(grid, self.wait, collector.content(free))

        def nodes() -> Iterable[int]:
            online = shown()
            for client, answer in self.directory.told.items():
                collector.take(client, answer, free)
            self.directory.told.clear()
            return online

        return CohortGrid(grid, self.timeout, nodes)

    def _selected(self, collector: GridCollector, nodes: Mapping[ClientId, int]) -> Selection:
        """Ask for signals and let the policy pick."""
        session = self.session
        self._delivery.begin([c for c in self.continuing if c in nodes] if session.skipped else [])
        if not nodes or set(nodes) <= set(self._late):
            self._late.clear()
        collector.nodes = nodes
        there = [client for client in nodes if client not in self._late]
        if session.round_number == 0 and session.policy.profile_first:
            session.profile(there, collector)
        self._announce_rest()
        selection = session.begin(there, collector)
        if self.sketches is not None:
            self.sketches.keep(session, there)
        for name, problems in collector.problems.items():
            answered = session.signals.known(name, there)
            self._note_unanswered(name, problems, nobody=not answered)
        self.continuing = selection.clients
        return selection

    def _announce_rest(self) -> None:
        """Log who newly sits out, and for how long."""
        resting = {c: r for c, r in self.session.resting.items() if r > self.session.round_number}
        for client, until in resting.items():
            if self._announced_rest.get(client) != until:
                LOG.info("%s failed again and sits out until round %d", client, until + 1)
        self._announced_rest = resting

    def _is_eligible(self, eligible: Callable[[ClientId, Known], bool], client: ClientId) -> bool:
        signals, policy = self.session.signals, self.session.policy
        names = policy.needs.profile | policy.needs.query | policy.needs.reply
        readings = {
            n: signals.values(n, (client,))[0] for n in names if signals.known(n, (client,))
        }
        return eligible(client, readings)

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
        if not why.startswith("No "):  # a reason that clients gave says more than a remedy of ours
            remedy = "" if "Error" in why else remedy
        text = (
            f"nobody answered {what}, which {type(self.session.policy).__name__} or its gate "
            f"needs. {client}: {why.strip()}." + (f" Remedy: {remedy}." if remedy else "")
        )
        if self.on_missing == "stop":
            raise ConfigError(
                f"round {self.session.round_number + 1}: {text} With on_missing='continue' the "
                "run goes on, and cohorts are then uniform"
            )
        if what not in self._reported:
            self._reported.add(what)
            LOG.warning("%s", text)

    def _until(self, wanted: int) -> Callable[[Sequence[Reply], float], float]:
        """Return what ends the training exchange of a round that does not wait for everybody."""
        limit = self.pace.limit(self._durations.values())

        def left(replies: Sequence[Reply], elapsed: float) -> float:
            good = sum(error_reason(reply.message) is None for reply in replies)
            if good >= wanted:
                return 0.0
            return max(limit - elapsed, 0.0) if good or elapsed < limit else math.inf

        return left

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average the accepted updates, and the policy learn from them."""
        number, cohort = server_round + self.rounds_before, self._cohort
        if cohort is None:
            out: tuple[ArrayRecord | None, MetricRecord | None]
            out = self._call("aggregate_train", number, replies)
            return out
        session, model = self.session, cohort.model
        came = by_client(replies, cohort.sent)
        seconds = cohort.seconds({} if self._grid is None else self._grid.seconds)
        arrivals = self._close(cohort, came, seconds)
        cut = () if arrivals is None else arrivals.cut
        late = self._late_updates(model)
        for client in cut if self.pace.late == "next" else ():
            sent = cohort.sent[client]
            self._late[client] = Late(session.round_number, sent, model, came.get(client))
        in_time = {c: m for c, m in cohort.sent.items() if c not in cut}
        updates = self.replies.accepted(
            [message for client, message in came.items() if client in in_time],
            in_time,
            model.arrays,
        )
        self._durations.update({c: s for c, s in seconds.items() if c in updates})
        signals = reply_signals(session.policy, updates, model, seconds)
        self._charge_other_sizes(updates)
        self._finish_round(signals, updates, cut, tuple(late), arrivals)
        for name in sorted(session.policy.needs.reply):
            self._check_reply_signal(name, signals, updates)
        arrays, metrics = None, None
        if updates or late:
            self._weigh(updates, late, model)
            for update in (*updates.values(), *(update for update, _ in late.values())):
                update.message.content.pop(RECORD, None)
            sound = [update.message for update in updates.values()]
            sound += [update.message for update, _ in late.values()]
            arrays, metrics = self._call("aggregate_train", number, sound)
        if arrays is not None and self.gate is not None:
            after = in_dtypes(arrays, self.dtypes)
            self.gate.aggregated(Vectors(flatten(model.arrays)), Vectors(flatten(after)))
        record.save_checkpoint(self, model.arrays if arrays is None else arrays)
        return arrays, metrics

    def _close(
        self, cohort: Cohort, came: Mapping[ClientId, Message], seconds: Mapping[ClientId, float]
    ) -> Arrivals | None:
        """Return who was in time, where the round did not wait for everybody."""
        elapsed = 0.0 if self._grid is None else self._grid.elapsed
        if self.pace.waits_for_all or not cohort.sent or elapsed >= self.timeout:
            return None
        lost = {c for c, message in came.items() if error_reason(message) is not None}
        each = {client: seconds.get(client, math.inf) for client in cohort.sent}
        wanted = min(self._wanted, len(each))
        return self.pace.close(wanted, each, lost, self.pace.limit(self._durations.values()))

    def _late_updates(self, model: Model) -> dict[ClientId, tuple[Update, int]]:
        """Return the updates of earlier rounds that have arrived by now, and how late they are."""
        if not self._late or self._grid is None:
            return {}
        waiting = {p.sent.metadata.message_id: c for c, p in self._late.items() if p.reply is None}
        replies = {c: pending.reply for c, pending in self._late.items() if pending.reply}
        for message in self._grid.pull_messages(list(waiting)):
            replies[waiting[message.metadata.reply_to_message_id]] = message
        updates = {}
        for client, message in replies.items():
            pending = self._late.pop(client)
            try:
                if (reason := error_reason(message)) is not None:
                    raise DataError(reason)
                update = self.replies.checked(message, pending.model.arrays)
            except DataError as error:
                LOG.info("%s, late from round %d: %s", client, pending.round + 1, error)
                continue
            rounds = self.session.round_number - pending.round
            updates[client] = moved_to(update, pending.model, model), rounds
            self.session.charge("model", "up", {client: self.session.model_bytes})
        return updates

    def _weigh(
        self,
        updates: Mapping[ClientId, Update],
        late: Mapping[ClientId, tuple[Update, int]],
        model: Model,
    ) -> None:
        """Give updates the weights of the policy, where it has any, and late ones less."""
        assert self._cohort is not None
        stated = self._cohort.selection.weights_of(tuple(updates))
        if not late:
            if stated is not None and updates:
                apply_weights(updates, stated, model, self.replies.weight_key)
            return
        sizes = [update.weight for update in updates.values()]
        total = sum(sizes) or sum(update.weight for update, _ in late.values())
        fresh = [size / total for size in sizes] if stated is None else list(stated)
        mean = sum(fresh) / len(fresh) if stated else 0.0
        stale = [(mean or update.weight / total, rounds) for update, rounds in late.values()]
        together = {**updates, **{f"late {c}": update for c, (update, _) in late.items()}}
        weights = self.pace.stale_weights(fresh, stale)
        apply_weights(together, weights, model, self.replies.weight_key)

    def _finish_round(
        self,
        signals: Mapping[str, Mapping[ClientId, Any]],
        updates: Mapping[ClientId, Update],
        cut: Sequence[ClientId],
        late: tuple[ClientId, ...],
        arrivals: Arrivals | None,
    ) -> None:
        """End the session's round, log it, and note what happened."""
        assert self._cohort is not None
        session, number = self.session, self.session.round_number
        outcome = session.finish(signals, updates, cut)
        scores = self._cohort.selection.scores or {}
        report = RoundReport(
            number,
            outcome.selected,
            outcome.finished,
            outcome.withheld,
            session.ledger.total("up", number),
            session.ledger.total("down", number),
            round(time.monotonic() - self._started, 3),
            {c: float(scores[c]) for c in outcome.selected if c in scores},
            dict(self.replies.failed),
            cut=outcome.cut,
            late=late,
            slowest=None if arrivals is None or arrivals.slowest in cut else arrivals.slowest,
            available=len(self._cohort.nodes),
        )
        if arrivals is not None and arrivals.extended:
            LOG.info("nobody met the deadline; the round waited for the first update")
        LOG.info("%s", report.line())
        self.history.append(report)

    def _check_reply_signal(
        self,
        name: str,
        signals: Mapping[str, Mapping[ClientId, Any]],
        updates: Mapping[ClientId, Update],
    ) -> None:
        """Report the clients whose updates came without a signal that the policy needs."""
        if not updates or SIGNALS[name].work == "server":
            return
        problems = {
            client: why_missing(update.message.content.config_records.get(RECORD), name)
            for client, update in updates.items()
            if client not in signals.get(name, {})
        }
        answered = self.session.signals.known(name, list(self.directory.nodes))
        self._note_unanswered(name, problems, nobody=not answered)

    def _charge_other_sizes(self, updates: Mapping[ClientId, Update]) -> None:
        """Charge the difference where an update does not have the model's size."""
        expected, session = self.session.model_bytes, self.session
        sizes = {
            c: sum(map(payload, u.message.content.array_records.values())) - expected
            for c, u in updates.items()
        }
        other = {client: size for client, size in sizes.items() if size}
        session.ledger.charge(session.round_number, "model", "up", other)

    def to_history(self) -> History:
        """Return the rounds in the form of a simulation's, for tables and frames."""
        return record.history_of(self.session.seed, self.history)

    def _evaluated(self, number: int, metrics: Mapping[str, Any] | None) -> None:
        """Note what an evaluation after round `number` (from 1) measured."""
        if self.history and self.history[-1].round == number - 1:
            self.history[-1] = self.history[-1].measured(metrics)

    def _hand_on(self) -> None:
        """Write the rounds that are complete, and tell the user's function."""
        if self.out is not None:
            self.out.append(self.session.seed, self.history)
        reports, self._handed_on = self.history[self._handed_on :], len(self.history)
        for report in reports if self.on_round is not None else ():
            self.on_round(report)  # type: ignore[misc]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Leave evaluation to the inner strategy; clients get the dtypes that they started with."""
        number = server_round + self.rounds_before
        sent = in_dtypes(arrays, self.dtypes)
        collector = self._collector(grid, Model(sent), {"server-round": number, **config})
        shown = self.directory.shown(grid, self.wait, collector.content([]))
        known = CohortGrid(grid, self.timeout, shown)
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
