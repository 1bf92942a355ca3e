"""What the signals of each policy cost in bytes, measured by the session's ledger."""

from __future__ import annotations

from typing import NamedTuple

from fedcohort.policies import POLICIES
from fedcohort.session import Session
from fedcohort.testing import drive


class CostRow(NamedTuple):
    """Bytes of one policy, all messages, for all clients together."""

    policy: str
    profile: str
    query: str
    reply: str
    once: int
    each_round: float
    models_each_round: float
    when: str


def policy_costs(
    clients: int, cohort_size: int, model_bytes: int, rounds: int = 20
) -> list[CostRow]:
    """Run every policy for some rounds and read its ledger.

    `once` is what clients send about themselves in the first round; `each_round` the mean of the
    signals in later rounds; `models_each_round` counts model transfers, down and up, in units of
    one model. Readings have the sizes of `fedcohort.testing.reading`.
    """
    return [_costs(name, clients, cohort_size, model_bytes, rounds) for name in sorted(POLICIES)]


def _costs(name: str, clients: int, cohort_size: int, model_bytes: int, rounds: int) -> CostRow:
    policy = POLICIES[name]()
    size = min(cohort_size, clients)
    session = Session(policy, cohort_size=size, seed=0, model_bytes=model_bytes)
    names = [f"{i:07d}" for i in range(clients)]
    for _ in range(rounds):
        drive(session, names)
    up = [session.ledger.by_kind("up", r) for r in range(rounds)]
    down = [session.ledger.by_kind("down", r) for r in range(rounds)]
    profiles = policy.needs.profile
    signals = [sum(n for kind, n in u.items() if kind not in ("model", *profiles)) for u in up]
    models = sum(u.get("model", 0) + d.get("model", 0) for u, d in zip(up, down, strict=True))
    return CostRow(
        policy=name,
        profile=", ".join(sorted(profiles)),
        query=", ".join(sorted(policy.needs.query)),
        reply=", ".join(sorted(policy.needs.reply)),
        once=sum(n for u in up for kind, n in u.items() if kind in profiles),
        each_round=sum(signals) / rounds,
        models_each_round=models / model_bytes / rounds,
        when=policy.when,
    )
