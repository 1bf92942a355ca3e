"""What the wrapper promises whatever clients do, and around whichever strategy."""

from __future__ import annotations

import copy
import socket
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from fedcohort.exceptions import ConfigError, InvalidCheckpoint, NoClients
from fedcohort.flower import CohortStrategy
from fedcohort.flower.messages import RECORD, to_record
from fedcohort.gates import CMFL, SketchToSkip
from fedcohort.policies import POLICIES, Uniform
from fedcohort.policies.base import Policy
from fedcohort.rounds import Selection
from fedcohort.signals.catalog import Needs


def named(gate):
    return "no gate" if gate is None else gate.name


def average(**options):
    return flower.FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0, **options)


def cohort(policy=None, inner=None, **options):
    options = {"timeout": 0.3, "wait": 5, "seed": 3, **options}
    return CohortStrategy(inner or average(), policy or Uniform(), **options)


def crossed(grid):
    """Bytes of numbers that crossed, counted from the messages: (down, up)."""
    totals = {"down": 0, "up": 0}
    for way, _, message in grid.crossed:
        if message.has_error():
            continue
        for record in message.content.array_records.values():
            totals[way] += sum(a.numpy().nbytes for a in record.values())
        for record in message.content.config_records.values():
            totals[way] += sum(len(v) for v in record.values() if isinstance(v, bytes))
    return totals["down"], totals["up"]


@pytest.mark.parametrize("gate", [None, SketchToSkip(0.45, k=20), CMFL(0.55)], ids=named)
@pytest.mark.parametrize("name", ["power-of-choice", "race-softmax", "kdpp", "active-fl", "fedcor"])
def test_the_ledger_counts_the_bytes_that_cross(digits, name, gate):
    grid, strategy = (
        digits.grid(),
        cohort(POLICIES[name](), cohort_size=3, gate=copy.deepcopy(gate)),
    )
    strategy.start(grid, digits.arrays(), 4)
    ledger = strategy.session.ledger
    assert (ledger.total("down"), ledger.total("up")) == crossed(grid)
    assert sum(r.bytes_down for r in strategy.history) == ledger.total("down")


def test_the_ledger_counts_models_sent_again(digits):
    """Clients that keep nothing are sent the model for the query and again for training."""
    grid, strategy = (
        digits.grid(cache=False),
        cohort(POLICIES["power-of-choice"](d=4), cohort_size=2),
    )
    strategy.start(grid, digits.arrays(), 2)
    keeping = digits.grid()
    other = cohort(POLICIES["power-of-choice"](d=4), cohort_size=2)
    other.start(keeping, digits.arrays(), 2)
    assert strategy.session.ledger.total("down") == crossed(grid)[0]
    assert other.session.ledger.total("down") == crossed(keeping)[0]
    assert crossed(grid)[0] > crossed(keeping)[0]
    assert [r.selected for r in strategy.history] == [r.selected for r in other.history]


def test_a_late_profile_is_taken_under_the_first_model(digits):
    grid, strategy = digits.grid(), cohort(POLICIES["kdpp"](), cohort_size=8)
    last = digits.node(digits.clients[-1])
    app = grid.apps.pop(last)

    def join(number, arrays):
        if number == 2:
            grid.apps[last] = app

    strategy.start(grid, digits.arrays(), 3, evaluate_fn=join)
    profiles = [m for n, m in grid.sent("query.feature_profile") if n == last]
    assert profiles[0].content["arrays"] == digits.arrays()
    assert digits.clients[-1] in strategy.history[2].finished
    assert strategy.session.ledger.total("down") == crossed(grid)[0]


