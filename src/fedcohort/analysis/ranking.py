"""What a finished or running FedACS says about its clients: who is skewed, with intervals.

FedACS learns from duels between the clients of each round; their posterior ranks all clients by how
far their data are from the average (Wang et al. 2021). The duels are read from a run's checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedcohort import storage
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.policies import FedACS
from fedcohort.rounds import ClientId, stream

MAX_CHECKPOINT = 500_000_000  # bytes; larger ones are not read


class Saved(NamedTuple):
    """What a checkpoint holds of a session: the policy's name and state, and the readings."""

    policy: str
    state: dict[str, Any]
    signals: dict[str, Any]


class Rank(NamedTuple):
    """A client's posterior mean rank, 1 the least skewed, its 95 % interval, and its duels."""

    client: ClientId
    rank: float
    low: float
    high: float
    duels: float


def saved_session(folder: Path, seed: int = 0) -> Saved | None:
    """Return the session of one seed (by position) from a run's checkpoint; None without one."""
    path = next((folder / n for n in ("checkpoint", "session") if (folder / n).exists()), None)
    if path is None or path.stat().st_size > MAX_CHECKPOINT:
        return None
    try:
        state = storage.load(path)
        session = state["session"] if "session" in state else state["seeds"][seed]["session"]
        policy = session["policy"].partition("(")[0]
        state = session["policy_state"]
        return Saved(policy, state, session["signals"]["columns"])
    except (InvalidCheckpoint, KeyError, IndexError, TypeError, AttributeError):
        return None  # of another version


def skew_ranks(folder: Path, seed: int = 0) -> list[Rank]:
    """Rank the clients of a run with FedACS, the least skewed first.

    Parameters
    ----------
    folder : Path
        The run.
    seed : int
        Position of the seed whose duels count.
    """
    session = saved_session(folder, seed)
    if session is None:
        raise ConfigError(
            f"{folder}: no run with a checkpoint of seed {seed + 1}; give the folder of one "
            "run, such as COMPARISON/fedacs"
        )
    if session.policy != "FedACS":
        raise ConfigError(f"{folder}: ranks come from duels of FedACS, not {session.policy}")
    policy = FedACS()
    policy.load_state_dict(session.state)
    wins, losses = policy.state.wins, policy.state.losses
    clients = sorted(wins.keys() | losses.keys())
    ranks = policy.ranks(clients, stream(0, "rank", seed))
    rows = [
        Rank(c, float(mean), float(low), float(high), wins.get(c, 0.0) + losses.get(c, 0.0))
        for c, mean, low, high in zip(clients, *ranks, strict=True)
    ]
    return sorted(rows, key=lambda row: row.rank)
