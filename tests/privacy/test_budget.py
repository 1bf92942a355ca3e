from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.exceptions import BudgetExceeded, ConfigError, DataError
from fedcohort.privacy.budget import Account, BudgetLedger
from fedcohort.privacy.release import noise_for
from fedcohort.sketch.race import RaceSketch


def pure(epsilon, neighbors="add-remove"):
    return noise_for(10, epsilon, 0.0, neighbors)


def test_pure_releases_add_up_and_overspending_is_refused(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    assert ledger.spent("a") == 0
    for _ in range(4):
        ledger.spend("a", pure(0.25))
    assert ledger.spent("a") == pytest.approx(1.0)
    before = (tmp_path / "b.json").read_bytes()
    with pytest.raises(BudgetExceeded, match="'a' has spent epsilon=1 of 1"):
        ledger.spend("a", pure(0.01))
    assert (tmp_path / "b.json").read_bytes() == before
    ledger.spend("b", pure(0.9))
    assert ledger.remaining("b") == pytest.approx(0.1)


def test_gaussian_releases_compose_like_a_root(tmp_path):
    made = noise_for(100, 0.1, 1e-9, "add-remove")
    ledger = BudgetLedger(tmp_path / "b.json", 2.0, 1e-6)
    spent = 0
    for _ in range(1000):
        try:
            ledger.spend("a", made)
        except BudgetExceeded:
            break
        spent += 1
    rho = spent * made.rho
    assert ledger.spent("a") == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e6)))
    assert 3 * 2.0 / 0.1 < spent < 1000  # plain addition would stop after 20


def test_delta_counts_too(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 100.0, 0.0)
    with pytest.raises(BudgetExceeded):
        ledger.spend("a", noise_for(100, 0.1, 1e-9, "add-remove"))


@given(st.lists(st.floats(0.01, 1.0), max_size=8), st.sampled_from([0.0, 1e-6]))
def test_totals_never_exceed_plain_addition_nor_fall(epsilons, delta):
    account, last = Account(), 0.0
    for epsilon in epsilons:
        account = account.after(pure(epsilon))
        total = account.total(delta)
        assert last <= total <= sum(epsilons) + 1e-9
        last = total


