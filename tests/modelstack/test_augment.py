"""Images are cropped and flipped as torchvision does it, the same on every engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedcohort.rounds import stream
from fedcohort.simulate import LocalTraining
from fedcohort.simulate.local import jobs
from modelstack import batched
from modelstack.jobs import SHIFT, crop_flip
from modelstack.trainer import Trainer
from modelstack.training import Unsupported

SIZES = (3, 20, 11)
LOCAL = LocalTraining(epochs=2, batch_size=8, lr=0.1, momentum=0.5, augment="crop-flip")


def images(count=34, shape=(3, 10, 12)):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, *shape)).astype(np.float32)
    return x, rng.integers(0, 4, count)


def padded_cropped_flipped(x, rng):
    """One image after the other, by padding and cutting."""
    drawn = rng.integers(0, [[2 * SHIFT + 1], [2 * SHIFT + 1], [2]], (3, len(x)))
    height, width = x.shape[-2:]
    out = []
    for image, (down, right, mirrored) in zip(x, drawn.T, strict=True):
        top, left = 2 * SHIFT - down, 2 * SHIFT - right
        around = functional.pad(image, (SHIFT, SHIFT, SHIFT, SHIFT))
        cut = around[..., top : top + height, left : left + width]
        out.append(cut.flip(-1) if mirrored else cut)
    return torch.stack(out)


@pytest.mark.parametrize("shape", [(3, 10, 12), (1, 5, 4), (9, 9), (2, 3, 2)])
def test_it_is_padding_cropping_and_flipping(shape):
    x = torch.from_numpy(images(40, shape)[0])
    expected = padded_cropped_flipped(x, np.random.default_rng(5))
    assert torch.equal(crop_flip(x, np.random.default_rng(5)), expected)


def model():
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(3)
        layers = (nn.Linear(3 * 10 * 12, 8), nn.ReLU(), nn.Linear(8, 4))
        return nn.Sequential(nn.Flatten(), *layers)


def setup(engine="loop", local=LOCAL, round_number=1, **options):
    x, y = images()
    trainer = Trainer(model(), local, device="cpu", engine=engine, **options)
    ends = np.cumsum(SIZES)
    parts = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    work = jobs(trainer, 7, round_number, ["a", "b", "c"], parts, [0, 0, 0])
    return trainer, work, trainer.data(x, y)


def train(*args, only=(0, 1, 2), **options):
    trainer, work, data = setup(*args, **options)
    return trainer.train(trainer.flat(), [work[i] for i in only], data).clone()


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
def test_training_is_that_on_transformed_images(engine, tables, monkeypatch):
    monkeypatch.setattr(batched, "GRAPHS", {"cpu"} if tables else set())
    _, work, data = setup(engine)
    for job in work:
        at = torch.from_numpy(job.positions)
        data.x[at] = crop_flip(data.x[at], stream(job.seed, "augment"))
    plain, work, _ = setup(engine, replace(LOCAL, augment=None))
    expected = plain.train(plain.flat(), work, data)
    assert torch.allclose(train(engine), expected, atol=1e-6)


def test_it_depends_on_the_client_and_the_round_and_not_on_the_others():
    assert torch.equal(train(only=(2,))[0], train()[2])
    assert not torch.equal(train(round_number=2), train())
    one_by_one, together = train("stacked", max_memory=1), train("stacked")
    torch.testing.assert_close(one_by_one, together, rtol=1e-4, atol=1e-6)


def test_what_clients_report_is_not_transformed():
    trainer, work, data = setup()
    plain, same, _ = setup(local=LocalTraining())
    start = trainer.flat()
    assert torch.equal(trainer.gradients(start, work, data), plain.gradients(start, same, data))
    assert trainer.losses(start, work, data).tolist() == plain.losses(start, same, data).tolist()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((34, 5), np.float32), r"needs images, but a sample is \(5,\) numbers"),
        (np.zeros((34, 5, 5), np.int64), "numbers of type int64"),
    ],
)
def test_other_data_are_refused(x, words):
    trainer, work, (_, y) = setup()
    with pytest.raises(Unsupported, match=words):
        trainer.train(trainer.flat(), work, trainer.data(x, y))
