from __future__ import annotations

import dataclasses
import json
import os

import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.experiments import results
from fedcohort.experiments import run as running
from fedcohort.experiments.compare import DEFAULT_SETTING, compare, read
from fedcohort.experiments.config import Experiment, NamedConfig, parse
from fedcohort.experiments.results import read_histories
from fedcohort.experiments.run import check, run
from fedcohort.simulate.clock import Pace

SMALL = dataclasses.replace(
    DEFAULT_SETTING, rounds=6, seeds=(0, 1), checkpoint_every=4, device="cpu"
)

TINY = dataclasses.replace(SMALL, rounds=3, seeds=(0,), checkpoint_every=2)


def test_a_folder_tells_the_whole_story(tmp_path):
    summaries = run(SMALL, tmp_path / "run").summaries
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 12
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert parse(config) == SMALL
    found = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert {"fedcohort", "python", "numpy", "torch"} <= set(found["versions"])
    assert [(s.seed, s.rounds) for s in summaries] == [(0, 6), (1, 6)]
    assert summaries[0].bytes_up == sum(
        r.bytes_up for r in read_histories(tmp_path / "run")[0].rounds
    )
    assert summaries[0].overhead_up == pytest.approx(100.0)
    assert 0 < summaries[0].participation_entropy <= 1
    with pytest.raises(ConfigError, match="--resume"):
        run(SMALL, tmp_path / "run")
    other = dataclasses.replace(SMALL, cohort_size=4)
    with pytest.raises(ConfigError, match="another experiment: cohort_size differ"):
        run(other, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="not a run folder"):
        read_histories(tmp_path)