def test_nothing_but_flowers_grid_is_used(digits, monkeypatch):
    """A deployment opens no port for fedcohort, and connects to nobody for it."""

    def forbidden(*arguments):
        raise AssertionError("a socket was used")

    for name in ("bind", "listen", "connect"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    strategy = cohort("race-softmax", cohort_size=3, gate=SketchToSkip(0.45, k=20))
    strategy.start(digits.grid(), digits.arrays(), 2)
    assert len(strategy.history) == 2


def test_the_inner_strategy_says_how_many(digits):
    strategy = cohort(inner=average(fraction_train=0.5))
    strategy.start(digits.grid(), digits.arrays(), 2)
    assert [len(r.selected) for r in strategy.history] == [4, 4]


def test_a_strategy_that_trains_nobody_is_left_alone(digits):
    strategy = cohort(inner=average(fraction_train=0.0, min_train_nodes=0))
    result = strategy.start(digits.grid(), digits.arrays(), 2)
    assert strategy.history == [] and not result.arrays


INNERS = {
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, fraction_evaluate=0.0, min_evaluate_nodes=0),
    "FedAdam": lambda: flower.FedAdam(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "FedAdagrad": lambda: flower.FedAdagrad(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "FedYogi": lambda: flower.FedYogi(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "FedAvgM": lambda: flower.FedAvgM(
        server_momentum=0.9, fraction_evaluate=0.0, min_evaluate_nodes=0
    ),
    "FedMedian": lambda: flower.FedMedian(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "Krum": lambda: flower.Krum(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "MultiKrum": lambda: flower.MultiKrum(
        fraction_evaluate=0.0, min_evaluate_nodes=0, num_nodes_to_select=2
    ),
    "Bulyan": lambda: flower.Bulyan(fraction_evaluate=0.0, min_evaluate_nodes=0),
    "QFedAvg": lambda: flower.QFedAvg(
        0.1, fraction_evaluate=0.0, min_evaluate_nodes=0, train_loss_key="loss"
    ),
    "server clipping": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        average(), 0.01, 1.0, 4
    ),
    "server adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        average(), 0.01, 4
    ),
    "client clipping": lambda: flower.DifferentialPrivacyClientSideFixedClipping(
        average(), 0.01, 1.0, 4
    ),
}


@pytest.mark.parametrize("name", INNERS)
def test_any_strategy_can_be_inside(digits, name):
    from flwr.clientapp.mod import fixedclipping_mod

    try:
        inner = INNERS[name]()
    except AttributeError:
        pytest.skip("this Flower has no such strategy")
    mods = [fixedclipping_mod] if name.startswith("client") else []
    grid = digits.grid(mods=mods)
    if name == "QFedAvg":  # wants a loss among the metrics
        for client in digits.clients:
            grid.apps[digits.node(client)] = own_training(digits, client)
    strategy = cohort(inner=inner, cohort_size=4)
    result = strategy.start(grid, digits.arrays(), 2)
    assert [len(r.finished) for r in strategy.history] == [4, 4]
    assert sum(strategy.refused.values()) == 0
    changed = [
        a != b for a, b in zip(result.arrays.values(), digits.arrays().values(), strict=True)
    ]
    assert all(changed)


def own_training(digits, client):
    """A user's own handler, which adds one to every parameter."""
    from fedcohort.flower import attach

    def train(message, context):
        arrays = message.content["arrays"]
        moved = {k: Array(np.asarray(a.numpy() + 1, a.dtype)) for k, a in arrays.items()}
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5})
        return Message(
            RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message
        )

    app = ClientApp()
    attach(app, digits.examples(client), digits.model, train=train)
    return app


# --- clients that leave, keep silent, fail or lie ---------------------------------------------


def reply_with(content):
    """A client whose training answers with something of its own."""

    def app_for(digits, client):
        app = own_training(digits, client)
        app._registered_funcs["train.default"] = lambda message, context: Message(
            content(message), reply_to=message
        )
        return app

    return app_for


def like(message, change):
    arrays = {k: Array(change(k, a.numpy())) for k, a in message.content["arrays"].items()}
    return ArrayRecord(arrays)


METRICS = MetricRecord({"num-examples": 10, "loss": 0.5})
LIES = {
    "nan": lambda m: RecordDict({"arrays": like(m, lambda k, a: a * np.nan), "metrics": METRICS}),
    "shape": lambda m: RecordDict({"arrays": like(m, lambda k, a: a[:1]), "metrics": METRICS}),
    "names": lambda m: RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "metrics": METRICS}),
    "two models": lambda m: RecordDict(
        {"a": m.content["arrays"], "b": m.content["arrays"], "metrics": METRICS}
    ),
    "no model": lambda m: RecordDict({"metrics": METRICS}),
    "no metrics": lambda m: RecordDict({"arrays": m.content["arrays"]}),
    "no weight": lambda m: RecordDict(
        {"arrays": m.content["arrays"], "metrics": MetricRecord({"loss": 1.0})}
    ),
    "nan weight": lambda m: RecordDict(
        {"arrays": m.content["arrays"], "metrics": MetricRecord({"num-examples": float("nan")})}
    ),
    "negative weight": lambda m: RecordDict(
        {"arrays": m.content["arrays"], "metrics": MetricRecord({"num-examples": -5, "loss": 1.0})}
    ),
    "list weight": lambda m: RecordDict(
        {"arrays": m.content["arrays"], "metrics": MetricRecord({"num-examples": [1, 2]})}
    ),
    "other metrics": lambda m: RecordDict(
        {"arrays": m.content["arrays"], "metrics": MetricRecord({"num-examples": 10})}
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_an_update_that_is_none_is_dropped_and_counted(digits, name):
    grid = digits.grid()
    for client in digits.clients:
        grid.apps[digits.node(client)] = own_training(digits, client)
    liar = digits.clients[2]
    grid.apps[digits.node(liar)] = reply_with(LIES[name])(digits, liar)
    strategy = cohort(cohort_size=8)
    result = strategy.start(grid, digits.arrays(), 1)
    (report,) = strategy.history
    assert set(report.selected) - set(report.finished) == {liar}
    assert strategy.refused["invalid"] == 1
    for before, after in zip(digits.arrays().values(), result.arrays.values(), strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy() + 1, rtol=1e-5)


def test_an_empty_reply_is_an_error(digits):
    grid, mute = digits.grid(), digits.clients[1]

    def nothing(message, context):
        reply = Message(RecordDict(), reply_to=message)
        reply.__dict__["_content"] = None
        return reply

    handlers = grid.apps[digits.node(mute)]._registered_funcs
    handlers["train.default"] = handlers["query.num_examples"] = nothing
    strategy = cohort(POLICIES["power-of-choice"](d=8), cohort_size=8)
    strategy.start(grid, digits.arrays(), 1)
    assert mute not in strategy.history[0].finished and len(strategy.history[0].finished) == 7
    assert strategy.refused == {"error": 1}


@pytest.mark.parametrize(
    "reading",
    [
        np.full((), np.nan),
        np.zeros(100_000_000, np.uint8),
        np.zeros((3, 3), np.float32),
    ],
    ids=["nan", "100 MB", "shape"],
)
def test_a_reading_that_is_none_is_dropped_and_counted(digits, reading):
    grid, liar = digits.grid(), digits.clients[0]

    def answer(message, context):
        record = to_record({"race_sketch": reading})
        return Message(RecordDict({RECORD: record}), reply_to=message)

    app = grid.apps[digits.node(liar)]
    app._registered_funcs["query.race_sketch"] = answer
    strategy = cohort(POLICIES["race-softmax"](), cohort_size=4)
    strategy.start(grid, digits.arrays(), 4)
    asked = [n for n, _ in grid.sent("query.race_sketch") if n == digits.node(liar)]
    assert strategy.session.signals.dropped["race_sketch"] == len(asked) == 3
    known = strategy.session.signals.known("race_sketch", digits.clients)
    assert known == digits.clients[1:]
    assert strategy.session.ledger.total("up") == crossed(grid)[1]


def test_silence_costs_its_timeout_and_no_more(digits, clock):
    grid = digits.grid()
    grid.contexts[digits.node("client-1")].node_config["x"] = 1
    strategy = cohort(cohort_size=8, timeout=1.0)

    def fall_silent(number, arrays):
        grid.silent = {digits.node("client-1")} if number == 1 else set()

    strategy.start(grid, digits.arrays(), 3, evaluate_fn=fall_silent)
    assert [len(r.finished) for r in strategy.history] == [8, 7, 8]
    assert strategy.refused == {"no reply": 1}
    assert [r.seconds for r in strategy.history] == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("gate", [None, SketchToSkip(0.0001, k=5)], ids=["plain", "gate"])
def test_a_node_that_is_gone_is_told_by_the_message_it_did_not_answer(digits, gate):
    grid, strategy = digits.grid(), cohort(cohort_size=8, gate=gate)

    def leave(number, arrays):
        grid.gone = {digits.node("client-3")} if number == 1 else set()

    strategy.start(grid, digits.arrays(), 3, evaluate_fn=leave)
    assert [len(r.finished) for r in strategy.history] == [8, 7, 8]
    assert sum(strategy.refused.values()) == 1


def test_nodes_may_leave_for_good_and_others_join(digits):
    grid, strategy = digits.grid(), cohort(POLICIES["race-softmax"](), cohort_size=8)
    first, last = digits.node("client-0"), digits.node("client-7")
    app = grid.apps.pop(last)

    def move(number, arrays):
        if number == 1:
            grid.apps[last] = app
            del grid.apps[first]

    strategy.start(grid, digits.arrays(), 2, evaluate_fn=move)
    assert sorted(strategy.history[0].finished) == list(digits.clients[:7])
    assert sorted(strategy.history[1].finished) == list(digits.clients[1:])


def test_a_round_in_which_everybody_fails_changes_nothing(digits):
    grid, strategy = digits.grid(), cohort(cohort_size=3)
    strategy.directory.refresh(grid)
    grid.gone = set(grid.apps)
    result = strategy.start(grid, digits.arrays(), 2)
    assert [r.finished for r in strategy.history] == [(), ()]
    assert strategy.refused == {"error": 6} and not result.arrays


def test_too_few_clients_are_waited_for_and_then_named(digits, clock):
    grid = digits.grid()
    strategy = cohort(inner=average(min_available_nodes=9), wait=7.5)
    with pytest.raises(NoClients, match=r"8 online .* min_available_nodes"):
        strategy.start(grid, digits.arrays(), 1)
    assert clock.now == 8  # Flower looks once per second


def test_clients_that_come_in_time_are_waited_for(digits, clock):
    grid = digits.grid()
    late = {n: grid.apps.pop(n) for n in list(grid.apps)[:4]}
    asked = []
    listed = grid.get_nodes

    def get_nodes():
        asked.append(1)
        if len(asked) == 4:
            grid.apps.update(late)
        return listed()

    grid.get_nodes = get_nodes
    strategy = cohort(inner=average(min_train_nodes=8))
    strategy.start(grid, digits.arrays(), 1)
    assert len(strategy.history[0].selected) == 8


def test_plain_clients_can_be_selected_too(digits):
    """Clients that never heard of fedcohort train for policies that ask nothing."""
    grid = digits.grid()
    for client in digits.clients:
        app = ClientApp()
        trained = own_training(digits, client)._registered_funcs["train.default"]
        app.train()(trained)
        grid.apps[digits.node(client)] = app
    strategy = cohort(cohort_size=2)
    strategy.start(grid, digits.arrays(), 2)
    assert [len(r.finished) for r in strategy.history] == [2, 2]


# --- weights, evaluation, settings ------------------------------------------------------------


class Weighted(Policy):
    """Picks the first clients with given weights."""

    def __init__(self, *weights):
        self.weights = weights

    def select(self, round, signals, rng):
        return Selection(round.available[: len(self.weights)], self.weights)


@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.5, 1.0), (3.0, 1.0)])
def test_weights_of_the_policy_are_used_as_they_are(digits, weights):
    """The next model is c + sum w (x - c), for weights of any sum."""
    grid = digits.grid()
    moves = {"client-0": 2.0, "client-1": -1.0}

    def moved(by):
        return lambda m: RecordDict(
            {"arrays": like(m, lambda k, a: a + np.float32(by)), "metrics": METRICS}
        )

    for client, by in moves.items():
        grid.apps[digits.node(client)] = reply_with(moved(by))(digits, client)
    strategy = cohort(Weighted(*weights), cohort_size=2)
    result = strategy.start(grid, digits.arrays(), 1)
    step = weights[0] * 2.0 - weights[1]
    for before, after in zip(digits.arrays().values(), result.arrays.values(), strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy() + step, atol=1e-5)


