"""FL-DP3S: a k-DPP draws clients with different profiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics.dpp import FixedSizeDPP, similarity_kernel
from fedcohort.policies.base import (
    Policy,
    check_at_least,
    check_weights,
    inverse_inclusion,
    register,
    sample_positions,
    sizes,
    vector_needs,
    vectors,
)
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_GRADIENTS = ("gradient_sketch", "model_sketch")


@dataclass
class KDPPState:
    """The largest distance between profiles seen so far, which scales the similarities."""

    scale: float = 0.0


@register("kdpp", when="clients should differ from each other; one small profile each, once")
class KDPP(Policy):
    """Algorithm 1 of Zhang et al. [1]_.

    The cohort is drawn from a determinantal point process of fixed size: sets of similar clients
    are unlikely. Profiles are the mean outputs of the first dense layer under the initial model,
    sent once. Any other vector, such as the distribution sketch, can be used instead.

    Parameters
    ----------
    signal : str, default="feature_profile"
        What the profile is; "race_sketch" needs no model, "insight" is the user's own vector.
        Paper 4 also compares profiles by gradients ("gradient_sketch": projections of the gradient
        under the model that the client first sees) and by representative gradients
        ("model_sketch": projections of the step of local training).
    kernel : {"similarity", "features"}
        L = S^T S with the similarities of eq. 14, or F F^T with the profiles F themselves, which
        needs no matrix of clients x clients (dual form) but has at most the profile's rank.
    candidates : int, optional
        With more clients than this, this many are drawn uniformly and the k-DPP runs among them.
        None always uses all clients.
    weights : {None, "inverse-inclusion"}
        A k-DPP does not include all clients equally often. "inverse-inclusion" weights each client
        by its share of the data over its probability to be drawn, which makes the aggregate
        unbiased.
    rows, bits, seed
        Of the sketches, for signal="race_sketch"; `seed` also of the projections.
    k : int, default=100
        Length of the projections of gradients.

    Notes
    -----
    The eigendecomposition is done when the available profiles change and reused otherwise.
    Eq. 14 divides by the largest distance; here it is the largest seen so far, so that a client
    that leaves does not change the others' similarities. A cohort larger than the kernel's rank
    is filled uniformly.

    References
    ----------
    .. [1] Zhang et al. (2023), DPP-based Client Selection for Federated Learning with Non-IID
       Data, ICASSP.

    Examples
    --------
    >>> signals = Signals()
    >>> profiles = {"a": [0.0], "b": [0.0], "c": [5.0], "d": [5.0]}
    >>> _ = signals.record("feature_profile", profiles, stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> chosen = KDPP().select(round, signals, np.random.default_rng(0)).clients
    >>> len({"a", "b"} & set(chosen)), len({"c", "d"} & set(chosen))      # never two alike
    (1, 1)
    """

    def __init__(
        self,
        signal: str = "feature_profile",
        kernel: str = "similarity",
        candidates: int | None = 1000,
        weights: str | None = None,
        rows: int = 10,
        bits: int = 6,
        seed: int = 0,
        k: int = 100,
    ) -> None:
        if kernel not in ("similarity", "features"):
            raise ValueError(f"KDPP: kernel={kernel!r} must be 'similarity' or 'features'")
        check_at_least("KDPP", 1, candidates=candidates)
        check_weights("KDPP", weights)
        extra = ("num_examples",) if weights else ()
        if signal in _GRADIENTS:  # asked once, like a profile
            self.needs = Needs(profile=frozenset({signal, *extra}))
            options: dict[str, Option] = {"k": k, "kind": "sparse", "seed": seed}
            if signal == "model_sketch":
                options["step"] = True
            self.signal_options = {signal: options}
        else:
            self.needs = vector_needs("KDPP", signal, *extra, when=("profile",))
        self.signal, self.kernel, self.limit, self.weights = signal, kernel, candidates, weights
        if signal == "race_sketch":
            self.signal_options = {signal: {"rows": rows, "bits": bits, "seed": seed}}
        self.state = KDPPState()
        self._kept: tuple[tuple[ClientId, ...], Indices, FixedSizeDPP] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Draw candidates where there are many, then the cohort among them."""
        known = np.flatnonzero(signals.rounds(self.signal, round.available) >= 0)
        part = sample_positions(known.size, self.limit, rng)
        clients = round.available
        if part.size < len(clients):
            clients = tuple(clients[i] for i in known[part].tolist())
        positions, process = self._process(clients, signals)
        if not positions.size:
            return Selection(())
        size = min(round.size, positions.size)
        drawn = process.sample(size, rng)
        inclusion = process.inclusion(size)[drawn] * (part.size / max(known.size, 1))
        chosen = tuple(clients[i] for i in positions[drawn].tolist())
        weights = None
        if self.weights is not None:
            total = max(float(sizes(signals, round.available).sum()), 1.0)
            weights = inverse_inclusion(sizes(signals, chosen) / total, inclusion)
        return Selection(chosen, weights, dict(zip(chosen, inclusion.tolist(), strict=True)))

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
            process = FixedSizeDPP.from_features(rows)
        else:
            from scipy.spatial.distance import pdist

            distances = pdist(rows)
            self.state.scale = max(self.state.scale, float(distances.max(initial=0.0)))
            kernel = similarity_kernel(rows, self.state.scale, distances)
            process = FixedSizeDPP.from_kernel(kernel)
        self._kept = (clients, positions, process)
        return positions, process
