"""The reference: one client after the other, by autograd and PyTorch's own optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def loaded(model, row):
    """Return a copy of a model with these parameters."""
    net = copy.deepcopy(model)
    vector_to_parameters(row.clone(), net.parameters())
    return net


def optimizer_of(net, local, lr):
    if local.optimizer == "adam":
        options = {"betas": local.betas, "eps": local.eps}
        return torch.optim.Adam(net.parameters(), lr, weight_decay=local.weight_decay, **options)
    options = {"momentum": local.momentum, "weight_decay": local.weight_decay}
    return torch.optim.SGD(net.parameters(), lr, **options)


@pytest.fixture
def reference():
    """(model, local, params, jobs, x, y, lr) -> trained parameters, and gradients."""

    def train(model, local, params, work, x, y, lr, loss=nn.functional.cross_entropy):
        trained, slopes = [], []
        for job in work:
            net, start = (loaded(model, params[job.row]) for _ in range(2))
            slope = loss(start(x[job.positions]), y[job.positions]).mean()
            slope.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in start.parameters()]
            slopes.append(torch.cat([g.flatten() for g in grads]))
            optimizer = optimizer_of(net, local, lr)
            for batch, epoch in zip(job.plan.batches(), job.plan.epochs, strict=True):
                at = torch.from_numpy(job.positions[batch])
                total = loss(net(x[at]), y[at]).mean()
                for p, p0 in zip(net.parameters(), start.parameters(), strict=True):
                    total = total + local.prox_mu / 2 * (p - p0.detach()).pow(2).sum()
                optimizer.param_groups[0]["lr"] = lr * local.epoch_decay ** int(epoch)
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
            trained.append(parameters_to_vector(net.parameters()).detach())
        return torch.stack(trained), torch.stack(slopes)

    return train