def test_evaluations_that_would_break_an_average_are_left_out(digits):
    grid = digits.grid()
    for i, client in enumerate(digits.clients):
        app = grid.apps[digits.node(client)]
        value = {0: float("nan"), 1: [1.0, 2.0]}.get(i, 0.5)

        @app.evaluate()
        def evaluate(message, context, value=value):
            metrics = MetricRecord({"num-examples": 10, "accuracy": value})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = cohort(inner=flower.FedAvg(), cohort_size=2)
    result = strategy.start(grid, digits.arrays(), 1)
    assert result.evaluate_metrics_clientapp[1] == {"accuracy": pytest.approx(0.5)}


def test_durations_are_measured(digits):
    class Timed(Uniform):
        needs = Needs(reply=frozenset({"duration"}))

    grid, strategy = digits.grid(), cohort(Timed(), cohort_size=8)
    slow = digits.node("client-2")
    grid.on_push = lambda m: time.sleep(0.2) if m.metadata.dst_node_id == slow else None
    strategy.start(grid, digits.arrays(), 1)
    seconds = strategy.session.signals.values("duration", digits.clients)
    assert (seconds > 0).all() and np.isfinite(seconds).all()


def test_settings_that_cannot_work_are_refused(tmp_path):
    client_side = flower.DifferentialPrivacyClientSideFixedClipping(average(), 1.0, 1.0, 4)
    with pytest.raises(ConfigError, match="server-side"):
        cohort(inner=client_side, gate=SketchToSkip())
    with pytest.raises(ConfigError, match="center="):
        cohort(POLICIES["sketch-match"](centered=True))
    with pytest.raises(ConfigError, match="insight_step"):
        cohort(POLICIES["fedacs"](insight_step=True))
    with pytest.raises(ConfigError, match="timeout=0"):
        cohort(timeout=0)


