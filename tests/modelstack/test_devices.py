"""Several devices give the result of one; the CPU named twice stands for two devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.datasets import federate, load
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.simulate.local import jobs
from modelstack.devices import MultiDeviceTrainer
from modelstack.jobs import Job
from modelstack.trainer import Trainer
from modelstack.training import Unsupported


def make(name):
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(7)
        if name == "conv":
            return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
        layers = (nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5))
        return nn.Sequential(nn.Flatten(), *layers)


ENGINES = [("dense", "stacked"), ("dense", "vmap"), ("dense", "loop"), ("conv", "loop")]


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu, cpu, cpu"])
@pytest.mark.parametrize("sizes", [(16, 16, 16, 16, 16), (1, 7, 30, 16, 8)])
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_devices_change_no_result(name, engine, sizes, devices):
    """All that runs on several devices, dropout masks included.

    Not a bit changes in a loop, nor where clients are of one size. Side by side, the padding of
    uneven batches depends on the clients beside, and with it the order of sums.
    """
    local = LocalTraining(epochs=2, batch_size=8, lr=0.1, momentum=0.5)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(sizes), 1, 8, 8)), rng.integers(0, 5, sum(sizes))
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    one = Trainer(make(name), local, engine=engine, device="cpu")
    several = MultiDeviceTrainer(make(name), local, engine=engine, device=devices)
    data = one.data(x, y)
    rows = torch.stack([one.flat(), 0.5 * one.flat(), 2 * one.flat()])
    work = jobs(one, 3, 1, "abcde", parts, [i % 3 for i in range(5)])
    exact = engine == "loop" or len(set(sizes)) == 1
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for cohort in (work, work[:1], []):
        expected = one.train(rows, cohort, data, lr=0.05).clone()
        torch.testing.assert_close(several.train(rows, cohort, data, lr=0.05), expected, **close)
    plain = [Job(job.row, job.positions) for job in work]
    found, expected = (t.gradients(rows, plain, data) for t in (several, one))
    torch.testing.assert_close(found, expected, **close)
    found, expected = (t.losses(rows, plain, data, power=2) for t in (several, one))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for found, expected in zip(several.evaluate(rows, data), one.evaluate(rows, data), strict=True):
        assert found.tolist() == expected.tolist()


def test_a_simulation_on_two_devices_equals_one_on_one():
    data = load("digits")
    found = []
    for device in ("cpu", "cpu,cpu"):
        simulation = Simulation(
            federate(data, "dirichlet-per-client", clients=20, seed=0, alpha=0.5),
            lambda seed: build("mlp-64-30", data.x.shape[1:], data.classes, seed=seed),
            "power-of-choice",
            cohort_size=7,
            local=LocalTraining(epochs=2, batch_size=8, lr=0.1, augment="crop-flip"),
            seeds=(0, 1),
            device=device,
        )
        records = [simulation.step() for _ in range(3)]
        found.append((records, [seed.model.numpy().tobytes() for seed in simulation.seeds]))
    assert found[0] == found[1]


def test_a_wrong_device_is_named():
    with pytest.raises(Unsupported, match="device='nowhere'"):
        MultiDeviceTrainer(make("conv"), device="cpu,nowhere")
    with pytest.raises(Unsupported, match="device='cpu,cpu': Trainer takes one device"):
        Trainer(make("conv"), device="cpu,cpu")
