"""Kill writers with SIGKILL, start them again, and compare with a calm run.

    python tests/soak/kills.py --seconds 60
    python tests/soak/kills.py --only compare,registry --kills 100 --out result.json

Three kills in five come at a random moment of danger: an open, a rename, a removal, a lock, a sync
(before and after) or a statement of SQLite. One in five comes before a sync and also cuts the file
between what was synced and what was written. One in five comes at a random time. After one to four
kills the job is left to finish. Then:

- a difference: the result is not that of a calm run, or a temporary file is left;
- a loss: something that was there before a kill (a client, a payment) is gone after it;
- a double payment: a budget paid more than once for one release.

A kill that came after the end of the process counts as missed.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from driver import drive
from jobs import JOBS, Job
from killed import Process

BY_TIME = 0.2  # share of the kills at a random time
AT_SYNC = 0.2  # share of the kills that also cut the file that is about to be synced


@dataclass
class Calm:
    """An undisturbed run of a job: what comes out, how long it takes, how often it writes."""

    result: Any
    paid: int
    seconds: float
    moments: int
    syncs: int


def calm(job: Job, inputs: Path, folder: Path) -> Calm:
    """Run a job twice: the first time compiles and fills caches."""
    found = []
    for number in range(2):
        place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir()
        began = time.monotonic()
        process = Process(job, inputs, place)
        process.finish()
        seconds = time.monotonic() - began
        found.append(Calm(job.result(place), job.paid(place), seconds, *process.moments))
    assert found[0].result == found[1].result, "two calm runs differ: kills cannot be judged"
    return min(found, key=lambda one: one.seconds)


def disturbed(job, undisturbed, inputs, folder, rng):
    """Start a job and kill it, if it lasts so long; return counts."""
    draw = rng.random()
    by_time, torn = draw < BY_TIME, draw > 1 - AT_SYNC
    if by_time:
        process = Process(job, inputs, folder)
        killed = process.killed(rng.uniform(0, undisturbed.seconds))
    else:
        last = rng.randint(1, undisturbed.syncs if torn else undisturbed.moments)
        process = Process(job, inputs, folder, last, rng if torn else None)
        killed = process.killed()
    if not killed:
        process.finish()
    counts = {"kills": killed, "missed": not killed, "by time": killed and by_time}
    return Counter(counts, torn=killed and torn)


def chain(job, undisturbed, inputs, folder, rng, most):
    """Kill a job up to `most` times and let it finish; return counts, and what was wrong."""
    counts, held, ended, wrong = Counter(finished=1), set(), False, None
    folder.mkdir()
    while counts["kills"] < most and not ended:
        found = disturbed(job, undisturbed, inputs, folder, rng)
        counts += found
        before, held = held, job.held(folder)
        counts["losses"] += len(before - held)
        ended = not found["kills"] or job.done(folder)
    if not ended:
        Process(job, inputs, folder).finish()
    counts["double payments"] = max(0, job.paid(folder) - undisturbed.paid)
    strays = [p.name for p in folder.rglob(".*") if p.name.endswith("fedcohort-tmp")]
    if job.result(folder) != undisturbed.result or strays:
        wrong = f"left: {strays[:3]}" if strays else "another result"
    return counts, wrong


COUNTS = ("kills", "torn", "by time", "missed", "finished", "differences", "losses")


def trial(name, seconds, kills, seed=0):
    """Run chains of one job until one of `kills` or `seconds` is spent, and count."""
    job, until, examples = JOBS[name], time.monotonic() + seconds, []
    counts = Counter(dict.fromkeys((*COUNTS, "double payments"), 0))
    with tempfile.TemporaryDirectory() as place:
        inputs, folder = Path(place) / "inputs", Path(place) / "trial"
        inputs.mkdir()
        job.prepare(inputs)
        undisturbed = calm(job, inputs, Path(place) / "calm")
        for number in itertools.count():
            if number and (counts["kills"] >= kills or time.monotonic() > until):
                break
            rng = random.Random(f"{seed} {name} {number}")
            try:
                found, wrong = chain(job, undisturbed, inputs, folder, rng, rng.randint(1, 4))
            except Exception as error:  # a job that cannot go on after a kill is a difference
                found, wrong = Counter(), f"{type(error).__name__}: {error}"[:2000]
            counts.update(found, differences=int(wrong is not None))
            examples += [] if wrong is None else [wrong]
            shutil.rmtree(folder)
    about = {"moments": undisturbed.moments, "syncs": undisturbed.syncs}
    about["calm seconds"] = round(undisturbed.seconds, 2)
    return {"job": name, **counts, "examples": examples[:5], **about}


def failures(result):
    return sum(result[key] for key in ("differences", "losses", "double payments"))


if __name__ == "__main__":
    drive(__doc__, "jobs", JOBS, trial, failures, kills=10**9, seed=0)
