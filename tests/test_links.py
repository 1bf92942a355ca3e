"""A folder that somebody sent does not reach out of itself: links in it lead nowhere.

Registries have their own test, in `personalize/test_maintenance.py`.
"""

from __future__ import annotations

import pytest

from fedcohort.cli import invoke
from fedcohort.exceptions import DataError
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for

SMALL = "--rounds 1 --seeds 1 --clients 4 --cohort-size 2 --set device=cpu --set local.epochs=1"
COMPARE = f"compare --policies uniform {SMALL} --out sent --resume"
SKETCH = "sketch t.csv --by site -o sent --force"
RUN_FILES = ("config.json", "rounds.jsonl", "federation.json", "checkpoint", "added-seeds")


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """The folder, beside a precious folder and a precious file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "letter").write_text("precious")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "t.csv").write_text("site,a,b\nn,1,2\ns,3,4\n" * 4)
    (tmp_path / "sent").mkdir()
    return tmp_path / "sent"


def seen(root):
    return {p: p.is_file() and p.read_bytes() for p in root.rglob("*") if "sent" not in p.parts}


@pytest.mark.parametrize("target", ["precious", "outside", "missing"])
@pytest.mark.parametrize(
    ("link", "command"),
    [
        *((link, COMPARE) for link in ("runs.json", ".lock", "uniform")),
        *((f"uniform/{name}", COMPARE) for name in RUN_FILES),
        *((link, SKETCH) for link in ("clients.json", "n.sketch", ".staging")),
    ],
)
def test_nothing_is_written_or_deleted_through_a_link(sent, capsys, link, command, target):
    """``rounds.jsonl -> ../precious`` was overwritten by --resume."""
    (sent / link).parent.mkdir(exist_ok=True)
    (sent / link).symlink_to(sent.parent / target)
    before = seen(sent.parent)
    assert invoke(command.split()) == 2
    assert "is a symbolic link" in capsys.readouterr().err.replace("\n", " ")
    assert seen(sent.parent) == before


def test_nothing_is_read_or_drawn_through_a_link(sent, capsys):
    assert invoke(COMPARE.split()) == 0
    figures = sent / "figures"
    figures.mkdir()
    for link in ("uniform/federation.json", "b", "report.html", "figures/accuracy.svg"):
        (sent / link).unlink(missing_ok=True)
        (sent / link).symlink_to(sent.parent / "precious")
        for command in ("show sent", "export sent -o x.csv", "report sent -o sent/report.html"):
            drawn = ["--figures", str(figures)] if command.startswith("report") else []
            if link.startswith("figures") and not drawn:
                continue
            assert invoke([*command.split(), *drawn]) == 2, link
            assert "is a symbolic link" in capsys.readouterr().err.replace("\n", " ")
        (sent / link).unlink()
    assert (sent.parent / "precious").read_text() == "precious"


def test_a_ledger_keeps_and_deletes_nothing_elsewhere(sent):
    """The releases that a crash left behind are deleted: behind a link, everything was."""
    (sent / "budget.json.undelivered").symlink_to(sent.parent / "outside")
    before = seen(sent.parent)
    ledger = BudgetLedger(sent / "budget.json", 9.0)
    with pytest.raises(DataError, match="is a symbolic link"):
        ledger.charge_and_store([noise_for(9, 1.0, 0.0, "replace")], bytes, request="r1")
    assert seen(sent.parent) == before
