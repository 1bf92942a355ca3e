"""FedCor: clients whose training is expected to lower everybody's loss the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics import gp
from fedcohort.policies.base import Policy, check_at_least, pick, register, sample_positions, sizes
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass
class FedCorState:
    """Loss changes by sample and client, the model fitted to them, and the annealing."""

    clients: list[ClientId] = field(default_factory=list)
    changes: Array = field(default_factory=lambda: np.empty((0, 0)))
    embedding: Array | None = None
    alpha: dict[ClientId, float] = field(default_factory=dict)
    before: Array = field(default_factory=lambda: np.empty(0))
    probed: int = -2
    panel: list[ClientId] | None = None


@register("fedcor", when="all clients can report a loss now and then; learns who helps whom")
class FedCor(Policy):
    """Algorithms 1 and 2 of Tang et al. [1]_.

    In warm-up and probe rounds the cohort is uniform and everybody's loss is asked for before and
    after; the changes are samples of a Gaussian whose covariance X^T X + noise is fitted, newer
    samples weighing more. In all other rounds clients are taken one after the other by the
    decrease of the overall loss that the Gaussian expects, each conditioned on those before, and
    a client taken is annealed until the next fit so that others get their turn.

    Parameters
    ----------
    warmup : int, default=15
        Uniform rounds at the start, each of which gives a sample.
    interval : int, default=10
        A probe round every so many rounds afterwards, Delta t.
    beta : float, default=0.95
        Annealing: the scale factor of a client is multiplied by it when the client is taken.
    rank : int, default=15
        Rows of X, d.
    noise_std : float, default=0.01
        Standard deviation of the noise that makes the likelihood proper; selection counts it too.
    discount : float, default=0.95
        Weight of a sample relative to the next newer one, gamma.
    history : int, default=30
        Samples kept, M + 1.
    fit : {"closed-form", "gradient"}
        The maximum of the likelihood, or gradient steps from the last fit, as in the paper.
    steps, learning_rate
        Of the gradient fit.
    panel : int, optional
        Ask only so many clients for losses, drawn anew for every probe; None asks all. The
        fit treats the others' losses as missing.

    Notes
    -----
    Where the paper trains an extra, discarded round to probe, this policy makes the probe a round
    of its own, so that nothing is trained for nothing. Places in the cohort are given uniformly to
    clients without any loss change yet, in proportion to their number. Over a subset of available
    clients all scores can be negative; annealing then still lowers a client, see
    `fedcohort.numerics.gp.greedy(demote=True)`.

    References
    ----------
    .. [1] Tang et al. (2022), FedCor: Correlation-Based Active Client Selection Strategy for
       Heterogeneous Federated Learning, CVPR.

    Examples
    --------
    >>> policy = FedCor(warmup=1)
    >>> policy.state = FedCorState(clients=["a", "b", "c"], embedding=np.array([[3.0, 1.0, -1.0]]))
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
        noise_std: float = 0.01,
        discount: float = 0.95,
        history: int = 30,
        fit: str = "closed-form",
        steps: int = 100,
        learning_rate: float = 0.01,
        panel: int | None = None,
    ) -> None:
        check_at_least(
            "FedCor", 1, warmup=warmup, rank=rank, history=history, steps=steps, panel=panel
        )
        check_at_least("FedCor", 2, interval=interval)  # 1 would make every round a probe
        for name, share in {"beta": beta, "discount": discount}.items():
            if not 0 < share <= 1:
                raise ValueError(f"FedCor: {name}={share} must lie in (0, 1]")
        if not min(noise_std, learning_rate) > 0:
            raise ValueError(f"FedCor: {noise_std=} and {learning_rate=} must be positive")
        if fit not in ("closed-form", "gradient"):
            raise ValueError(f"FedCor: fit={fit!r} must be 'closed-form' or 'gradient'")
        self.warmup, self.interval, self.beta, self.rank = warmup, interval, beta, rank
        self.noise_std, self.discount, self.history = noise_std, discount, history
        self.fit, self.steps, self.learning_rate, self.panel = fit, steps, learning_rate, panel
        self.state = FedCorState()
        self._members: tuple[ClientId, ...] = ()
        self._column: dict[ClientId, int] = {}

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Ask for losses at the start of a probe, and in the round after it."""
        follows = self.state.probed == round.number - 1
        if not follows and not self._probes(round.number):
            return ()
        if self.panel is None:
            return round.available
        if not follows or self.state.panel is None:
            chosen = sample_positions(len(round.available), self.panel, rng)
            self.state.panel = [round.available[i] for i in chosen.tolist()]
        here = set(round.available)
        return tuple(c for c in self.state.panel if c in here)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Learn from a probe that just ended; then probe, or select by Algorithm 1."""
        if self.state.probed == round.number - 1:
            self._add_sample(round, signals)
            if round.number >= self.warmup and len(self.state.changes):
                self._refit(rng)
        if self._probes(round.number):
            self.state.before = self._losses(round, signals)
            self.state.probed = round.number
            return Selection(pick(round.available, round.size, rng))
        return self._by_posterior(round, signals, rng)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Anneal those that the model picked; forget a probe in which nobody finished."""
        if self._probes(round.number):
            self.state.probed = round.number if outcome.finished else -2
        elif self.state.embedding is not None:
            for client in outcome.selected:
                self.state.alpha[client] = self.beta * self.state.alpha.get(client, 1.0)

    def _probes(self, number: int) -> bool:
        """Whether the round's cohort is uniform and its loss changes are a sample."""
        since = number - self.warmup
        return since < 0 or (since > 0 and since % self.interval == 0)

    def _losses(self, round: Round, signals: Signals) -> Array:
        """Losses reported this round, one per column of the model; NaN for clients without one."""
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
        """Append the change of each client's loss over the round that was probed."""
        after = self._losses(round, signals)
        before = _widened(self.state.before[None], after.size, np.nan)[0]
        change = after - before
        if not np.isnan(change).all():
            known = _widened(self.state.changes, after.size, np.nan)
            self.state.changes = np.vstack([known, change])[-self.history :]

    def _refit(self, rng: Generator) -> None:
        changes, state = self.state.changes, self.state
        weights = self.discount ** np.arange(len(changes) - 1, -1, -1.0)
        data = (changes, weights, self.rank, self.noise_std)
        if self.fit == "closed-form":
            state.embedding = gp.fit_low_rank(*data)
        else:
            start = state.embedding
            start = None if start is None else _widened(start, changes.shape[1], 0.0)
            state.embedding = gp.fit_gradient(
                *data, steps=self.steps, learning_rate=self.learning_rate, initial=start, rng=rng
            )
        state.alpha = {}

    def _by_posterior(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        if self.state.embedding is None:
            return Selection(())
        embedding = _widened(self.state.embedding, len(self.state.clients), 0.0)
        columns = self._columns(round.available, add=False)
        modeled = columns >= 0
        modeled[modeled] = embedding[:, columns[modeled]].any(axis=0)
        strangers = np.flatnonzero(~modeled)
        places = int(np.floor(round.size * strangers.size / len(round.available) + 0.5))
        size = min(round.size - places, int(modeled.sum()))
        alpha = np.ones(len(self.state.clients))
        for client, factor in self.state.alpha.items():
            if client in self._column:
                alpha[self._column[client]] = factor
        share = sizes(signals, self._members)
        share = share / share.sum() if share.any() else np.ones(share.size)
        model = (embedding, share, alpha, size, columns[modeled])
        taken = gp.greedy_low_rank(*model, noise_std=self.noise_std, demote=True)
        chosen = tuple(self.state.clients[i] for i in taken)
        scores = dict(zip(chosen, alpha[taken].tolist(), strict=True))
        others = pick([round.available[i] for i in strangers.tolist()], round.size - size, rng)
        return Selection(chosen + others, scores=scores)

    def _columns(self, clients: tuple[ClientId, ...], *, add: bool) -> Indices:
        """Column of each client, -1 for a stranger; `add` gives strangers a new one."""
        if len(self._members) != len(self.state.clients):
            self._members = tuple(self.state.clients)
            self._column = {client: i for i, client in enumerate(self._members)}
        if clients == self._members:
            return np.arange(len(clients))
        get = self._column.get
        columns = np.fromiter((get(c, -1) for c in clients), np.int64, len(clients))
        if add and (columns < 0).any():
            self.state.clients += [clients[i] for i in np.flatnonzero(columns < 0).tolist()]
            return self._columns(clients, add=False)
        return columns

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._members, self._column = (), {}


def _widened(values: Array, columns: int, fill: float) -> Array:
    """Return `values` with new columns at the end, all `fill`."""
    missing = columns - values.shape[1]
    if missing == 0:
        return values
    return np.hstack([values, np.full((len(values), missing), fill)])
