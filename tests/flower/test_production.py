"""What a long-lived federation needs: eligible clients, a pace, kept sketches, callbacks."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower
from tests.flower.conftest import SlowGrid

from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.flower import Directory, GridCollector, KeptSketches, Pace, attach
from fedcohort.flower.client import answer
from fedcohort.session import Session
from fedcohort.simulate.clock import Durations


def slow(digits, clock, **seconds):
    each = {digits.node(c): seconds.get(c.replace("-", "_"), 1.0) for c in digits.clients}
    return SlowGrid(digits.grid(), clock, each)


# --- who takes part -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eligible", "wanted"),
    [
        ("client-[0-2]", {"client-0", "client-1", "client-2"}),
        (["client-5", "client-6", "stranger"], {"client-5", "client-6"}),
        ("tag:icu", {"client-1", "client-4"}),
        (
            lambda client, signals: client > "client-5" and signals.get("num_examples", 1) > 0,
            {"client-6", "client-7"},
        ),
    ],
    ids=["pattern", "list", "tag", "function"],
)
def test_only_eligible_clients_are_asked_for_more_than_their_id(digits, cohort, eligible, wanted):
    grid = digits.grid()
    for client in ("client-1", "client-4"):
        grid.contexts[digits.node(client)].node_config["fedcohort-tags"] = "large, icu"
    strategy = cohort("power-of-choice:d=3", cohort_size=2, eligible=eligible)
    strategy.start(grid, digits.arrays(), 2)
    trained = {c for report in strategy.history for c in report.selected}
    assert trained <= wanted and set(strategy.directory.nodes) == wanted
    nodes = {digits.node(client) for client in wanted}
    assert {node for node, _ in [*grid.asked("loss"), *grid.sent("train")]} <= nodes


def test_tags_are_asked_of_registered_nodes_too(digits, cohort):
    grid = digits.empty_grid()
    for client in digits.clients:
        grid.add(digits.node(client), digits.app(client), name=client, **{"fedcohort-tags": client})
    strategy = cohort(cohort_size=1, eligible="tag:client-3", inner=flower.FedAvg(
        fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1))  # fmt: skip
    strategy.start(grid, digits.arrays(), 1)
    assert set(strategy.directory.nodes) == {"client-3"}


# --- what is asked, and how often ---------------------------------------------------------------


def test_ids_and_profiles_take_one_exchange(digits, cohort):
    grid = digits.grid()
    cohort("power-of-choice:d=4", cohort_size=2).start(grid, digits.arrays(), 2)
    assert len(grid.asked("")) == len(grid.asked("num_examples")) == len(digits.clients)
    assert len(grid.sent("query.fedcohort")) == len(digits.clients) + 2 * 4


def test_kept_sketches_are_not_asked_for_again(digits, cohort, tmp_path):
    def run(grid, **options):
        kept = KeptSketches(tmp_path / "kept", **options)
        strategy = cohort("sketch-match", cohort_size=3, sketches=kept)
        strategy.start(grid, digits.arrays(), 2)
        return strategy

    fewer, again, grid = digits.grid(), digits.grid(), digits.grid()
    fewer.remove(digits.node("client-7"))
    run(fewer)
    second = run(again)
    assert [node for node, _ in again.asked("race_sketch")] == [digits.node("client-7")]
    plain = cohort("sketch-match", cohort_size=3)
    plain.start(grid, digits.arrays(), 2)
    assert [r.selected for r in second.history] == [r.selected for r in plain.history]
    old = digits.grid()
    run(old, max_days=1e-9)
    assert len(old.asked("race_sketch")) == 8
    with pytest.raises(ConfigError, match="max_days=0"):
        KeptSketches(tmp_path, max_days=0)


def wider(digits, client):
    """A client whose data have two more columns of zeros."""
    x, y = digits.examples(client)
    app = digits.changing_app(client, lambda a: a, attached=False)
    attach(app, (np.pad(x.reshape(len(x), -1), ((0, 0), (0, 2))), y))
    return app


@pytest.mark.parametrize("how", ["sketches", "checkpoint"])
def test_a_later_run_knows_what_it_can_compare_with(digits, cohort, tmp_path, how):
    """A newcomer with other columns was accepted after a restart: it was compared with nobody."""
    grid, options, center = digits.grid(), {how: tmp_path / "kept"}, np.zeros(64)
    grid.remove(digits.node("client-2"))
    cohort("sketch-match", cohort_size=3, center=center, **options).start(grid, digits.arrays(), 1)
    grid.add(digits.node("client-2"), wider(digits, "client-2"), **{"client-id": "client-2"})
    strategy = cohort("sketch-match", cohort_size=3, center=center, **options)
    strategy.start(grid, digits.arrays(), 2)
    known = strategy.session.signals.known("race_sketch", digits.clients)
    assert known == tuple(c for c in digits.clients if c != "client-2")
    other = cohort("sketch-match", cohort_size=3, center=center + 1, **options)
    if how == "checkpoint":
        with pytest.raises(InvalidCheckpoint, match="center"):
            other.start(digits.grid(), digits.arrays(), 3)
    else:
        again = digits.grid()
        other.start(again, digits.arrays(), 1)
        assert len(again.asked("race_sketch")) == 8


def test_sketches_of_other_columns_are_refused_with_words(digits, cohort, caplog):
    """The same data with two more columns of zeros looked farther than truly different data."""
    grid = digits.grid()
    grid.apps[digits.node("client-2")] = wider(digits, "client-2")
    strategy = cohort("sketch-match", cohort_size=3)
    strategy.start(grid, digits.arrays(), 1)
    signals = strategy.session.signals
    assert "client-2" not in signals.known("race_sketch", digits.clients)
    assert signals.dropped["race_sketch"] == 1
    assert "66 inputs" in caplog.text and "64 inputs" in caplog.text


def test_a_private_app_is_told_once_what_its_signals_reveal(digits, cohort, caplog, monkeypatch):
    answer.warn_of_exact.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "opacus", object())
    cohort("power-of-choice:d=4", cohort_size=2).start(digits.grid(), digits.arrays(), 2)
    told = [r.getMessage() for r in caplog.records if "Privacy(" in r.getMessage()]
    assert len(told) == 1 and "Opacus" in told[0] and "'loss'" in told[0]


def test_a_private_strategy_is_told_what_signals_reveal(cohort, inner, caplog):
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(inner(), 1.0, 1.0, 4)
    cohort("sketch-match:epsilon=1", wrapper)
    assert "Privacy(" not in caplog.text
    cohort("power-of-choice:d=4", wrapper)
    assert "'loss'" in caplog.text and "Privacy(" in caplog.text


def test_a_loop_of_ones_own_has_the_cohorts_of_the_strategy(digits, cohort):
    grid, arrays = digits.grid(), digits.arrays()
    directory, session = Directory(), Session("power-of-choice:d=4", cohort_size=2, seed=3)
    collect = GridCollector(session)
    collect.begin(grid, directory.refresh(grid), arrays)
    chosen = session.begin(collect.nodes, collect).clients
    strategy = cohort("power-of-choice:d=4", cohort_size=2)
    strategy.start(digits.grid(), arrays, 1)
    assert chosen == strategy.history[0].selected
    assert session.ledger.by_kind("up") == {"num_examples": 8 * 8, "loss": 4 * 8}


# --- what is told -------------------------------------------------------------------------------


def test_each_round_is_reported_once_with_its_accuracy(digits, cohort, tmp_path):
    reports = []
    strategy = cohort("power-of-choice:d=4", cohort_size=2, on_round=reports.append,
                      out=tmp_path / "run")  # fmt: skip
    strategy.start(
        digits.grid(), digits.arrays(), 3, evaluate_fn=lambda n, arrays: {"accuracy": n / 10}
    )
    assert [r.round for r in reports] == [1, 2, 3] and reports == strategy.history
    assert [r.accuracy for r in reports] == [0.1, 0.2, 0.3]
    trained = {c for r in reports for c in r.finished}  # for `plan --durations` and simulations
    assert set(Durations.read(tmp_path / "run" / "durations.csv").per_round) == trained
    text = (tmp_path / "run" / "rounds.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [set(line["scores"]) for line in lines] == [set(r.selected) for r in reports]


def test_who_sits_out_is_announced(digits, cohort, caplog):
    grid = digits.grid()

    def leave(number, arrays):
        grid.gone = {digits.node("client-3")} if number else set()

    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        cohort(cohort_size=8).start(grid, digits.arrays(), 5, evaluate_fn=leave)
    told = [r.getMessage() for r in caplog.records if "sits out" in r.getMessage()]
    assert told[0] == "client-3 failed again and sits out until round 8"


# --- rounds that do not wait --------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.35])
def test_a_late_update_enters_the_round_in_which_it_arrives(digits, cohort, clock, beta):
    """Worth 2^-1/2 of one in time, as a step from the model that is then current.

    With beta, as in REFL: (1 - beta) of that and beta (1 - 1 / e), as it is the farthest.
    """
    each = {digits.node(c): 5.5 if c == "client-3" else 1.0 for c in digits.clients}
    grid = digits.grid_of(lambda c: digits.changing_app(c, lambda a: a + 1))
    grid.apps[digits.node("client-3")] = digits.changing_app("client-3", lambda a: a + 5)
    pace = Pace(deadline=5.0, late="next", deviation=beta)
    strategy = cohort(cohort_size=8, pace=pace, timeout=100)
    start = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    result = strategy.start(SlowGrid(grid, clock, each), start, 2)
    first, second = strategy.history
    assert first.cut == ("client-3",) and not first.late
    assert second.late == ("client-3",) and "client-3" not in second.selected
    weight = (1 - beta) * 2**-0.5 + beta * (1 - np.exp(-1))
    expected = 1 + (7 * 1 + weight * 5) / (7 + weight)
    assert result.arrays["w"].numpy() == pytest.approx(np.full(3, expected), rel=1e-5)
    assert strategy.session.ledger.total("up") == grid.bytes_crossed("up")


def test_a_resumed_run_knows_how_long_clients_take_and_what_they_weigh(
    digits, cohort, clock, tmp_path
):
    """After a restart, a deadline in percent had nothing to go by, and a liar's weight no limit."""

    def run(rounds, **options):
        each = {digits.node(client): 1.0 + i for i, client in enumerate(digits.clients)}
        grid = SlowGrid(digits.grid(), clock, each)
        strategy = cohort(cohort_size=8, pace=Pace(deadline="50%"), timeout=100, **options)
        strategy.start(grid, digits.arrays(), rounds)
        return strategy

    whole = run(4)
    run(2, checkpoint=tmp_path / "run.ckpt")
    resumed = run(4, checkpoint=tmp_path / "run.ckpt")
    assert [r.seconds for r in resumed.history] == [r.seconds for r in whole.history]
    assert resumed.replies.weights == whole.replies.weights
    assert len(whole.replies.weights) == 8


