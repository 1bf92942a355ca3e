"""`simulate`: federated training from a call, with checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from fedcohort import checkpoint as checkpoints
from fedcohort.exceptions import ConfigError
from fedcohort.simulate.history import History, RoundRecord, record_from
from fedcohort.simulate.seed import Policies
from fedcohort.simulate.simulation import Federations, Models, Options, Simulation


def simulate(
    data: Federations,
    model: Models,
    policy: Policies,
    *,
    cohort_size: int,
    rounds: int,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    on_round: Callable[[list[RoundRecord]], None] | None = None,
    **options: Unpack[Options],
) -> list[History]:
    """Train a model federatedly and return what happened, one history a seed.

    Parameters
    ----------
    data : Federation or callable
        The clients' data, or a function from seed to them; all seeds share one data set.
    model : nn.Module or callable
        The model, or a function from seed to it. Any module without running statistics.
    policy : str, Policy or callable
        A name of the registry, a policy (copied for each seed) or a function that makes one.
    cohort_size, rounds : int
        Clients a round, and rounds.
    checkpoint : path, optional
        A file to continue from if it exists, and to save to every `checkpoint_every` rounds.
    on_round : callable, optional
        Called with the records of every round.
    **options
        ``local`` (LocalTraining), ``aggregation`` ("mean", "size-weighted", "fedavgm", "fedadam"
        or an object), ``availability``, ``dropout`` (probability that a selected client does not
        finish), ``durations``, ``seeds``, ``device``, ``engine``, ``loss``, ``evaluate_every``,
        ``insight``: see `Simulation`.

    Examples
    --------
    >>> from fedcohort.datasets import federate, load
    >>> from fedcohort.simulate import build, simulate
    >>> clients = federate(load("digits"), "shards", clients=20, seed=0)
    >>> model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    >>> history = simulate(clients, model, "uniform", cohort_size=5, rounds=2)[0]
    >>> len(history.accuracy), len(history.selections[0])
    (2, 5)
    """
    if rounds < 1:
        raise ConfigError(f"simulate: rounds={rounds} must be at least 1")
    simulation = Simulation(data, model, policy, cohort_size=cohort_size, **options)
    histories = [History(s.seed) for s in simulation.sessions]
    if checkpoint is not None and Path(checkpoint).exists():
        _restore(simulation, histories, checkpoints.load(checkpoint))
    while simulation.round_number < rounds:
        records = simulation.step()
        for history, record in zip(histories, records, strict=True):
            history.rounds.append(record)
        if on_round is not None:
            on_round(records)
        last = simulation.round_number == rounds
        if checkpoint is not None and (last or simulation.round_number % checkpoint_every == 0):
            records_so_far = [[asdict(r) for r in h.rounds] for h in histories]
            state = {"simulation": simulation.state_dict(), "records": records_so_far}
            checkpoints.save(checkpoint, state)
    return histories


def _restore(simulation: Simulation, histories: list[History], state: dict[str, Any]) -> None:
    simulation.load_state_dict(state["simulation"])
    for history, records in zip(histories, state["records"], strict=True):
        history.rounds = [record_from(r) for r in records]
