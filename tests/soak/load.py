"""Many clients for many rounds, without training: no exception, flat memory, flat time per round.

    python tests/soak/load.py --clients 20000 --rounds 200
    python tests/soak/load.py --clients 100000 --rounds 1000 --seconds 2800 --out r.json

Every policy, and every gate with uniform selection, drives a session in a process of its own. In
each round 30 % of the clients are away, a few join and leave for good, 20 % of the cohort fails and
5 % of all readings are bad. The cohort must be right in every round. Time is processor time of
`begin` and `finish` without the making of readings; `judged` says when time and memory are flat.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import compress, count, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from driver import drive

from fedcohort import POLICIES, Session
from fedcohort.gates import GATES
from fedcohort.options import parse_named
from fedcohort.policies import Bounded
from fedcohort.rounds import stream
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors

COHORT, DIM = 10, 300
KINDS = 400  # different readings per signal
BAD = (float("nan"), float("inf"), np.ones((2, 3, 4)), "text", None, -1e308)
WARM_UP = {
    "policy fedcor": 165,  # 30 loss changes per client: 15 in the warm-up, then one in 10 rounds
    "policy sketch-to-select": 300,  # after four selections 99 % of the clients were asked
}
VARIANTS = ("kdpp:signal=race_sketch", "clustered-sampling:by=similarity", "bounded sketch-match")
CASES = (
    *(f"policy {name}" for name in (*sorted(POLICIES), *VARIANTS)),
    *(f"gate {name}" for name in sorted(GATES)),
)


def population(size):
    """Yield who is present: some are away, a few join and leave for good in every round."""
    rng, names = np.random.default_rng([0, 1]), (f"client-{i:07d}" for i in count())
    members = list(islice(names, size))
    while True:
        for name in islice(names, max(1, size // 5000)):
            del members[rng.integers(len(members))]
            members.append(name)
        yield list(compress(members, (rng.random(len(members)) >= 0.3).tolist()))


class Readings:
    """Readings of the declared form; five in a hundred are bad."""

    def __init__(self, policy):
        self.options, self.rng, self.made = policy.signal_options, np.random.default_rng(0), {}
        self.seconds = 0.0

    def __call__(self, name, clients):
        began = time.process_time()
        if name not in self.made:
            example = SIGNALS[name].form(self.options.get(name, {})).example
            self.made[name] = [example(stream(0, name, i)) for i in range(KINDS)]
        kinds = self.rng.integers(KINDS, size=len(clients))
        out = dict(zip(clients, map(self.made[name].__getitem__, kinds.tolist()), strict=True))
        for at in np.flatnonzero(self.rng.random(len(clients)) < 0.05).tolist():
            out[clients[at]] = BAD[kinds[at] % len(BAD)]
        self.seconds += time.process_time() - began
        return out


def gated(session, cohort, rng):
    """Let the session's gate ask for uploads; return who uploads."""
    start = Vectors(np.zeros(DIM))
    announced = session.announce(start)
    models = Vectors(rng.normal(size=(len(cohort), DIM)) + 0.3)
    answers = session.gate.probe(announced, start, models)
    asked = session.admit(dict(zip(cohort, answers, strict=True)))
    if asked:
        session.gate.aggregated(start, Vectors(np.full(DIM, 0.3) + 0.1 * rng.normal(size=DIM)))
    return asked


def one_round(session, present, readings, rng):
    """Drive a session through a round; return its seconds without the making of readings."""
    readings.seconds, began = 0.0, time.process_time()
    selection = session.begin(present, readings)
    spent = time.process_time() - began
    if not session.skipped:  # the session refuses repeats and clients that are away
        assert len(selection.clients) == COHORT, f"{len(selection.clients)} clients"
    answered = [c for c in selection.clients if rng.random() >= 0.2]
    finished = gated(session, answered, rng) if session.gate is not None else answered
    began = time.process_time()
    replies = {name: readings(name, finished) for name in sorted(session.policy.needs.reply)}
    session.finish(replies, finished)
    return spent + time.process_time() - began - readings.seconds


def memory_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def make(name):
    """Return the policy and the gate of a case."""
    kind, _, which = name.partition(" ")
    if kind == "gate":
        return POLICIES["uniform"](), GATES[which]()
    policy, options = parse_named(which.removeprefix("bounded "))
    made = POLICIES[policy](**options)
    return (Bounded(made) if which.startswith("bounded ") else made), None


def soak(name, clients, rounds, seconds):
    """Drive one case for at most so many seconds, and return what was measured."""
    policy, gate = make(name)
    until = time.monotonic() + seconds
    session = Session(policy, cohort_size=COHORT, seed=0, gate=gate, model_bytes=1000)
    present, readings = population(clients), Readings(policy)
    rng, times, memory, error = np.random.default_rng([0, 2]), [], [], None
    try:
        while len(times) < rounds and time.monotonic() < until:
            times.append(one_round(session, next(present), readings, rng))
            memory.append(memory_mb())
    except Exception as found:
        error = f"round {len(times)}: {type(found).__name__}: {found}"[:500]
    about = {"case": name, "rounds": len(times), "seconds": round(sum(times), 1), "error": error}
    return about | judged(times, memory, WARM_UP.get(name, 0))


def judged(times, memory, warm_up=0):
    """Compare the last quarter of the rounds after the warm-up with the second one.

    Time may grow by half (or 5 ms), memory by 30 % (or 60 MB) from the first quarter on: known
    clients stay known, so that a few megabytes per thousand newcomers are expected.
    """
    times, memory = times[warm_up:], memory[warm_up:]
    if len(times) < 8:
        return {"flat": None}
    quarter = len(times) // 4
    early = float(np.median(times[quarter : 2 * quarter]))
    late = float(np.median(times[-quarter:]))
    first, last = memory[quarter], max(memory[-quarter:])
    return {
        "early_ms": round(1e3 * early, 2),
        "late_ms": round(1e3 * late, 2),
        "early_mb": round(first),
        "late_mb": round(last),
        "flat": late <= max(1.5 * early, early + 0.005) and last <= max(1.3 * first, first + 60),
    }


def alone(case, seconds, clients, rounds):
    """Drive one case in a process of its own, which has memory of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(soak, case, clients, rounds, seconds).result()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = lambda row: row["error"] is not None or row["flat"] is False  # noqa: E731
    drive(__doc__, "cases", CASES, alone, failed, clients=20_000, rounds=200)