def test_a_resumed_run_says_which_late_updates_it_lost(digits, cohort, clock, tmp_path, caplog):
    """Their messages belong to the run that ended; the clients take part again."""

    def run(rounds):
        strategy = cohort(
            cohort_size=8,
            pace=Pace(deadline=5.0, late="next"),
            timeout=100,
            checkpoint=tmp_path / "run.ckpt",
        )
        strategy.start(slow(digits, clock, client_3=50.0), digits.arrays(), rounds)
        return strategy.history

    assert run(1)[0].cut == ("client-3",) and "lost" not in caplog.text
    assert "client-3" in run(2)[1].selected
    assert "late updates that were lost: 1, of client-3" in caplog.text


@pytest.mark.parametrize(("liar", "late", "most"), [(3, 3, 60), (4, 3, 60), (4, None, 50.5)])
def test_a_client_that_claims_many_examples_does_not_make_the_model_its_own(
    digits, cohort, clock, liar, late, most
):
    """2^62 examples made the next model exactly the liar's; later, where updates were late."""

    def reply(i, message):
        content = digits.update(message, lambda a: a * 0 + (100 if i == liar else 1))
        number = 2**62 if i == liar else 10
        content["metrics"] = MetricRecord({"num-examples": number, "loss": 0.5})
        return content

    grid, seconds = digits.empty_grid(), {}
    for i in range(11):  # ten are needed for a median
        app = digits.replying_app("client-0", partial(reply, i))
        grid.add(i + 1, app, **{"client-id": f"client-{i:02d}"})
        seconds[i + 1] = 5.5 if i == late else 1.0
    strategy = cohort(cohort_size=11, pace=Pace(deadline=5.0, late="next"), timeout=100)
    start = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    result = strategy.start(SlowGrid(grid, clock, seconds), start, 1 if late is None else 2)
    assert strategy.history[-1].late == (() if late is None else (f"client-{late:02d}",))
    # The liar counts for ten honest clients, once or twice.
    assert result.arrays["w"].numpy()[0] <= most
