from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import stream
from fedcohort.simulate.local import LocalTraining, Schedule, batch_plans
from modelstack.jobs import Job, lockstep


def batch_plan(seed, number, client, n, local):
    return batch_plans(seed, number, [client], [n], local)[0]


SMALL = st.integers(1, 40)


@given(n=SMALL, batch=SMALL, epochs=st.integers(1, 4))
def test_each_epoch_visits_every_sample_once_and_keeps_the_last_batch(n, batch, epochs):
    plan = batch_plan(0, 1, "a", n, LocalTraining(epochs=epochs, batch_size=batch))
    batches = plan.batches()
    for epoch in range(epochs):
        mine = [b for b, e in zip(batches, plan.epochs, strict=True) if e == epoch]
        assert sorted(np.concatenate(mine).tolist()) == list(range(n))
        assert [len(b) for b in mine[:-1]] == [batch] * (len(mine) - 1)
        assert len(mine[-1]) == (n - 1) % batch + 1
    short = batch_plan(0, 1, "a", n, LocalTraining(steps=epochs, batch_size=batch)).batches()
    assert len(short) == epochs  # the beginning of enough epochs
    assert all(map(np.array_equal, short, batches))


@given(n=SMALL, passes=st.integers(1, 4), seed=st.integers(0, 2**60))
def test_shuffles_are_those_of_the_stream(n, passes, seed):
    local = LocalTraining(epochs=passes, batch_size=1)
    plans = [batch_plan(seed, 2, name, n, local) for name in "ab"]
    jobs = [Job(0, np.arange(n), plan) for plan in plans]
    together = lockstep(jobs, local, 0.1, direct=True)
    table = np.empty((n * passes, 2, 1), np.int64)
    together.write_index(0, table)
    for j, name in enumerate("ab"):
        rng = stream(seed, "batches", 2, name)
        expected = [rng.permutation(n) for _ in range(passes)]
        assert table[:, j, 0].tolist() == np.concatenate(expected).tolist()
        assert plans[j].order.tolist() == table[:, j, 0].tolist()


def test_schedules():
    halve = Schedule(0.5, (150, 300))
    assert [halve(r) for r in (0, 149, 150, 299, 300, 999)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert Schedule(0.9)(3) == pytest.approx(0.729)
    assert LocalTraining(lr=0.2, schedule=lambda r: 1 / (r + 1)).lr_at(3) == pytest.approx(0.05)
    assert LocalTraining(lr=0.2).lr_at(7) == 0.2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0), ("batch_size", -1), ("optimizer", "rmsprop"), ("lr", float("nan")),
        ("momentum", 1.0), ("betas", (0.9, 1.0)), ("epoch_decay", 1.1), ("augment", "mixup"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ConfigError, match=f"LocalTraining: {field}="):
        LocalTraining(**{field: value})


def test_other_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"momentum=0\.9 must be 0 with Adam"):
        LocalTraining(optimizer="adam", momentum=0.9)
    with pytest.raises(ConfigError, match="Schedule: gamma="):
        Schedule(0.0)
    with pytest.raises(ConfigError, match="Schedule: milestones="):
        Schedule(0.5, (3, 3))
    with pytest.raises(ConfigError, match="client 'a' has 0 samples"):
        batch_plan(0, 0, "a", 0, LocalTraining())
