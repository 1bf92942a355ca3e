"""Oort: guided selection by statistical utility and speed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import Policy, check_at_least, pick, register, sizes, unreported
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals


@dataclass
class OortState:
    """What Oort remembers: per explored client, and the pacer."""

    utility: dict[ClientId, float] = field(default_factory=dict)
    last: dict[ClientId, int] = field(default_factory=dict)
    duration: dict[ClientId, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    preferred: float | None = None
    step: float | None = None


@register("oort", when="clients differ in speed as well as in data, and time to accuracy counts")
class Oort(Policy):
    """Algorithm 1 of Lai et al. [1]_.

    The statistical utility of a client is ``n * sqrt(mean of squared losses)`` of the received
    model over all its data (not its last batch), known once it has finished a round. Utilities
    are clipped at a quantile, get a bonus sqrt(0.1 log R / L), where R is this round and L the
    round in which the client last took part, both counted from 1, and are multiplied by (T /
    t)^alpha if the client's duration t exceeds the preferred duration T. A share epsilon of the
    cohort is drawn from clients never tried; the rest from those whose score reaches `cutoff`
    times the score of the last client that would fit, in proportion to the scores. The pacer adds
    a step to T in each round in which the utility collected over the last `window` rounds is
    below that of the `window` rounds before.

    Parameters
    ----------
    alpha : float, default=2.0
        Penalty exponent for slow clients.
    exploration : float, default=0.9
        Share of unexplored clients in the first round.
    exploration_decay : float, default=0.98
        Factor per round.
    min_exploration : float, default=0.2
        Its floor.
    cutoff : float, default=0.95
        Width of the pool (c in the paper).
    clip : float, default=0.95
        Quantile at which utilities are clipped.
    window : int, default=20
        Rounds the pacer compares.
    preferred : float, optional
        First preferred duration T in seconds; None takes the median of the first durations seen.
    pacer_step : float, optional
        The pacer's step in seconds; None takes a tenth of the first T.
    normalize : bool, default=True
        Scale clipped utilities to [0, 1] before the bonus is added, as the released code does.
        False adds it to the raw utility, as printed in the paper, where it rarely matters.

    Notes
    -----
    Only clients that report a loss get a new utility. Added here: one that finishes and does not
    report counts as explored from then on, and its utility is halved each time, starting from the
    median, so that never reporting does not pay. One that drops out keeps its utility and its last
    round, as in the paper: the session lets it sit out, and its bonus brings it back. Unexplored
    clients are drawn uniformly, since their speed is not known in advance. Utilities are clipped
    at a quantile, which bounds what a false loss or size can gain.

    References
    ----------
    .. [1] Lai, Zhu, Madhyastha, Chowdhury (2021), Oort: Efficient Federated Learning via Guided
       Participant Selection, OSDI.

    Examples
    --------
    >>> policy = Oort(exploration=0.0, min_exploration=0.0)
    >>> policy.state = OortState(utility={"a": 1.0, "b": 50.0}, last={"a": 0, "b": 0})
    >>> round = Round(number=1, available=("a", "b"), cohort_size=1)
    >>> policy.select(round, Signals(), np.random.default_rng(0)).clients
    ('b',)
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss_rms", "duration"}))

    def __init__(
        self,
        alpha: float = 2.0,
        exploration: float = 0.9,
        exploration_decay: float = 0.98,
        min_exploration: float = 0.2,
        cutoff: float = 0.95,
        clip: float = 0.95,
        window: int = 20,
        preferred: float | None = None,
        pacer_step: float | None = None,
        normalize: bool = True,
    ) -> None:
        shares = {
            "exploration": exploration,
            "exploration_decay": exploration_decay,
            "min_exploration": min_exploration,
            "cutoff": cutoff,
            "clip": clip,
        }
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise ValueError(f"Oort: {name}={value} must lie in [0, 1]")
        check_at_least("Oort", 0, alpha=alpha, preferred=preferred, pacer_step=pacer_step)
        check_at_least("Oort", 1, window=window)
        self.alpha, self.cutoff, self.clip, self.window = alpha, cutoff, clip, window
        self.exploration, self.exploration_decay = exploration, exploration_decay
        self.min_exploration, self.normalize = min_exploration, normalize
        self.state = OortState(preferred=preferred, step=pacer_step)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Exploit the explored, explore the rest."""
        explored = [c for c in round.available if c in self.state.utility]
        unexplored = [c for c in round.available if c not in self.state.utility]
        share = max(self.min_exploration, self.exploration * self.exploration_decay**round.number)
        wanted = min(int(np.floor(share * round.size + 0.5)), len(unexplored))
        exploit = min(round.size - wanted, len(explored))
        scores = self.scores(explored, round.number)
        chosen = pick(explored, exploit, rng, self._logits(scores, exploit))
        chosen += pick(unexplored, round.size - exploit, rng)
        known = dict(zip(explored, scores.tolist(), strict=True))
        return Selection(chosen, scores={c: known[c] for c in chosen if c in known})

    def scores(self, clients: list[ClientId], round_number: int) -> NDArray[np.float64]:
        """Score explored clients: clipped utility, staleness bonus, slowness penalty."""
        if not clients:
            return np.empty(0)
        state = self.state
        utility = np.array([state.utility[c] for c in clients])
        utility = np.minimum(utility, np.quantile(utility, self.clip))
        if self.normalize:
            low, high = utility.min(), utility.max()
            utility = (utility - low) / (high - low) if high > low else np.ones(len(clients))
        number = round_number + 1  # the paper counts rounds from 1
        since = np.array([state.last[c] + 1 for c in clients])
        scores = utility + np.sqrt(0.1 * np.log(number) / since)
        if state.preferred is not None:
            seconds = np.array([state.duration.get(c, 0.0) for c in clients])
            slow = seconds > state.preferred
            scores[slow] *= (state.preferred / seconds[slow]) ** self.alpha
        return np.asarray(scores, np.float64)

    def _logits(self, scores: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """Log-probabilities within the pool; clients below the cut-off get minus infinity."""
        if size == 0:
            return np.full(len(scores), -np.inf)
        last = np.partition(scores, -size)[-size]
        # A score of zero is still eligible when nothing better fills the cohort.
        logits = np.log(np.maximum(scores, np.finfo(float).tiny))
        return np.where(scores >= self.cutoff * last, logits, -np.inf)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Update those that reported, those that finished without a report, and the pacer."""
        state = self.state
        total = 0.0
        counts = sizes(signals, round.available)
        for client in outcome.finished:
            loss = _fresh(signals, "loss_rms", client, round.number)
            seconds = _fresh(signals, "duration", client, round.number)
            if loss is None:
                continue
            state.utility[client] = float(counts[bisect_left(round.available, client)]) * loss
            state.last[client] = round.number
            total += state.utility[client]
            if seconds is not None:
                state.duration[client] = seconds
        typical = float(np.median(list(state.utility.values()))) if state.utility else 0.0
        for client in unreported(round, outcome, signals, "loss_rms"):
            state.utility[client] = state.utility.get(client, typical) / 2
            state.last[client] = round.number
        state.history = [*state.history, total][-2 * self.window :]
        self._pace()

    def _pace(self) -> None:
        state = self.state
        if state.preferred is None and state.duration:
            state.preferred = float(np.median(list(state.duration.values())))
        if state.step is None and state.preferred is not None:
            state.step = state.preferred / 10
        if len(state.history) < 2 * self.window or state.preferred is None:
            return
        if sum(state.history[: self.window]) > sum(state.history[self.window :]):
            state.preferred += state.step


def _fresh(signals: Signals, name: str, client: ClientId, round_number: int) -> float | None:
    """Return this round's reading of one client, None if it did not send one."""
    if signals.rounds(name, (client,))[0] != round_number:
        return None
    return float(signals.values(name, (client,))[0])
