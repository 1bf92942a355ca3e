from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.exceptions import BudgetExceeded, DataError
from fedcohort.privacy.budget import Account, BudgetLedger
from fedcohort.privacy.release import noise_for


def pure(epsilon, neighbors="add-remove"):
    return noise_for(10, epsilon, 0.0, neighbors)


def test_pure_releases_add_up_and_overspending_is_refused(tmp_path):
    path = tmp_path / "b.json"
    ledger = BudgetLedger(path, 1.0)
    assert ledger.spent() == 0
    for _ in range(4):
        ledger.charge(pure(0.25))
    assert ledger.spent() == pytest.approx(1.0)
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"b\.json: epsilon=1 of 1"):
        ledger.charge(pure(0.01))
    assert path.read_bytes() == before
    assert BudgetLedger.open(path).spent() == pytest.approx(1.0)
    with pytest.raises(DataError, match="1"):
        BudgetLedger(path, 60.0)


def test_gaussian_releases_compose_like_a_root(tmp_path):
    release = noise_for(100, 0.1, 1e-9, "add-remove")
    ledger, count = BudgetLedger(tmp_path / "b.json", 1.0, 1e-6), 0
    while count < 1000:
        try:
            ledger.charge(release)
        except BudgetExceeded:
            break
        count += 1
    with pytest.raises(BudgetExceeded, match="delta is 0"):
        BudgetLedger(tmp_path / "pure.json", 100.0).charge(release)
    rho = count * release.rho
    assert ledger.spent() == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e6)))
    assert 3 * 1.0 / 0.1 < count < 1000  # plain addition would stop after 10


@given(st.lists(st.floats(0.01, 1.0), max_size=8), st.sampled_from([0.0, 1e-6]))
def test_totals_never_exceed_plain_addition_nor_fall(epsilons, delta):
    account, last = Account(), 0.0
    for epsilon in epsilons:
        account = account.after(pure(epsilon))
        total = account.total(delta)
        assert last <= total <= sum(epsilons) + 1e-9
        last = total


HEAD = '{"epsilon": 1.0, "delta": 0.0, '


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        HEAD + '"spent": {"epsilon": -1}}',
        HEAD + '"spent": {"epsilon": NaN}}',
        HEAD + '"spent": {"money": 1}}',
        HEAD + '"spent": {}, "undelivered": ["../../x"]}',
        HEAD + '"clients": {"a": {"epsilon": 0.5}}}',
    ],
)
def test_damaged_ledgers_are_refused(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(DataError, match=r"b\.json"):
        BudgetLedger(tmp_path / "b.json", 1.0)


def test_what_does_not_add_up_is_refused(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 9.0)
    ledger.charge(pure(1.0))
    with pytest.raises(ValueError, match="replace"):
        ledger.charge(pure(1.0, "replace"))
    with pytest.raises(ValueError, match="2 parts"):
        ledger.charge(pure(1.0).join(pure(1.0)))
    assert ledger.spent() == 1.0


def test_hard_links_are_refused(tmp_path):
    real, link = tmp_path / "b.json", tmp_path / "hard.json"
    BudgetLedger(real, 1.0).charge(pure(0.7))
    link.hardlink_to(real)
    for name in (real, link):
        with pytest.raises(DataError, match="2 hard links"):
            BudgetLedger(name, 1.0)


def test_what_was_paid_for_is_kept_until_it_is_delivered(tmp_path):
    path = tmp_path / "b.json"
    ledger, drawn = BudgetLedger(path, 1.0), []

    def make():
        drawn.append(len(drawn))
        return f"noise {len(drawn)}".encode()

    first = ledger.charge_and_store([pure(0.7)], make, request="r1")
    again = BudgetLedger(path, 1.0).charge_and_store([pure(0.7)], make, request="r1")
    assert first == again == b"noise 1"
    assert ledger.spent() == pytest.approx(0.7)
    with pytest.raises(BudgetExceeded):
        ledger.charge_and_store([pure(0.2), pure(0.2)], make, request="r2")
    assert drawn == [0]  # nothing is drawn that the budget does not cover
    ledger.delivered("r1")
    assert not list((tmp_path / "b.json.undelivered").iterdir())
    with pytest.raises(BudgetExceeded):
        ledger.charge_and_store([pure(0.7)], make, request="r1")


def test_what_a_crash_left_unpaid_is_never_delivered(tmp_path):
    ledger = BudgetLedger(tmp_path / "b.json", 1.0)
    (tmp_path / "b.json.undelivered").mkdir()
    (tmp_path / "b.json.undelivered" / "r1").write_bytes(b"unpaid")
    assert ledger.charge_and_store([pure(0.7)], lambda: b"paid", request="r1") == b"paid"
    assert ledger.spent() == pytest.approx(0.7)