# --- checkpoints ------------------------------------------------------------------------------

RESUMED = {
    "FedAvg": lambda: average(),
    "FedAvgM": lambda: flower.FedAvgM(
        server_momentum=0.9, fraction_evaluate=0.0, min_evaluate_nodes=0
    ),
    "FedAdam": lambda: flower.FedAdam(
        eta=0.01, beta_1=0.9, beta_2=0.99, fraction_evaluate=0.0, min_evaluate_nodes=0
    ),
}


@pytest.mark.parametrize(
    "gate",
    [
        None,
        SketchToSkip(0.45, k=20, on_skip="reset", max_skips=2),
        SketchToSkip(0.45, k=20, on_skip="keep"),
    ],
    ids=["no gate", "reset", "keep"],
)
@pytest.mark.parametrize("name", [n for n in RESUMED if hasattr(flower, n)])
def test_a_restart_continues_as_if_nothing_had_happened(digits, tmp_path, name, gate):
    def run(rounds, grid, path=None):
        policy = POLICIES["fedacs"]() if gate is None else Uniform()
        own = copy.deepcopy(gate)
        strategy = cohort(policy, RESUMED[name](), cohort_size=3, gate=own, checkpoint=path)
        evaluated = []
        result = strategy.start(
            grid,
            digits.arrays(),
            rounds,
            evaluate_fn=lambda number, arrays: evaluated.append(number),
        )
        return strategy, result, evaluated

    path, grid = tmp_path / "run.ckpt", digits.grid()
    whole, expected, _ = run(5, digits.grid())
    run(2, grid, path)
    resumed, result, evaluated = run(5, grid, path)
    assert [r[:5] for r in resumed.history] == [r[:5] for r in whole.history]
    assert evaluated == [2, 3, 4, 5]
    # The new server does not know that clients hold the model still, sends it, and counts it.
    again = 3 * digits.bytes if gate is not None else 0
    down = resumed.session.ledger.total("down")
    assert down == whole.session.ledger.total("down") + again == crossed(grid)[0]
    for a, b in zip(result.arrays.values(), expected.arrays.values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert sorted(result.train_metrics_clientapp) == [
        n for n in sorted(expected.train_metrics_clientapp) if n > 2
    ]


def test_what_an_inner_strategy_learned_is_kept_and_what_it_was_told_is_not():
    from fedcohort.flower import inner as inners

    if not hasattr(flower, "DifferentialPrivacyServerSideAdaptiveClipping"):
        pytest.skip("this Flower has no such strategy")

    def make(fraction):
        inside = flower.FedAvgM(server_momentum=0.9, fraction_train=fraction)
        return flower.DifferentialPrivacyServerSideAdaptiveClipping(inside, 0.01, 4)

    used = make(0.5)
    made_with = inners.settings(used)
    used.clipping_norm = 0.37
    used.strategy.momentum_vector = [np.arange(3.0)]
    used.strategy.current_arrays = ArrayRecord([np.ones(2)])
    state = inners.state_dict(used, made_with)
    fresh = make(1.0)
    inners.load_state_dict(fresh, state)
    assert fresh.clipping_norm == 0.37 and fresh.strategy.fraction_train == 1.0
    assert fresh.strategy.momentum_vector[0].tolist() == [0.0, 1.0, 2.0]
    assert fresh.strategy.current_arrays == ArrayRecord([np.ones(2)])


def test_what_a_kill_left_of_the_first_checkpoint_is_removed(digits, tmp_path):
    stray = tmp_path / ".run.ckpt.0123456789abcdef.fedcohort-tmp"
    stray.touch()
    strategy = cohort(cohort_size=3, checkpoint=tmp_path / "run.ckpt")
    strategy.start(digits.grid(), digits.arrays(), 1)
    assert not stray.exists()


def test_an_accountant_and_a_checkpoint_do_not_go_together(tmp_path):
    inside = flower.DifferentialPrivacyServerSideFixedClipping(average(), 1.0, 1.0, 4)
    inside.accountant = object()
    with pytest.raises(ConfigError, match="accountant"):
        cohort(inner=inside, checkpoint=tmp_path / "run.ckpt")


def test_a_checkpoint_of_another_run_is_refused(digits, tmp_path):
    path = tmp_path / "run.ckpt"
    cohort(cohort_size=3, checkpoint=path).start(digits.grid(), digits.arrays(), 1)
    with pytest.raises(InvalidCheckpoint, match="seed"):
        cohort(cohort_size=3, seed=4, checkpoint=path).start(digits.grid(), digits.arrays(), 2)
    finished = cohort(cohort_size=3, checkpoint=path)
    result = finished.start(digits.grid(), digits.arrays(), 1)
    assert len(finished.history) == 1 and result.arrays


def test_an_empty_config_is_not_shared_between_clients(digits):
    """Our entries go into each message's own copy of the inner strategy's config."""
    grid, config = digits.grid(), ConfigRecord({"lr": 0.1})
    cohort(cohort_size=2).start(grid, digits.arrays(), 1, train_config=config)
    assert set(config) == {"lr", "server-round"}
    assert all(m.content["config"]["lr"] == 0.1 for _, m in grid.sent("train"))


# --- signals that nobody answers, logs, names from a run config ---------------------------------


def own_apps(digits, **options):
    """Clients with training of their own and no model: losses cannot be measured by us."""
    from fedcohort.flower import attach

    grid = digits.empty_grid()
    for client in digits.clients:
        app = ClientApp()

        @app.train()
        def train(message, context):
            metrics = MetricRecord({"num-examples": 10})
            content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
            return Message(content, reply_to=message)

        if options.get("attached", True):
            attach(app, digits.examples(client))
        grid.add(digits.node(client), app, **{"client-id": client})
    return grid


MISSING = {
    "power-of-choice": "'loss'.*no @app.evaluate",
    "kdpp": "'feature_profile'.*No query function.*model=",
    "oort": "'loss_rms'.*came without it.*attach",
}


@pytest.mark.parametrize("policy", MISSING)
def test_a_policy_without_answers_stops(digits, policy):
    """It once became uniform without a word, with exit status 0."""
    strategy = cohort(policy, cohort_size=3, center=np.zeros(64))
    with pytest.raises(ConfigError, match=f"nobody answered the signal {MISSING[policy]}"):
        strategy.start(own_apps(digits), digits.arrays(), 3)


@pytest.mark.parametrize("policy", MISSING)
def test_a_policy_without_answers_goes_on_if_the_user_says_so(digits, policy, caplog):
    strategy = cohort(policy, cohort_size=3, center=np.zeros(64), on_missing="continue")
    strategy.start(own_apps(digits), digits.arrays(), 3)
    assert [len(r.finished) for r in strategy.history] == [3, 3, 3]
    assert sum(strategy.unanswered.values()) > 0
    told = [r for r in caplog.records if "nobody answered" in r.getMessage()]
    assert len(told) == 1


def test_a_gate_around_clients_that_cannot_train_for_it_stops(digits):
    strategy = cohort(cohort_size=3, gate=CMFL())
    with pytest.raises(ConfigError, match=r"nobody answered the gate 'cmfl'.*'probe'"):
        strategy.start(own_apps(digits, attached=False), digits.arrays(), 2)


def test_one_client_that_does_not_answer_is_reported_once_and_stops_nothing(digits, caplog):
    grid, strategy = digits.grid(), cohort(POLICIES["power-of-choice"](d=8), cohort_size=2)
    del grid.apps[digits.node("client-3")]._registered_funcs["query.loss"]
    strategy.start(grid, digits.arrays(), 3)
    told = [r.getMessage() for r in caplog.records if "did not answer" in r.getMessage()]
    assert len(told) == 1 and "client-3: No query function" in told[0]
    assert strategy.unanswered == {"num_examples": 0, "loss": 3}


def test_each_round_is_one_line_of_the_log(digits, caplog):
    grid, strategy = digits.grid(), cohort(POLICIES["power-of-choice"](d=4), cohort_size=2)
    grid.gone = set()
    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        strategy.start(grid, digits.arrays(), 2)
    lines = [r.getMessage() for r in caplog.records if r.name == "flwr.fedcohort"]
    lines = [line for line in lines if line.startswith("round ")]
    assert len(lines) == 2
    report = strategy.history[0]
    score = report.scores[report.selected[0]]
    assert f"{report.selected[0]} ({score:.3g})" in lines[0]
    assert "2 of 2 uploaded" in lines[0] and f"{report.bytes_up / 1e3:.1f} kB up" in lines[0]


def test_failures_are_named_in_the_log(digits, caplog):
    grid, strategy = digits.grid(), cohort(cohort_size=8)
    grid.apps[digits.node("client-2")] = reply_with(LIES["nan"])(digits, "client-2")
    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        strategy.start(grid, digits.arrays(), 1)
    assert "failed: client-2 (invalid: an update that is not finite" in caplog.text
    assert list(strategy.history[0].failed) == ["client-2"]


def evaluation(digits):
    def evaluate(number, arrays):
        return MetricRecord({"accuracy": digits.accuracy(arrays), "loss": 1.0})

    return evaluate


def test_history_becomes_that_of_a_simulation(digits):
    strategy = cohort(cohort_size=3)
    result = strategy.start(digits.grid(), digits.arrays(), 3, evaluate_fn=evaluation(digits))
    history = strategy.to_history()
    assert history.selections == [r.selected for r in strategy.history]
    assert history.accuracy[2] == digits.accuracy(result.arrays)
    assert [r.bytes_up for r in history.rounds] == [r.bytes_up for r in strategy.history]
    seconds = [r.seconds for r in history.rounds]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_a_run_folder_reads_like_that_of_a_simulation(digits, tmp_path):
    from fedcohort.experiments.results import read

    for name in ("uniform", "race-softmax"):
        strategy = cohort(name, cohort_size=3, out=tmp_path / name)
        strategy.start(digits.grid(), digits.arrays(), 3, evaluate_fn=evaluation(digits))
        (found,) = read(tmp_path / name)
        assert found.histories == [strategy.to_history()] and found.finished
        (summary,) = found.summaries
        assert summary.bytes_up == strategy.session.ledger.total("up")
        assert sum(summary.bytes_by_kind.values()) == summary.bytes_up + summary.bytes_down
        assert found.members()[0].clients == list(digits.clients)
    assert [r.policy for r in read(tmp_path)] == ["uniform", "race-softmax"]


def test_a_run_folder_is_written_round_by_round(digits, tmp_path):
    """A run that ends with an error leaves the rounds before it."""

    def evaluate(number, arrays):
        if number == 3:
            raise RuntimeError("the disk is full")
        return evaluation(digits)(number, arrays)

    from fedcohort.experiments.results import read

    strategy = cohort(cohort_size=3, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="the disk is full"):
        strategy.start(digits.grid(), digits.arrays(), 4, evaluate_fn=evaluate)
    (found,) = read(tmp_path / "run")
    assert [r.round for r in found.histories[0].rounds] == [0, 1]
    assert found.histories[0].rounds == strategy.to_history().rounds[:2]


def test_a_run_folder_continues_with_its_checkpoint_only(digits, tmp_path):
    from fedcohort.experiments.results import read

    def run(rounds, **options):
        strategy = cohort(cohort_size=3, out=tmp_path / "run", **options)
        strategy.start(digits.grid(), digits.arrays(), rounds, evaluate_fn=evaluation(digits))
        return strategy

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").touch()  # of a run that ended before its first round
    run(2, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(ConfigError, match=r"holds a run already.*checkpoint="):
        run(3)
    resumed = run(4, checkpoint=tmp_path / "run.ckpt")
    (found,) = read(tmp_path / "run")
    assert found.histories == [resumed.to_history()] and len(resumed.history) == 4
    assert all(r.accuracy is not None for r in resumed.history)


def test_accuracies_may_come_from_the_clients(digits):
    """Without evaluate_fn, the mean of what clients measured is the round's accuracy."""
    grid = digits.grid()
    for client in digits.clients:

        @grid.apps[digits.node(client)].evaluate()
        def evaluate(message, context):
            metrics = MetricRecord({"num-examples": 10, "eval_acc": 0.25, "eval_loss": 2.0})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = cohort(inner=flower.FedAvg(), cohort_size=2)
    strategy.start(grid, digits.arrays(), 2)
    assert [(r.accuracy, r.loss) for r in strategy.history] == [(0.25, 2.0)] * 2


def test_policies_and_gates_may_be_named_as_in_a_run_config(digits):
    strategy = cohort("power-of-choice:d=4", cohort_size=2, gate="sketch-to-skip:threshold=0.5")
    assert strategy.session.policy.d == 4 and strategy.gate.state.threshold == 0.5
    assert cohort("uniform", gate="none").gate is None
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        cohort("unifrom")
    with pytest.raises(ConfigError, match="policy 'power-of-choice:depth=4'"):
        cohort("power-of-choice:depth=4")


def test_queries_carry_the_inner_strategys_config(digits):
    """Mods and the app's own handlers read entries such as server-round and lr."""
    grid, config = digits.grid(), ConfigRecord({"lr": 0.1})
    strategy = cohort(POLICIES["power-of-choice"](d=4), cohort_size=2)
    strategy.start(grid, digits.arrays(), 2, train_config=config)
    for number, (_, message) in enumerate(grid.sent("query.loss")):
        assert message.content["config"]["server-round"] == 1 + number // 4
        assert message.content["config"]["lr"] == 0.1


def test_a_second_start_does_not_inherit_what_clients_remember(digits):
    """Kept differences and models belong to one run; equal runs must be equal."""
    grid = digits.grid()

    def run():
        strategy = cohort(cohort_size=4, gate=SketchToSkip(0.45, k=20))
        result = strategy.start(grid, digits.arrays(), 3)
        return [r[:6] for r in strategy.history], result

    first, one = run()
    second, two = run()
    assert first == second
    for a, b in zip(one.arrays.values(), two.arrays.values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_labels_are_hashed_by_the_models_outputs(digits):
    """A client of few labels does not know how many there are; the model does."""
    strategy = cohort("sketch-match:label_weight=1.0", cohort_size=3, center=np.zeros(64))
    strategy.start(own_apps(digits), digits.arrays(), 1)
    assert strategy.session.signals.known("race_sketch", digits.clients) == digits.clients


def test_registered_names_are_enough(digits):
    """Nodes with a registered name and no client-id: training and private sketches work."""
    from fedcohort.flower import attach

    grid = digits.empty_grid()
    for i, client in enumerate(digits.clients):
        app = ClientApp()
        attach(app, digits.examples(client), digits.model, local=digits.local)
        grid.add(1000 - 7 * i, app, name=client)
    strategy, other = (cohort(POLICIES["power-of-choice"](d=4), cohort_size=2) for _ in range(2))
    strategy.start(grid, digits.arrays(), 2)
    other.start(digits.grid(), digits.arrays(), 2)
    assert [r[:6] for r in strategy.history] == [r[:6] for r in other.history]
