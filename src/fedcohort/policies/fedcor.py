"""FedCor: clients whose training is expected to lower everybody's loss the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Annotated, Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics import gp
from fedcohort.options import Count, Positive, PositiveShare, Range
from fedcohort.policies.base import Array, Indices, Policy, pick, register, take, values_for
from fedcohort.policies.readings import shares
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

_MAX_CHANGE = 10.0  # times the median absolute change of a sample; larger ones are clipped
_RANK = 15  # rows of the embedding X
_DISCOUNT, _HISTORY = 0.95, 30  # of a sample relative to the next newer one; samples kept
_NOISE = 0.1  # standard deviation of the noise over the median absolute change
_FORGET = 30  # selections in a row without a client, after which its column goes
_STEPS, _LEARNING_RATE = 100, 0.01  # of the gradient fit


@dataclass
class FedCorState:
    """Loss changes by sample and client, the model fitted to them, and the annealing."""

    clients: list[ClientId] = field(default_factory=list)
    last_seen: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # selection number
    changes: Array = field(default_factory=lambda: np.empty((0, 0)))
    embedding: Array | None = None
    noise_std: float = 0.01
    alpha: dict[ClientId, float] = field(default_factory=dict)
    before: Array = field(default_factory=lambda: np.empty(0))
    selections: int = 0
    warm: int = -1  # the selection with which the warm-up ended
    probing: bool = False
    pending: bool = False  # a probe ended; the losses after it are still to be asked for


@register("fedcor", when="all clients can report a loss now and then; learns who helps whom")
class FedCor(Policy):
    """Algorithms 1 and 2 of Tang et al.

    In warm-up and probe rounds the cohort is uniform, and all clients report their loss before and
    after. The changes are samples of a Gaussian with covariance X^T X + noise; newer ones count
    more. In all other rounds each pick is the client from which the Gaussian expects the largest
    decrease of the overall loss, given the picks before. Picked clients are annealed until the next
    fit, so that others get a turn.

    Parameters
    ----------
    warmup : int, default=15
        Uniform selections at the start, a sample each; where a gate skips most rounds, fewer: it
        ends after three times as many rounds, with five samples at least.
    interval : int, default=10
        Selections from one probe to the next, Delta t.
    beta : float, default=0.95
        Annealing: a client's scale is multiplied by it when the client is picked.
    noise_std : float, optional
        Standard deviation of the noise, 0.01 in the released code; by default a tenth of the median
        absolute loss change.
    selection_noise : bool, default=True
        Whether selection knows the noise of the fit. False is the paper's Algorithm 1, where tiny
        variances that conditioning leaves count as full ones.
    fit : {"closed-form", "gradient"}
        The maximum of the likelihood, or 100 Adam steps from the last fit, as in the paper.
    first_steps : int, default=100
        Steps of the first gradient fit. The released code takes 1,000.

    Notes
    -----
    Source: paper, and the authors' released code where options say so.
    Checked: selection against literal conditioning, fits against the likelihood.
    Reference: Tang et al. (2022), FedCor: Correlation-Based Active Client Selection, CVPR.

    X has 15 rows. The paper trains an extra, discarded round to probe; here the probe is a round of
    its own. A loss change counts as at most 10 times the median of its sample, a missing one as its
    mean. A client away in 30 selections in a row is forgotten. Clients without any loss change get
    places in proportion to their number.
    """

    needs = Needs(profile=frozenset({"num_examples"}), query=frozenset({"loss"}))

    def __init__(
        self,
        warmup: Count = 15,
        interval: Annotated[int, Range(2)] = 10,
        beta: PositiveShare = 0.95,
        noise_std: Positive | None = None,
        selection_noise: bool = True,
        fit: Literal["closed-form", "gradient"] = "closed-form",
        first_steps: Count = _STEPS,
    ) -> None:
        self.warmup, self.interval, self.beta = warmup, interval, beta
        self.noise_std, self.selection_noise = noise_std, selection_noise
        self.fit, self.first_steps = fit, first_steps
        self.state = FedCorState()

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask for losses at the start of a probe, and in the selection after it."""
        return round.available if self.state.pending or self._probes(round) else ()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Learn from a probe that just ended; then probe, or select by Algorithm 1."""
        state = self.state
        learned = state.pending
        if learned:
            self._add_sample(round, signals)
        state.pending, state.probing = False, self._probes(round)
        self._forget()
        if learned and state.warm >= 0 and len(state.changes):
            self._refit(rng)
        if state.probing:
            state.before = self._losses(round, signals)
        columns = self._columns(round.available, add=False)
        if len(state.last_seen):
            state.last_seen[columns[columns >= 0]] = state.selections
        state.selections += 1
        if state.probing:
            return Selection(pick(round.available, round.size, rng))
        return self._by_posterior(round, columns, signals, rng)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Anneal those that the model picked; a probe in which nobody finished teaches nothing."""
        if self.state.probing:
            self.state.pending = bool(outcome.finished)
        elif self.state.embedding is not None:
            for client in outcome.selected:
                self.state.alpha[client] = self.beta * self.state.alpha.get(client, 1.0)

    def _probes(self, round: Round) -> bool:
        """Whether the next selection is uniform and its loss changes are a sample."""
        state = self.state
        if state.warm < 0:
            late = round.number >= 3 * self.warmup and len(state.changes) >= min(5, self.warmup)
            if state.selections < self.warmup and not late:
                return True
            state.warm = state.selections
        since = int(state.selections - state.warm)
        return since >= self.interval and since % self.interval == 0

    def _losses(self, round: Round, signals: Signals) -> Array:
        """Return the losses reported this round, one per column of the model; NaN where none."""
        fresh = np.flatnonzero(signals.rounds("loss", round.available) == round.number)
        clients = round.available
        if fresh.size < len(clients):
            clients = take(clients, fresh)
        columns = self._columns(clients, add=True)
        losses = np.full(len(self.state.clients), np.nan)
        if fresh.size:
            losses[columns] = signals.values("loss", clients)
        return losses

    def _add_sample(self, round: Round, signals: Signals) -> None:
        """Append the clipped change of each client's loss over the probe."""
        change = self._losses(round, signals) - self.state.before
        reported = change[~np.isnan(change)]
        if reported.size:
            limit = _MAX_CHANGE * float(np.median(np.abs(reported)))
            if limit > 0:
                np.clip(change, -limit, limit, out=change)
            self.state.changes = np.vstack([self.state.changes, change])[-_HISTORY:]

    def _refit(self, rng: Generator) -> None:
        changes, state = self.state.changes, self.state
        weights = _DISCOUNT ** np.arange(len(changes) - 1, -1, -1.0)
        state.noise_std = self.noise_std or _NOISE * _typical_size(changes)
        data = (changes, weights, _RANK, state.noise_std)
        if self.fit == "closed-form":
            state.embedding = gp.fit_low_rank(*data)
        else:
            start = state.embedding
            steps = self.first_steps if start is None else _STEPS
            state.embedding = gp.fit_gradient(
                *data, rng, steps=steps, learning_rate=_LEARNING_RATE, initial=start
            )
        state.alpha = {}

    def _forget(self) -> None:
        """Remove the columns of clients that were not available for a long time."""
        state = self.state
        kept = state.last_seen >= state.selections - _FORGET
        if kept.all():
            return
        state.clients = list(compress(state.clients, kept.tolist()))
        state.last_seen, state.before = state.last_seen[kept], state.before[kept]
        changes = state.changes[:, kept]
        state.changes = changes[~np.isnan(changes).all(axis=1)]
        if state.embedding is not None:
            state.embedding = state.embedding[:, kept]

    def _by_posterior(
        self, round: Round, columns: Indices, signals: Signals, rng: Generator
    ) -> Selection:
        state = self.state
        if state.embedding is None:
            return Selection(())
        modeled = columns >= 0
        modeled[modeled] = np.any(state.embedding, axis=0)[columns[modeled]]
        unknown = np.flatnonzero(~modeled)
        places = int(np.floor(round.size * unknown.size / len(round.available) + 0.5))
        size = min(round.size - places, int(modeled.sum()))
        members = tuple(state.clients)
        alpha = values_for(state.alpha, members, 1.0)
        model = (state.embedding, shares(signals, members), alpha, size, columns[modeled])
        noise_std = state.noise_std if self.selection_noise else 0.0
        taken = gp.greedy(*model, noise_std=noise_std, demote=True)
        chosen = tuple(members[i] for i in taken)
        others = pick(take(round.available, unknown), round.size - size, rng)
        return Selection(chosen + others)

    def _columns(self, clients: Sequence[ClientId], *, add: bool) -> Indices:
        """Return the column of each client, -1 for a new one; `add` gives new ones a column."""
        state = self.state
        column_of = {client: column for column, client in enumerate(state.clients)}
        new = [client for client in clients if client not in column_of] if add else []
        if new:
            column_of |= {client: len(column_of) + i for i, client in enumerate(new)}
            state.clients += new
            at_end = (0, len(new))
            state.last_seen = np.pad(state.last_seen, at_end, constant_values=state.selections)
            state.before = np.pad(state.before, at_end, constant_values=np.nan)
            state.changes = np.pad(state.changes, ((0, 0), at_end), constant_values=np.nan)
            if state.embedding is not None:
                state.embedding = np.pad(state.embedding, ((0, 0), at_end))
        return values_for(column_of, clients, -1).astype(np.int64)


def _typical_size(changes: Array) -> float:
    """Return the median absolute change, of a sample of the columns where there are many."""
    part = np.abs(changes[:, :: max(1, changes.shape[1] // 10_000)])
    part = part[~np.isnan(part)]
    size = float(np.median(part)) if part.size else 0.0
    if size > 0:
        return size
    return max(float(np.sqrt(np.square(part).mean())) if part.size else 0.0, 1e-6)
