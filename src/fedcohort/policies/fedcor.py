"""FedCor: clients whose training is expected to lower everybody's loss the most."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics import gp
from fedcohort.policies.base import (
    Policy,
    check_at_least,
    pick,
    register,
    sample_positions,
    sizes,
)
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

LOG = logging.getLogger("fedcohort")

_LARGEST_CHANGE = 10.0  # times the median absolute change of a sample; larger ones are clipped
_FEW_CHANGES = 0.5  # share of known loss changes below which the fit is not to be trusted


@dataclass
class FedCorState:
    """Loss changes by sample and client, the model fitted to them, and the annealing.

    `last_seen` is the selection in which each client was last available. `pending` says that a
    probe ended and that the losses after it are still to be asked for.
    """

    clients: list[ClientId] = field(default_factory=list)
    last_seen: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    changes: Array = field(default_factory=lambda: np.empty((0, 0)))
    embedding: Array | None = None
    noise_std: float = 0.01
    alpha: dict[ClientId, float] = field(default_factory=dict)
    before: Array = field(default_factory=lambda: np.empty(0))
    selections: int = 0
    probing: bool = False
    pending: bool = False
    panel: list[ClientId] | None = None
    warned: bool = False


@register("fedcor", when="all clients can report a loss now and then; learns who helps whom")
class FedCor(Policy):
    """Algorithms 1 and 2 of Tang et al. [1]_.

    In warm-up and probe rounds the cohort is uniform, and all clients report their loss before and
    after. The changes are samples of a Gaussian with covariance X^T X + noise, which is fitted
    with more weight on newer samples. In all other rounds clients are picked one by one. Each pick
    is the client with the largest decrease of the overall loss that the Gaussian expects, given
    the picks before. A picked client is annealed until the next fit, so that others get a turn.
    The overall loss weights clients by their number of examples, as in eq. 1 of the paper.

    Parameters
    ----------
    warmup : int, default=15
        Uniform rounds at the start. Each one gives a sample.
    interval : int, default=10
        Rounds from one probe to the next, Delta t.
    beta : float, default=0.95
        Annealing: a client's scale factor is multiplied by it when the client is picked.
    rank : int, default=15
        Rows of X, d.
    noise : float, default=0.1
        Standard deviation of the noise that makes the likelihood proper, relative to the median
        absolute loss change.
    noise_std : float, optional
        The same as an absolute number, which replaces `noise`. The released code uses 0.01.
    selection_noise : bool, default=True
        Whether selection knows the noise of the fit. Without it this is the selection that the
        paper prints (Algorithm 1): tiny variances that conditioning leaves count as full ones.
    discount : float, default=0.95
        Weight of a sample relative to the next newer one, gamma.
    history : int, default=30
        Samples kept, M + 1.
    samples : int, default=1
        Probe rounds in a row per probe, S. The paper trains S cohorts from the same model and
        discards the results; here each of them is a round that counts.
    fit : {"closed-form", "gradient"}
        The maximum of the likelihood, or gradient steps from the last fit, as in the paper.
    steps, learning_rate
        Of the gradient fit.
    first_steps : int, optional
        Steps of the first gradient fit; None means `steps`. The released code takes 1,000.
    panel : int, optional
        Ask only this many clients for losses, drawn anew for every probe; None asks all. The fit
        treats the other losses as missing.
    forget_after : int, default=100
        A client that was not available in this many selections is removed from the model.

    Notes
    -----
    Where the paper trains an extra, discarded round to probe, this policy makes the probe a round
    of its own, so no training is wasted. Rounds are counted by selections: rounds that a gate
    skips keep their cohort and count as one, and a sample is the change over all of them.

    Loss changes beyond 10 times the median absolute change of their sample are clipped. A client
    that reports false losses then has a bounded influence; an honest client whose loss jumps by
    more than that is treated as if it had jumped less.

    A change is known only for clients that are available before and after a probe. If fewer than
    half of the changes are known, the fit has little to learn from, and a warning is logged once.
    Clients without any loss change get places in proportion to their number, drawn uniformly. Over
    a subset of available clients all scores can be negative; annealing still lowers a client then,
    see `fedcohort.numerics.gp.greedy(demote=True)`.

    References
    ----------
    .. [1] Tang et al. (2022), FedCor: Correlation-Based Active Client Selection Strategy for
       Heterogeneous Federated Learning, CVPR.

    Examples
    --------
    >>> policy = FedCor(warmup=1)
    >>> policy.state = FedCorState(
    ...     clients=["a", "b", "c"], embedding=np.array([[3.0, 1.0, -1.0]]), selections=5
    ... )
    >>> round = Round(number=5, available=("a", "b", "c"), cohort_size=1)
    >>> policy.select(round, Signals(), np.random.default_rng(0)).clients
    ('a',)
    """

    needs = Needs(profile=frozenset({"num_examples"}), query=frozenset({"loss"}))

    def __init__(
        self,
        warmup: int = 15,
        interval: int = 10,
        beta: float = 0.95,
        rank: int = 15,
        noise: float = 0.1,
        noise_std: float | None = None,
        selection_noise: bool = True,
        discount: float = 0.95,
        history: int = 30,
        samples: int = 1,
        fit: str = "closed-form",
        steps: int = 100,
        first_steps: int | None = None,
        learning_rate: float = 0.01,
        panel: int | None = None,
        forget_after: int = 100,
    ) -> None:
        counts = {"warmup": warmup, "rank": rank, "history": history, "steps": steps}
        counts |= {"samples": samples, "forget_after": forget_after}
        check_at_least("FedCor", 1, **counts, panel=panel, first_steps=first_steps)
        check_at_least("FedCor", samples + 1, interval=interval)  # not every round is a probe
        for name, share in {"beta": beta, "discount": discount}.items():
            if not 0 < share <= 1:
                raise ValueError(f"FedCor: {name}={share} must lie in (0, 1]")
        positive = {"noise": noise, "noise_std": noise_std, "learning_rate": learning_rate}
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ValueError(f"FedCor: {name}={value} must be positive")
        if fit not in ("closed-form", "gradient"):
            raise ValueError(f"FedCor: fit={fit!r} must be 'closed-form' or 'gradient'")
        self.warmup, self.interval, self.beta, self.rank = warmup, interval, beta, rank
        self.noise, self.noise_std, self.discount = noise, noise_std, discount
        self.selection_noise = selection_noise
        self.history, self.samples, self.fit = history, samples, fit
        self.steps, self.learning_rate, self.panel = steps, learning_rate, panel
        self.first_steps, self.forget_after = first_steps or steps, forget_after
        self.state = FedCorState()
        self._cache: tuple[list[ClientId], tuple[ClientId, ...], dict[ClientId, int]] = (
            self.state.clients,
            (),
            {},
        )

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask for losses at the start of a probe, and in the selection after it."""
        state = self.state
        if not state.pending and not self._probes():
            return ()
        if self.panel is None:
            return round.available
        if not state.pending or state.panel is None:
            chosen = sample_positions(len(round.available), self.panel, rng)
            state.panel = [round.available[i] for i in chosen.tolist()]
        present = set(round.available)
        return tuple(c for c in state.panel if c in present)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Learn from a probe that just ended; then probe, or select by Algorithm 1."""
        state = self.state
        if state.pending:
            self._add_sample(round, signals)
            if state.selections >= self.warmup and len(state.changes):
                self._refit(rng)
        state.pending, state.probing = False, self._probes()
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

    def _probes(self) -> bool:
        """Whether the next selection is uniform and its loss changes are a sample."""
        since = int(self.state.selections) - self.warmup
        return since < 0 or (since >= self.interval and since % self.interval < self.samples)

    def _losses(self, round: Round, signals: Signals) -> Array:
        """Return the losses reported this round, one per column of the model; NaN where none."""
        fresh = np.flatnonzero(signals.rounds("loss", round.available) == round.number)
        clients = round.available
        if fresh.size < len(clients):
            clients = tuple(clients[i] for i in fresh.tolist())
        columns = self._columns(clients, add=True)
        losses = np.full(len(self.state.clients), np.nan)
        if fresh.size:
            losses[columns] = signals.values("loss", clients)
        return losses

    def _add_sample(self, round: Round, signals: Signals) -> None:
        """Append the clipped change of each client's loss over the probe."""
        after = self._losses(round, signals)
        before = _widened(self.state.before[None], after.size, np.nan)[0]
        change = after - before
        known = change[~np.isnan(change)]
        if known.size:
            limit = _LARGEST_CHANGE * float(np.median(np.abs(known)))
            if limit > 0:
                np.clip(change, -limit, limit, out=change)
            past = _widened(self.state.changes, after.size, np.nan)
            self.state.changes = np.vstack([past, change])[-self.history :]

    def _refit(self, rng: Generator) -> None:
        self._forget()
        self._warn()
        changes, state = self.state.changes, self.state
        weights = self.discount ** np.arange(len(changes) - 1, -1, -1.0)
        state.noise_std = self.noise_std or self.noise * _typical_size(changes)
        data = (changes, weights, self.rank, state.noise_std)
        if self.fit == "closed-form":
            state.embedding = gp.fit_low_rank(*data)
        else:
            start = state.embedding
            steps = self.first_steps if start is None else self.steps
            start = None if start is None else _widened(start, changes.shape[1], 0.0)
            state.embedding = gp.fit_gradient(
                *data, steps=steps, learning_rate=self.learning_rate, initial=start, rng=rng
            )
        state.alpha = {}

    def _forget(self) -> None:
        """Remove the columns of clients that were not available for a long time."""
        state = self.state
        kept = state.last_seen >= state.selections - self.forget_after
        if kept.all():
            return
        state.clients = [c for c, keep in zip(state.clients, kept.tolist(), strict=True) if keep]
        state.last_seen = state.last_seen[kept]
        state.changes = _widened(state.changes, kept.size, np.nan)[:, kept]
        state.changes = state.changes[~np.isnan(state.changes).all(axis=1)]
        if state.embedding is not None:
            state.embedding = _widened(state.embedding, kept.size, 0.0)[:, kept]

    def _warn(self) -> None:
        """Log once that too few changes are known."""
        if self.state.warned or self.panel is not None:
            return
        share = 1 - float(np.isnan(self.state.changes).mean())
        if share < _FEW_CHANGES:
            self.state.warned = True
            LOG.warning(
                "FedCor: only %.0f %% of the loss changes are known, because clients are away "
                "before or after a probe; its choice is close to random. Use a policy that asks "
                "once, such as sketch-match, or a longer warm-up",
                100 * share,
            )

    def _by_posterior(
        self, round: Round, columns: Indices, signals: Signals, rng: Generator
    ) -> Selection:
        state = self.state
        if state.embedding is None:
            return Selection(())
        embedding = _widened(state.embedding, len(state.clients), 0.0)
        modeled = columns >= 0
        modeled[modeled] = np.any(embedding, axis=0)[columns[modeled]]
        unknown = np.flatnonzero(~modeled)
        places = int(np.floor(round.size * unknown.size / len(round.available) + 0.5))
        size = min(round.size - places, int(modeled.sum()))
        members, column_of = self._members()
        alpha = np.ones(len(members))
        for client, factor in state.alpha.items():
            if client in column_of:
                alpha[column_of[client]] = factor
        share = sizes(signals, members)
        share = share / share.sum() if share.any() else np.ones(share.size)
        model = (embedding, share, alpha, size, columns[modeled])
        noise_std = state.noise_std if self.selection_noise else 0.0
        taken = gp.greedy_low_rank(*model, noise_std=noise_std, demote=True)
        chosen = tuple(members[i] for i in taken)
        scores = dict(zip(chosen, alpha[taken].tolist(), strict=True))
        others = pick([round.available[i] for i in unknown.tolist()], round.size - size, rng)
        return Selection(chosen + others, scores=scores)

    def _members(self) -> tuple[tuple[ClientId, ...], dict[ClientId, int]]:
        """Return the modeled clients and their columns; `state.clients` is never changed in place.

        A cache: it is derived from the state alone.
        """
        if self._cache[0] is not self.state.clients:
            members = tuple(self.state.clients)
            self._cache = (self.state.clients, members, {c: i for i, c in enumerate(members)})
        return self._cache[1], self._cache[2]

    def _columns(self, clients: tuple[ClientId, ...], *, add: bool) -> Indices:
        """Return the column of each client, -1 for a new one; `add` gives new ones a column."""
        members, column_of = self._members()
        if clients == members:
            return np.arange(len(clients))
        columns = np.fromiter(map(column_of.get, clients, repeat(-1)), np.int64, len(clients))
        new = np.flatnonzero(columns < 0)
        if not add or not new.size:
            return columns
        state = self.state
        state.clients = state.clients + [clients[i] for i in new.tolist()]
        seen = np.full(len(state.clients), state.selections)
        seen[: len(state.last_seen)] = state.last_seen
        state.last_seen = seen
        return self._columns(clients, add=False)


def _typical_size(changes: Array) -> float:
    """Return the median absolute change, of a sample of the columns where there are many."""
    part = np.abs(changes[:, :: max(1, changes.shape[1] // 10_000)])
    part = part[~np.isnan(part)]
    size = float(np.median(part)) if part.size else 0.0
    if size > 0:
        return size
    return max(float(np.sqrt(np.square(part).mean())) if part.size else 0.0, 1e-6)


def _widened(values: Array, columns: int, fill: float) -> Array:
    """Return `values` with new columns at the end, all `fill`."""
    missing = columns - values.shape[1]
    if missing == 0:
        return values
    return np.hstack([values, np.full((len(values), missing), fill)])
