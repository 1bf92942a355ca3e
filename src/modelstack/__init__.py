"""Train and evaluate many copies of one network at once, on a CPU or on GPUs.

Federated learning, ensembles and sweeps over seeds train hundreds of small models of one
architecture. One after the other they leave a machine idle: a step of a small model takes less
time than calling PyTorch. Here the copies are rows of one matrix, and a step of all of them is a
few batched products. On a GPU a whole step is a CUDA graph, with Triton kernels where they help.

A `Job` says which row a copy starts from, which samples it trains on and in which batches.
`Trainer.train` returns one row of parameters per job, equal to those of a plain loop up to
rounding, and bit for bit the same each time.

Examples
--------
Three copies of a classifier, each on its own third of the samples:

>>> import numpy as np, torch
>>> from modelstack import BatchPlan, Job, Trainer, Training
>>> _ = torch.manual_seed(0)  # of the model
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
>>> trainer = Trainer(model, Training(epochs=5, batch_size=5, lr=0.5), device="cpu")
>>> x = np.random.default_rng(0).normal(size=(300, 4))
>>> data = trainer.data(x, (x[:, 0] > 0).astype(int))
>>> jobs = [Job(0, np.arange(i, 300, 3), BatchPlan(100, 5, passes=5)) for i in range(3)]
>>> trained = trainer.train(trainer.flat(), jobs, data)
>>> tuple(trained.shape), bool((trainer.evaluate(trained, data)[0] > 0.9).all())
((3, 10), True)

Names that need PyTorch are loaded when they are first used.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
