"""Switches are as wanted inside the block, and as they were after it, whatever happens."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.datasets import federate, load
from fedcohort.simulate import LocalTraining, build, simulate
from fedcohort.simulate.models import CharLSTM
from modelstack.switches import gradients_without_training, precision


def tf32() -> list[bool]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


@pytest.mark.parametrize("wanted", [False, True])
def test_products_and_convolutions_of_a_gpu_follow_the_choice(wanted):
    before = tf32()
    with suppress(KeyError), precision(torch.device("cuda"), "tf32" if wanted else "float32"):
        seen = tf32()
        raise KeyError
    assert seen == [wanted, wanted]
    assert tf32() == before


def test_a_cpu_has_no_choice():
    before = tf32()
    with precision(torch.device("cpu"), "float32" if before[0] else "tf32"):
        assert tf32() == before


@pytest.mark.parametrize(("model", "cudnn"), [(CharLSTM(5, 3, 6), False), (nn.Linear(2, 2), True)])
def test_recurrent_models_do_without_cudnn_for_gradients(model, cudnn):
    model.train()
    before = torch.backends.cudnn.enabled
    with suppress(KeyError), gradients_without_training(model):
        seen = (model.training, torch.backends.cudnn.enabled)
        raise KeyError
    assert seen == (False, before and cudnn)
    assert torch.backends.cudnn.enabled is before


def test_reduced_precision_is_within_the_spread_of_seeds():
    """Rounding products to 8 bits changes accuracy by less than another seed does."""
    clients = federate(load("digits"), "shards", clients=20, seed=0, per_client=2)
    local = LocalTraining(epochs=2, batch_size=16, lr=0.3)
    options = {"cohort_size": 4, "rounds": 12, "local": local, "seeds": range(4), "device": "cpu"}
    model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    exact, rounded = (
        np.array([
            history.accuracy[-1]
            for history in simulate(clients, model, "uniform", precision=mode, **options)
        ])
        for mode in ("float32", "bf16")
    )  # fmt: skip
    assert (exact != rounded).any()
    assert abs(exact.mean() - rounded.mean()) < exact.std(ddof=1)
