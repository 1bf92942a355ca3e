"""CMFL as the released code of paper 1 (FedACS) has it: a row of the suite `papers`."""

import numpy as np
import torch

from fedcohort.options import Share
from fedcohort.simulate.aggregation import Mean


class AgreeingMean(Mean):
    """The mean of models that agree with the mean step, at the server: nothing is saved on the way.

    A model agrees if the signs of a share of at least `threshold` of its steps are those of the
    round's mean step; if there is none, the model that agrees most is taken. The gate "cmfl" is the
    method of CMFL's own paper, where clients compare before they upload.
    """

    def __init__(self, threshold: Share = 0.7):
        self.threshold = threshold

    def step(self, current, updates, sizes, weights=None):
        steps = updates - current
        signs = steps.mean(dim=0).sign()
        shares = torch.stack([(step.sign() == signs).double().mean() for step in steps]).cpu()
        kept = np.flatnonzero(shares.numpy() >= self.threshold).tolist()
        kept = kept or [int(shares.argmax())]
        if weights is not None:  # they keep their sum
            left = [weights[i] for i in kept]
            scale = sum(weights) / sum(left) if sum(left) > 0 else 1.0
            weights = [weight * scale for weight in left]
        return super().step(current, updates[kept], [sizes[i] for i in kept], weights)
