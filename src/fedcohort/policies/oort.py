"""Oort: guided selection by statistical utility and speed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.numerics.sampling import draw
from fedcohort.options import NonNegative, Share
from fedcohort.policies.base import Array, Policy, register, scored, take, values_for
from fedcohort.policies.readings import by_report, sizes
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

_DECAY, _MIN_EXPLORATION = 0.98, 0.2  # of the share of unexplored clients
_WINDOW = 5  # times as many unexplored clients as places are considered
_CUTOFF = 0.95  # a score's share of the last one that fits which is enough, c in the paper
_CLIP = 0.95  # quantile at which utilities are clipped
_PACER_ROUNDS, _PACER_STEP = 20, 0.05  # rounds that the pacer compares, and how far it moves


@dataclass
class OortState:
    """What is known of explored clients, and the pacer's history of mean utilities."""

    utility: dict[ClientId, float] = field(default_factory=dict)
    last: dict[ClientId, int] = field(default_factory=dict)
    duration: dict[ClientId, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    exploited: list[ClientId] = field(default_factory=list)  # this round
    preferred: float = 0.1  # share of the clients that are not slow
    exploration: float = 0.9


@register("oort", when="clients differ in speed as well as in data, and time to accuracy counts")
class Oort(Policy):
    """Algorithm 1 of Lai et al.

    A client's utility is ``n * sqrt(mean of squared losses)`` of the received model over its data,
    and n until it has finished a round. Utilities are clipped at a quantile, scaled by the range of
    the unclipped ones, get a bonus sqrt(0.1 log R / L) for round R and the client's last round L,
    and are multiplied by (T / t)^alpha if its duration t exceeds the preferred one, T. A share of
    the cohort is drawn from clients never tried, by size; the rest in proportion to the scores,
    from those that reach .95 times that of the first client that would not fit. T is a quantile of
    the known durations, a tenth at first. Every 20 rounds the pacer raises it by 5 points if the
    utility collected since changed by at most a tenth, and lowers it if more than fivefold.

    Parameters
    ----------
    alpha : float, default=2.0
        Penalty exponent for slow clients.
    exploration : float, default=0.9
        Share of unexplored clients at first; it falls by 2 % per round, to a fifth at least.

    Notes
    -----
    Source: authors' code SymbioticLab/Oort; options of the paper (decay .98, clip .95 and cut-off
    .95, where the code's defaults are .95, .98 and .7).
    Checked: scores, cut-off and pacer by hand, the draw by frequencies.
    Reference: Lai et al. (2021), Oort: Guided Participant Selection, OSDI.

    The code's pacer compares windows that end a round earlier, it knows durations beforehand, and
    its blacklist, off by default, is not part of this. FedScale's later copy draws from ten times
    as many clients as places. Added here: a client that finishes and
    reports no loss has its utility halved, and an unknown duration counts as the median.
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss_rms", "duration"}))

    def __init__(self, alpha: NonNegative = 2.0, exploration: Share = 0.9) -> None:
        self.alpha, self.min_exploration = alpha, min(exploration, _MIN_EXPLORATION)
        self.state = OortState(exploration=exploration)

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        state = self.state
        explored = np.array([c in state.utility for c in round.available])
        state.exploration = max(state.exploration * _DECAY, self.min_exploration)
        size = sizes(signals, round.available)
        places = min(int(round.size * (1 - state.exploration)), int(explored.sum()))
        places = max(places, round.size - int((~explored).sum()))
        scores = self.scores(round, size, explored)
        chosen = draw(self._logits(scores, places), places, rng)
        known = scored(round.available, chosen, scores[chosen])
        state.exploited = list(known.clients)
        new = np.flatnonzero(~explored)
        new = new[np.argsort(-size[new], kind="stable")][: _WINDOW * (round.size - places)]
        logits = np.log(np.maximum(size[new], np.finfo(float).tiny))
        newcomers = new[draw(logits, round.size - places, rng)]
        return replace(known, clients=known.clients + take(round.available, newcomers))

    def scores(self, round: Round, size: Array, explored: NDArray[np.bool_]) -> Array:
        """Score explored clients: scaled utility, staleness bonus, slowness penalty; else -inf."""
        state, clients = self.state, round.available
        utility = values_for(state.utility, clients, np.nan)
        utility[~explored] = size[~explored]
        positive = np.sort(utility[utility > 0])
        positive = positive if positive.size else np.zeros(1)
        clip = positive[min(int(len(positive) * _CLIP), len(positive) - 1)]
        low = positive[0] * 0.999
        scores = (np.minimum(utility, clip) - low) / max(positive[-1] - low, 1e-4)
        since = values_for(state.last, clients) + 1
        scores += np.sqrt(0.1 * np.log(round.number + 1) / since)
        if state.duration and state.preferred < 1:
            ordered = np.sort(list(state.duration.values()))
            preferred = ordered[min(int(len(ordered) * state.preferred), len(ordered) - 1)]
            seconds = values_for(state.duration, clients, float(np.median(ordered)))
            slow = seconds > preferred
            scores[slow] *= (preferred / seconds[slow]) ** self.alpha
        return np.where(explored, scores, -np.inf)

    def _logits(self, scores: Array, size: int) -> Array:
        """Log-probabilities within the pool; clients below the cut-off get minus infinity."""
        ranked = np.sort(scores[scores > -np.inf])[::-1]
        if not size or not len(ranked):
            return np.full(len(scores), -np.inf)
        cut = _CUTOFF * ranked[min(size, len(ranked) - 1)]
        # A score of zero is still eligible when nothing better fills the cohort.
        logits = np.log(np.maximum(scores, np.finfo(float).tiny))
        return np.where(scores >= min(cut, ranked[size - 1]), logits, -np.inf)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Update those that reported, those that finished without a report, and the pacer."""
        state = self.state
        reported, missing = by_report(round, outcome, signals, "loss_rms")
        if reported:
            losses = np.asarray(signals.values("loss_rms", reported), np.float64)
            n = dict(zip(round.available, sizes(signals, round.available).tolist(), strict=True))
            for client, loss in zip(reported, losses.tolist(), strict=True):
                state.utility[client] = n[client] * loss
        timed, _ = by_report(round, outcome, signals, "duration")
        state.duration.update(zip(timed, signals.values("duration", timed).tolist(), strict=True))
        typical = float(np.median(list(state.utility.values()))) if state.utility else 0.0
        state.utility.update((c, state.utility.get(c, typical) / 2) for c in missing)
        state.last.update(dict.fromkeys(outcome.finished, round.number))
        collected = [state.utility[c] for c in state.exploited if c in set(reported)]
        state.history.append(sum(collected) / (len(collected) + 1e-4))
        state.history = state.history[-2 * _PACER_ROUNDS :]
        self._pace(round.number + 1)

    def _pace(self, number: int) -> None:
        state = self.state
        if number % _PACER_ROUNDS or len(state.history) < 2 * _PACER_ROUNDS:
            return
        before, after = np.array(state.history).reshape(2, -1).sum(axis=1).tolist()
        if abs(after - before) <= 0.1 * before:
            state.preferred = min(1.0, state.preferred + _PACER_STEP)
        elif abs(after - before) >= 5 * before:
            state.preferred = max(_PACER_STEP, state.preferred - _PACER_STEP)
