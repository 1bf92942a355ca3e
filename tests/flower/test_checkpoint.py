"""A run with a checkpoint continues after a restart as if it had never stopped."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from tests.flower.conftest import outcomes

from fedcohort.exceptions import InvalidCheckpoint
from fedcohort.flower.server.inner import load_state_dict, settings, state_dict
from fedcohort.gates import SketchToSkip
from fedcohort.policies import POLICIES, Uniform

#: Options of the inner strategies that are resumed.
RESUMED = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.9},
    "FedAdam": {"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99},
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
@pytest.mark.parametrize("name", RESUMED)
def test_a_restart_continues_as_if_nothing_had_happened(
    digits, cohort, inner, tmp_path, name, gate
):
    def run(rounds, grid, path=None):
        policy = POLICIES["fedacs"]() if gate is None else Uniform()
        inside = inner(getattr(flower, name), **RESUMED[name])
        own = copy.deepcopy(gate)
        strategy = cohort(policy, inside, cohort_size=3, gate=own, checkpoint=path)
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
    names = "round", "selected", "finished", "withheld", "bytes_up"
    assert outcomes(resumed, *names) == outcomes(whole, *names)
    assert evaluated == [2, 3, 4, 5]
    # The new server does not know that clients still hold the model: it sends and counts it again.
    again = 3 * digits.bytes if gate is not None else 0
    down = resumed.session.ledger.total("down")
    assert down == whole.session.ledger.total("down") + again == grid.bytes_crossed("down")
    for a, b in zip(result.arrays.values(), expected.arrays.values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert sorted(result.train_metrics_clientapp) == [
        n for n in sorted(expected.train_metrics_clientapp) if n > 2
    ]


def test_what_an_inner_strategy_learned_is_kept_and_what_it_was_told_is_not():
    def make(fraction):
        inside = flower.FedAvgM(server_momentum=0.9, fraction_train=fraction)
        return flower.DifferentialPrivacyServerSideAdaptiveClipping(inside, 0.01, 4)

    used = make(0.5)
    made_with = settings(used)
    used.clipping_norm = 0.37
    used.strategy.momentum_vector = [np.arange(3.0)]
    used.strategy.current_arrays = ArrayRecord([np.ones(2)])
    state = state_dict(used, made_with)
    fresh = make(1.0)
    load_state_dict(fresh, state)
    assert fresh.clipping_norm == 0.37 and fresh.strategy.fraction_train == 1.0
    assert fresh.strategy.momentum_vector[0].tolist() == [0.0, 1.0, 2.0]
    assert fresh.strategy.current_arrays == ArrayRecord([np.ones(2)])


def test_a_checkpoint_says_where_it_continues_and_refuses_another_run(
    digits, cohort, tmp_path, caplog
):
    options = {"cohort_size": 3, "checkpoint": tmp_path / "run.ckpt"}
    cohort(**options).start(digits.grid(), digits.arrays(), 2)
    finished = cohort(**options)
    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        result = finished.start(digits.grid(), digits.arrays(), 2)
    assert "after round 2" in caplog.text and len(finished.history) == 2 and result.arrays
    other = ArrayRecord({**digits.arrays(), "more": Array(np.zeros(2, np.float32))})
    with pytest.raises(InvalidCheckpoint, match=r"'more'.*\(2,\)"):
        cohort(**options).start(digits.grid(), other, 3)
    with pytest.raises(InvalidCheckpoint, match="seed"):
        cohort(seed=4, **options).start(digits.grid(), digits.arrays(), 3)
