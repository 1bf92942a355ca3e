"""Several processes write to one place at once: nothing is lost, doubled or mixed."""

from __future__ import annotations

import dataclasses
import os
import time
from multiprocessing import get_context

import numpy as np
import pytest

from fedcohort.exceptions import BudgetExceeded, FedcohortError, FolderInUse
from fedcohort.personalize import Registry, check
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for
from fedcohort.sketch.race import RaceSketch

FORK = get_context("fork")


def at_once(function, arguments):
    """Call a function in one process for each argument, all together; return what it returned."""
    out, gate = FORK.SimpleQueue(), FORK.Event()

    def work(argument):
        gate.wait()
        try:
            out.put(function(argument))
        except FedcohortError as error:
            out.put(error)

    processes = [FORK.Process(target=work, args=(argument,)) for argument in arguments]
    for process in processes:
        process.start()
    gate.set()
    found = [out.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return found


def test_one_run_folder(tmp_path):
    """Without a lock the summary had 13 of 30 rounds, with exit status 0."""
    pytest.importorskip("torch")
    from fedcohort.experiments.compare import DEFAULT_SETTING
    from fedcohort.experiments.run import run

    experiment = dataclasses.replace(
        DEFAULT_SETTING, rounds=6, seeds=(0,), checkpoint_every=2, device="cpu"
    )
    run(experiment, tmp_path / "calm")

    def write(number):
        slow = lambda records: time.sleep(0.02)  # noqa: E731
        return run(experiment, tmp_path / "shared", resume=True, on_round=slow).finished

    found = at_once(write, range(3))
    assert sum(isinstance(one, FolderInUse) for one in found) == 2
    assert True in found
    calm, shared = (tmp_path / name / "rounds.jsonl" for name in ("calm", "shared"))
    assert shared.read_bytes() == calm.read_bytes()


def test_one_ledger_by_several_names(tmp_path, monkeypatch):
    """Every name leads to the same ledger: together they pay for ten releases of .1, not more."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.json"
    link.symlink_to(tmp_path / "budget.json")
    monkeypatch.chdir(tmp_path)
    names = [tmp_path / "budget.json", link, "budget.json", "elsewhere/../budget.json", link]

    def spend(name):
        paid, ledger = 0, BudgetLedger(name, 1.0)
        os.chdir("/")  # a relative ledger stays where it was opened
        for _ in range(6):
            try:
                ledger.charge(noise_for(4, 0.1, 0.0, "add-remove"))
                paid += 1
            except BudgetExceeded:
                pass
        return paid

    assert sum(at_once(spend, names)) == 10
    assert BudgetLedger(tmp_path / "budget.json", 1.0).spent() == pytest.approx(1)


def test_one_registry_is_made_once_and_takes_all_clients(tmp_path):
    sketch = RaceSketch.srp(dim=2, rows=4, bits=2)
    sketch.add(np.tile(np.eye(2), (5, 1)))

    def make(number):
        Registry.create(tmp_path / "warm").close()
        return "made"

    found = at_once(make, range(4))
    assert found.count("made") == 1

    def add(number):
        with Registry(tmp_path / "warm") as registry:
            for i in range(5):
                registry.add(f"{number}-{i}", sketch, {"w": np.full(4, float(i))})
        return number

    assert sorted(at_once(add, range(4))) == [0, 1, 2, 3]
    with Registry(tmp_path / "warm") as registry:
        assert len(registry) == 20
        assert check(registry) == []
