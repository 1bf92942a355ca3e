"""Optimal client sampling: large updates upload, weighted so that the mean is unbiased."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.gates.base import Answers, Gate, Message, numbers, register
from fedcohort.numerics.sampling import proportional_inclusion
from fedcohort.options import Count
from fedcohort.rounds import ClientId
from fedcohort.signals.projection import Vectors


@register("optimal-sampling")
class OptimalSampling(Gate):
    """Optimal client sampling of Chen, Horvath and Richtarik (their exact form, "OCS").

    All selected clients (the paper's cohort is everybody) tell the norm of their update. Each
    uploads independently with a probability in proportion to its share of the data times that norm,
    at most 1, and its update is divided by that probability: of all independent samplings with so
    many uploads on average, this one gives the unbiased aggregate of least variance.

    Parameters
    ----------
    uploads : int, optional
        The paper's m: how many upload on average; by default a third of those that answered.

    Notes
    -----
    Source: paper.
    Checked: probabilities against the paper's closed form, the mean and variance by frequencies.
    Reference: Chen, Horvath, Richtarik (2022), Optimal Client Sampling, TMLR.

    Examples
    --------
    >>> gate = OptimalSampling(uploads=2)
    >>> norms = {"a": np.array([9.0]), "b": np.array([1.0]), "c": np.array([0.0])}
    >>> gate.admit(norms, dict.fromkeys(norms, 1 / 3), np.random.default_rng(0))
    {'a': 1.0, 'b': 1.0}
    """

    on_skip: Literal["keep", "reset"] = "reset"
    profile = frozenset({"num_examples"})

    def __init__(self, uploads: Count | None = None) -> None:
        self.uploads = uploads

    def announce(self, model: Vectors) -> None:
        """Return nothing: the norm of an update needs no word from the server."""

    def probe(self, announced: Message, start: Vectors, models: Vectors) -> NDArray[np.float32]:
        steps = models.numpy() - start.numpy()
        return np.asarray(np.linalg.norm(steps, axis=1)[:, None], np.float32)

    def admit(
        self, answers: Answers, shares: Mapping[ClientId, float], rng: Generator
    ) -> dict[ClientId, float]:
        """Draw who uploads; the factor is one over the probability."""
        norms = {client: norm for client, norm in numbers(answers).items() if norm < np.inf}
        importance = np.array([shares[client] * norm for client, norm in norms.items()])
        wanted = -(-len(norms) // 3) if self.uploads is None else min(self.uploads, len(norms))
        inclusion = proportional_inclusion(importance, wanted)
        drawn = rng.random(len(norms)) < inclusion
        pairs = zip(norms, inclusion.tolist(), drawn, strict=True)
        return {client: 1 / chance for client, chance, is_drawn in pairs if is_drawn}

    def decide(self, answers: Answers) -> tuple[ClientId, ...]:
        """Return all that answered; `admit` draws among them."""
        return tuple(answers)
