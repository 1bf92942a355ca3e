"""Optimal client sampling: the paper's probabilities, unbiased, and of least variance."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import federate, load
from fedcohort.gates import OptimalSampling
from fedcohort.numerics.sampling import proportional_inclusion
from fedcohort.simulate import LocalTraining, build, simulate


def papers_probabilities(importance, m):
    """The closed form of the paper, with the clients in ascending order of w_i norm(update_i)."""
    a, n = np.sort(importance), len(importance)
    largest = max(k for k in range(1, n + 1) if 0 < m + k - n <= a[:k].sum() / a[k - 1] + 1e-12)
    p = np.ones(n)
    p[:largest] = (m + largest - n) * a[:largest] / a[:largest].sum()
    return p


@pytest.mark.parametrize("m", [1, 3, 7, 11, 12])
def test_probabilities_are_the_papers(m):
    for seed in range(50):
        importance = np.sort(np.random.default_rng(seed).lognormal(sigma=2, size=12))
        expected = papers_probabilities(importance, m)
        assert proportional_inclusion(importance, m) == pytest.approx(expected)


def test_the_weighted_sum_is_unbiased_and_varies_less_than_uniform_sampling():
    """20,000 draws: a standard error of .7 % of the mean; uniform sampling varies 4 times more."""
    rng = np.random.default_rng(0)
    norms = rng.lognormal(sigma=1.5, size=10)
    names = [f"c{i}" for i in range(10)]
    answers = {c: np.array([x], np.float32) for c, x in zip(names, norms, strict=True)}
    shares = dict.fromkeys(names, 0.1)
    gate = OptimalSampling(uploads=4)
    drawn = [gate.admit(answers, shares, rng) for _ in range(20_000)]
    sums = [sum(0.1 * f * norms[int(c[1:])] for c, f in one.items()) for one in drawn]
    assert np.mean([len(one) for one in drawn]) == pytest.approx(4, abs=0.05)
    assert np.mean(sums) == pytest.approx(0.1 * norms.sum(), rel=0.02)
    uniform = (rng.random((20_000, 10)) < 0.4) @ (norms / 4)
    assert np.var(sums) < np.var(uniform) / 4


@pytest.mark.parametrize("lie", [np.array([np.nan]), np.array([-1.0]), np.zeros(2), np.array([3])])
def test_answers_out_of_form_do_not_upload(lie):
    answers = {"liar": lie, "honest": np.array([1.0])}
    shares = {"liar": 0.5, "honest": 0.5}
    admitted = OptimalSampling(uploads=1).admit(answers, shares, np.random.default_rng(0))
    assert admitted == {"honest": 1.0}


def test_in_a_simulation_nothing_changes_if_all_upload():
    clients = federate(load("digits"), "shards", clients=20, per_client=2, seed=0)
    model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    local = LocalTraining(epochs=2, batch_size=8, lr=0.05)
    plain, everybody = (
        simulate(clients, model, "uniform", gate=gate, cohort_size=20, rounds=15, local=local)[0]
        for gate in (None, "optimal-sampling:uploads=20")
    )
    assert everybody.accuracy == pytest.approx(plain.accuracy, abs=0.01)