def test_a_torn_last_line_is_mended(tmp_path):
    run(TINY, tmp_path / "a")
    lines = tmp_path / "a" / "rounds.jsonl"
    whole = lines.read_bytes()
    with lines.open("ab") as file:
        file.write(b'{"seed": 0, "rou')
    run(TINY, tmp_path / "a", resume=True)
    assert lines.read_bytes() == whole
    for missing in (lambda: lines.write_bytes(whole[: len(whole) // 2]), lines.unlink):
        missing()
        with pytest.raises(ConfigError, match="its checkpoint knows"):
            run(TINY, tmp_path / "a", resume=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"speed": 1}, "unknown option 'speed'"), ({"d": 5}, "must be above cohort_size")],
)
def test_wrong_policies_are_found_before_the_first_run(tmp_path, options, complaint):
    policies = [NamedConfig("uniform"), NamedConfig("power-of-choice", options)]
    with pytest.raises(ConfigError, match=complaint):
        compare(SMALL, policies, tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_rounds_and_more_seeds_equal_a_run_that_had_them_at_once(tmp_path):
    whole = dataclasses.replace(SMALL, rounds=7, seeds=(0, 1, 5), policy=NamedConfig("oort"))
    run(whole, tmp_path / "whole")
    first = dataclasses.replace(whole, rounds=4, seeds=(0,))
    run(first, tmp_path / "grown")
    run(dataclasses.replace(first, rounds=5), tmp_path / "grown", resume=True)
    grown = run(whole, tmp_path / "grown", resume=True)
    for name in ("rounds.jsonl", "config.json", "federation.json"):
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [s.seed for s in grown.summaries] == [0, 1, 5]
    assert not (tmp_path / "grown" / "added-seeds").exists()
    with pytest.raises(ConfigError, match="has 7 rounds already"):
        run(dataclasses.replace(whole, rounds=5), tmp_path / "grown", resume=True)
    with pytest.raises(ConfigError, match="seeds"):
        run(dataclasses.replace(whole, seeds=(1, 0, 5)), tmp_path / "grown", resume=True)


def test_a_crash_while_seeds_are_added_loses_nothing(tmp_path, monkeypatch):
    """The lines are merged and the checkpoint is not: the next call merges again."""
    whole = dataclasses.replace(SMALL, rounds=4, seeds=(0, 1))
    run(whole, tmp_path / "whole")
    run(dataclasses.replace(whole, seeds=(0,)), tmp_path / "grown")
    save = running.storage.save

    def crash(path, state):
        if path == tmp_path / "grown" / "checkpoint":
            raise OSError("no power")
        save(path, state)

    monkeypatch.setattr(running.storage, "save", crash)
    with pytest.raises(OSError, match="no power"):
        run(whole, tmp_path / "grown", resume=True)
    monkeypatch.undo()
    run(whole, tmp_path / "grown", resume=True)
    grown, straight = (tmp_path / name / "rounds.jsonl" for name in ("grown", "whole"))
    assert grown.read_bytes() == straight.read_bytes()


OWN = """
import numpy as np
from torch import nn
from fedcohort.datasets import from_arrays
from fedcohort.policies import Uniform, register

@register("mine", when="never")
class Mine(Uniform):
    def __init__(self, width: int = 3):
        self.width = width

class Net(nn.Sequential):
    def __init__(self, shape, classes, hidden: int = 4):
        super().__init__(nn.Flatten(), nn.Linear(shape[0], hidden), nn.Linear(hidden, classes))

class Norm(Net):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.insert(2, nn.BatchNorm1d(4))

def load():
    rng = np.random.default_rng(0)
    return from_arrays(rng.integers(0, 256, (80, 6), np.uint8), np.arange(80) % 2)

def split(labels, clients, rng):
    return np.array_split(np.arange(len(labels)), clients)
"""


def test_policies_models_and_data_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "exp.toml"
    path.write_text(
        'rounds = 1\ndevice = "cpu"\nimports = ["own.py"]\npolicy = "own.py:Mine:width=2"\n'
        'model = "own.py:Net:hidden=5"\n'
        '[data]\ndataset = "own.py:load"\nclients = 8\npartition = "own.py:split"\n'
    )
    (summary,) = run(read(path), tmp_path / "run").summaries
    assert summary.rounds == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["imports"] == [str(tmp_path / "own.py")]  # found beside the file, from anywhere
    for policy, message in (("own.py:Mime", "did you mean 'Mine'"), ("owm.py:Mine", "no such")):
        with pytest.raises(ConfigError, match=message):
            check(parse({"policy": f"{tmp_path}/{policy}"}))
    with pytest.raises(ConfigError, match=r"BatchNorm1d.*use nn\.GroupNorm"):
        run(parse(config | {"model": f"{tmp_path}/own.py:Norm"}), tmp_path / "norm")


def test_a_data_set_that_needs_another_model_is_named(tmp_path):
    experiment = dataclasses.replace(SMALL, model=NamedConfig("char-lstm"))
    with pytest.raises(ConfigError, match=r"'char-lstm' cannot take the samples of digits"):
        run(experiment, tmp_path)


def test_the_defaults_learn(tmp_path):
    """20 rounds of the defaults reach 0.43; one in ten would be guessing."""
    assert run(Experiment(rounds=20, device="cpu"), tmp_path).summaries[0].accuracy > 0.3


def test_rounds_are_synced_before_the_checkpoint_that_knows_them(tmp_path, monkeypatch):
    from fedcohort import storage

    events = []
    real_sync, real_save = os.fsync, storage.save

    def sync(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(storage, "save", lambda *a: (events.append("save"), real_save(*a)))
    run(TINY, tmp_path)
    saves = [i for i, event in enumerate(events) if event == "save"]
    assert saves
    assert all(events[i - 1] == "rounds.jsonl" for i in saves)


def test_speeds_and_pace_are_settings(tmp_path):
    """Clients of unequal speed: who is slowest depends on the seed, and a deadline cuts a round."""
    slow = parse({"rounds": 3, "seeds": [0, 1], "device": "cpu", "durations": "log-normal:sigma=1"})
    fast = dataclasses.replace(slow, pace=Pace(deadline="50%"))
    first, hurried = run(slow, tmp_path / "slow").histories, run(fast, tmp_path / "fast").histories
    assert first[0].rounds[0].seconds != first[1].rounds[0].seconds
    assert hurried[0].rounds[-1].elapsed < first[0].rounds[-1].elapsed


def test_a_run_that_stops_learning_ends_early(tmp_path):
    """With a rate of almost 0, no evaluation ever beats the first one."""
    patient = parse({"rounds": 30, "seeds": [0, 1], "device": "cpu", "local": {"lr": 1e-12}})
    patient = dataclasses.replace(patient, patience=4, checkpoint_every=3)
    result = run(patient, tmp_path)
    assert [len(h.rounds) for h in result.histories] == [5, 5]
    assert result.finished and results.read(tmp_path)[0].finished
    again = run(patient, tmp_path, resume=True)
    assert again.histories == result.histories
    longer = run(dataclasses.replace(patient, patience=6), tmp_path, resume=True)
    straight = run(dataclasses.replace(patient, patience=6), tmp_path / "straight")
    assert longer.histories == straight.histories and len(longer.histories[0].rounds) == 7


def test_a_run_is_saved_when_a_callback_raises(tmp_path):
    def stop(records):
        if records[0].round == 3:
            raise KeyboardInterrupt

    experiment = dataclasses.replace(SMALL, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, on_round=stop)
    seen = []
    run(experiment, tmp_path, resume=True, on_round=lambda records: seen.append(records[0].round))
    assert seen == [4, 5, 6]
