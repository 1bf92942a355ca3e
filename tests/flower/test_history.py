"""What a run leaves behind: log lines, a history, and a run folder like that of a simulation."""

from __future__ import annotations

import pytest
from flwr.app import MetricRecord
from tests.flower.app.trial.task import accuracy

from fedcohort.cli import invoke
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments.results import read


def evaluate(number, arrays):
    """An evaluation at the server, as `start(evaluate_fn=...)` takes it."""
    return MetricRecord({"accuracy": accuracy(arrays), "loss": 1.0})


def test_no_file_of_a_run_holds_the_arguments_of_the_command(digits, cohort, tmp_path, monkeypatch):
    """Flower's arguments hold an access token; it was in provenance.json and on the page."""
    monkeypatch.setattr("sys.argv", ["flwr-serverapp", "--token", "very-secret"])
    strategy = cohort(cohort_size=3, out=tmp_path / "run")
    strategy.start(digits.grid(), digits.arrays(), 1)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if b"secret" in path.read_bytes()]


def test_a_run_folder_reads_like_that_of_a_simulation(digits, cohort, tmp_path):
    for name in ("uniform", "race-softmax"):
        strategy = cohort(name, cohort_size=3, out=tmp_path / name)
        strategy.start(digits.grid(), digits.arrays(), 3, evaluate_fn=evaluate)
        (found,) = read(tmp_path / name)
        assert found.histories == [strategy.to_history()] and found.finished
        (summary,) = found.summaries
        assert summary.bytes_up == strategy.session.ledger.total("up")
        assert found.members[0].clients == list(digits.clients)
    assert [r.policy for r in read(tmp_path)] == ["uniform", "race-softmax"]
    assert invoke(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("uniform", "race-softmax", "client-0", "flwr"))


def test_a_run_folder_is_written_round_by_round(digits, cohort, tmp_path):
    """A run that ends with an error leaves the rounds before it."""

    def failing(number, arrays):
        if number == 3:
            raise RuntimeError("the disk is full")
        return evaluate(number, arrays)

    strategy = cohort(cohort_size=3, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="the disk is full"):
        strategy.start(digits.grid(), digits.arrays(), 4, evaluate_fn=failing)
    (found,) = read(tmp_path / "run")
    assert [r.round for r in found.histories[0].rounds] == [1, 2]
    assert found.histories[0].rounds == strategy.to_history().rounds[:2]


def test_a_run_folder_continues_with_its_checkpoint_only(digits, cohort, tmp_path):
    def run(rounds, **options):
        strategy = cohort(cohort_size=3, out=tmp_path / "run", **options)
        strategy.start(digits.grid(), digits.arrays(), rounds, evaluate_fn=evaluate)
        return strategy

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").touch()  # of a run that ended before its first round
    (tmp_path / "run" / "config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="symbolic link"):
        run(2)
    (tmp_path / "run" / "config.json").unlink()
    run(2, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(ConfigError, match=r"holds a run already.*checkpoint="):
        run(3)
    resumed = run(4, checkpoint=tmp_path / "run.ckpt")
    (found,) = read(tmp_path / "run")
    assert found.histories == [resumed.to_history()] and len(resumed.history) == 4
    assert all(r.accuracy is not None for r in resumed.history)
