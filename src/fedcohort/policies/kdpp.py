"""FL-DP3S: a k-DPP draws clients with different profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.dpp import FixedSizeDPP, similarity_kernel
from fedcohort.numerics.sampling import sample_positions
from fedcohort.policies.base import Array, Indices, Policy, register, scored, take
from fedcohort.policies.readings import PROJECTION, vector_needs, vector_options, vectors
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

_GRADIENTS = ("gradient_sketch", "model_sketch")
_MAX_CLIENTS = 1_000  # that the k-DPP runs among
_QUANTILE, _MAX_RATIO = 0.9, 2.0  # lengths above 2 times their 0.9 quantile are clipped there


@dataclass
class KDPPState:
    """The largest distance between profiles seen so far, which scales the similarities."""

    scale: float = 0.0


@register("kdpp", when="clients should differ from each other; one small profile each, once")
class KDPP(Policy):
    """Algorithm 1 of Zhang et al.

    The cohort is drawn from a determinantal point process of fixed size: sets of similar clients
    are unlikely. Profiles are the mean outputs of the first dense layer under the initial model,
    sent once.

    Parameters
    ----------
    signal : str, default="feature_profile"
        What the profile is; "race_sketch" needs no model, "insight" is the user's own vector. The
        paper also compares gradients under the model that the client first sees ("gradient_sketch")
        and steps of local training ("model_sketch"), here by projections.
    kernel : {"similarity", "features"}
        L = S^T S with the similarities of eq. 14, or F F^T with the profiles F themselves (dual
        form), whose rank is at most the profile's length.

    Notes
    -----
    Source: paper.
    Checked: law and inclusion by enumeration.
    Reference: Zhang et al. (2023), DPP-based Client Selection with Non-IID Data, ICASSP.

    Of more than 1,000 clients, 1,000 are drawn uniformly first. Eq. 14 divides by the largest
    distance, here the largest seen so far; distances (or lengths, for "features") above twice their
    0.9 quantile are clipped, so that one client in another unit does not make all others alike.
    Scores are inclusion probabilities.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> profiles = {"a": [0.0], "b": [0.0], "c": [5.0], "d": [5.0]}
    >>> chosen = select(KDPP(), "abcd", 2, feature_profile=profiles).clients
    >>> len({"a", "b"} & set(chosen)), len({"c", "d"} & set(chosen))      # never two alike
    (1, 1)
    """

    def __init__(
        self,
        signal: str = "feature_profile",
        kernel: Literal["similarity", "features"] = "similarity",
    ) -> None:
        self.signal, self.kernel = signal, kernel
        if signal in _GRADIENTS:  # asked once, like a profile
            self.needs = Needs(profile=frozenset({signal}))
            step = {"step": True} if signal == "model_sketch" else {}
            self.signal_options = {signal: {**PROJECTION, "k": 100, **step}}
        else:
            self.needs = vector_needs("KDPP", signal, when=("profile",))
            self.signal_options = vector_options(signal)
        self.state = KDPPState()
        self._kept: tuple[tuple[ClientId, ...], Indices, FixedSizeDPP] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        answered = np.flatnonzero(signals.rounds(self.signal, round.available) >= 0)
        part = sample_positions(answered.size, _MAX_CLIENTS, rng)
        clients = take(round.available, answered[part])
        positions, process = self._process(clients, signals)
        if not positions.size:
            return Selection(())
        size = min(round.size, positions.size)
        drawn = process.sample(size, rng)
        inclusion = process.inclusion(size)[drawn] * (part.size / max(answered.size, 1))
        return scored(clients, positions[drawn], inclusion)

    def _process(
        self, clients: tuple[ClientId, ...], signals: Signals
    ) -> tuple[Indices, FixedSizeDPP]:
        """The k-DPP of these clients; profiles never change, so names decide whether to reuse."""
        kept = self._kept
        if kept is not None and kept[0] == clients:
            return kept[1], kept[2]
        positions, rows = vectors(signals, self.signal, clients)
        if not positions.size:
            return positions, FixedSizeDPP(np.empty(0), np.empty((0, 0)))
        if self.kernel == "features":
            lengths = np.linalg.norm(rows, axis=1)
            clipped = _clipped(lengths) / np.where(lengths > 0, lengths, 1.0)
            process = FixedSizeDPP.from_features(rows * clipped[:, None])
        else:
            from scipy.spatial.distance import pdist

            distances = _clipped(pdist(rows))
            self.state.scale = max(self.state.scale, float(distances.max(initial=0.0)))
            process = FixedSizeDPP.from_kernel(similarity_kernel(distances, self.state.scale))
        self._kept = (clients, positions, process)
        return positions, process


def _clipped(lengths: Array) -> Array:
    """Clip outliers, unless too few others are there to call them that."""
    if len(lengths) < 10:
        return lengths
    return np.minimum(lengths, _MAX_RATIO * max(float(np.quantile(lengths, _QUANTILE)), 1e-300))