def test_release_spends_before_it_releases(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    sketch = RaceSketch.srp(dim=2, rows=5, bits=2)
    sketch.add(np.ones((3, 2)))
    private = ledger.release("a", sketch, 0.6, n="private")
    assert private.release.epsilon == 0.6
    assert ledger.spent("a") == pytest.approx(0.6)
    with pytest.raises(BudgetExceeded):
        ledger.release("a", sketch, 0.6)


def test_ledger_survives_reopening_and_threads(tmp_path):
    path = tmp_path / "b.json"
    BudgetLedger(path, 50.0).spend("a", pure(1.0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: BudgetLedger(path, 50.0).spend("a", pure(1.0)), range(20)))
    assert BudgetLedger(path, 50.0).spent("a") == pytest.approx(21.0)
    with pytest.raises(DataError, match="its own"):
        BudgetLedger(path, 60.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"epsilon": 1.0, "delta": 0.0, "clients": {"a": {"epsilon": -1}}}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": {"a": {"epsilon": NaN}}}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": {"a": {"money": 1}}}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": 3}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": {}, "data": {"a": 1}, "salt": "00"}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": {}, "data": {}, "salt": "zz"}',
        '{"epsilon": 1.0, "delta": 0.0, "clients": {}, "data": {}}',
    ],
)
def test_damaged_ledgers_are_refused(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(DataError, match="not a budget ledger"):
        BudgetLedger(tmp_path / "b.json", 1.0)


def test_what_does_not_add_up_is_refused(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 9.0)
    ledger.spend("a", pure(1.0))
    with pytest.raises(ValueError, match="do not add up"):
        ledger.spend("a", pure(1.0, "replace"))
    with pytest.raises(ValueError, match="2 parts"):
        ledger.spend("a", pure(1.0).joined(pure(1.0)))
    assert json.loads((tmp_path / "b.json").read_text())["clients"]["a"]["releases"] == 1


def test_links_lead_to_the_same_ledger_or_are_refused(tmp_path, monkeypatch):
    real = tmp_path / "real" / "b.json"
    real.parent.mkdir()
    BudgetLedger(real, 1.0).spend("a", pure(0.7))
    linked = tmp_path / "link.json"
    linked.symlink_to(real)
    with pytest.raises(BudgetExceeded):
        BudgetLedger(linked, 1.0).spend("a", pure(0.7))
    BudgetLedger(linked, 1.0).spend("a", pure(0.2))
    assert linked.is_symlink()
    assert BudgetLedger(real, 1.0).spent("a") == pytest.approx(0.9)
    (tmp_path / "hard.json").hardlink_to(real)
    for name in (real, tmp_path / "hard.json"):
        with pytest.raises(DataError, match="2 hard links"):
            BudgetLedger(name, 1.0).spend("a", pure(0.05))


def test_a_relative_ledger_stays_where_it_was_opened(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    ledger = BudgetLedger("b.json", 1.0)
    ledger.spend("a", pure(0.7))
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(BudgetExceeded):
        ledger.spend("a", pure(0.7))


def test_what_was_paid_for_is_kept_until_it_is_delivered(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    made = []

    def make():
        made.append(len(made))
        return f"noise {len(made)}".encode()

    first = ledger.charge_and_store("a", [pure(0.7)], make, request="r1")
    again = BudgetLedger(tmp_path / "b.json", 1.0).charge_and_store(
        "a", [pure(0.7)], make, request="r1"
    )
    assert first == again == b"noise 1"
    assert ledger.spent("a") == pytest.approx(0.7)
    with pytest.raises(BudgetExceeded):
        ledger.charge_and_store("a", [pure(0.2), pure(0.2)], make, request="r2")
    assert made == [0]  # nothing is drawn that the budget does not cover
    ledger.delivered("r1")
    assert not list((tmp_path / "b.json.undelivered").iterdir())
    with pytest.raises(BudgetExceeded):
        ledger.charge_and_store("a", [pure(0.7)], make, request="r1")


def test_what_a_crash_left_unpaid_is_never_delivered(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    (tmp_path / "b.json.undelivered").mkdir()
    (tmp_path / "b.json.undelivered" / "r1").write_bytes(b"unpaid")
    assert ledger.charge_and_store("a", [pure(0.7)], lambda: b"paid", request="r1") == b"paid"
    assert ledger.spent("a") == pytest.approx(0.7)


def test_the_same_data_under_a_second_name_are_noticed(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    buy = ledger.charge_and_store
    buy("va", [pure(0.5)], lambda: b"x", request="r1", fingerprints=[b"rows of va"])
    with pytest.raises(ValueError, match="released before, by 'va'"):
        buy("va2", [pure(0.5)], lambda: b"x", request="r2", fingerprints=[b"rows of va"])
    assert ledger.spent("va2") == 0
    buy("other", [pure(0.5)], lambda: b"x", request="r3", fingerprints=[b"other rows"])
    text = (tmp_path / "b.json").read_text()
    assert "rows of va" not in text
    held = json.loads(text)
    assert sorted(held["data"].values()) == ["other", "va"]


@pytest.mark.parametrize("client", ["", "\ud800", 7, None])
def test_an_id_that_no_file_could_hold_is_refused(tmp_path, client):
    """The rule of sessions and registries; JSON would have turned 7 into another account."""
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    cost = noise_for(10, 0.5, 0.0, "add-remove")
    for act in (lambda: ledger.spend(client, cost), lambda: ledger.spent(client)):
        with pytest.raises(ConfigError, match="client id"):
            act()
    assert not (tmp_path / "b.json").exists()
