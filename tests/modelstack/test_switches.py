"""Switches are as wanted inside the block, and as they were after it, whatever happens."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(("model", "cudnn"), [(CharLSTM(5, 3, 6), False), (nn.Linear(2, 2), True)])
def test_recurrent_models_do_without_cudnn_for_gradients(model, cudnn):
    model.train()
    before = torch.backends.cudnn.enabled
    with suppress(KeyError), gradients_without_training(model):
        seen = (model.training, torch.backends.cudnn.enabled)
        raise KeyError
    assert seen == (False, before and cudnn)
    assert torch.backends.cudnn.enabled is before
