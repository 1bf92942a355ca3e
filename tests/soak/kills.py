"""Kill writers with SIGKILL, start them again, and compare with a calm run.

    python tests/soak/kills.py --seconds 60
    python tests/soak/kills.py --only run,registry --kills 100 --jobs 12 --out result.json

Each job is a process that can be started again after a kill: the command line (`run`, `compare`,
`sketch` on a budget, `registry add`), and a Flower server with a checkpoint. Three kills in five
come at a moment of danger: the process counts its opens, renames, removals and locks of files, its
syncs (before and after) and its statements of SQLite, and ends itself with SIGKILL at a random one
of them. One kill in five comes before a sync and also cuts the file to a random length between what
was synced and what was written, as a power cut may. One kill in five comes at a random time. After
one to four kills the job is left to finish. Then:

- a difference: the result is not that of a calm run, or a temporary file is left;
- a loss: something that was there before a kill (a client, a payment) is gone after it;
- a double payment: a budget paid more than once for one release.

A kill counts if the process was alive; one that came too late counts as missed. Processes are
forked from one that has imported everything, so that a kill costs a fraction of a second.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from driver import drive
from jobs import JOBS, Job
from killed import FORK, Process

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


def none_yet():
    counts = ("kills", "torn", "by time", "missed", "finished", "differences", "losses")
    return {**dict.fromkeys(counts, 0), "double payments": 0, "examples": []}


def disturbed(job, undisturbed, left, inputs, folder, rng):
    """Start a job and kill it in the `left` part of its work; return counts and the part done."""
    draw, syncs = rng.random(), round(left * undisturbed.syncs)
    by_time, torn = draw < BY_TIME, draw > 1 - AT_SYNC and syncs > 0
    if by_time:
        process = Process(job, inputs, folder)
        killed = process.killed(rng.uniform(0, left * undisturbed.seconds))
    else:
        last = rng.randint(1, syncs if torn else round(left * undisturbed.moments))
        process = Process(job, inputs, folder, last, rng if torn else None)
        killed = process.killed()
    if not killed:
        process.finish()
    found = {"kills": killed, "missed": not killed, "by time": killed and by_time}
    found["torn"] = killed and torn
    return found, process.moments[0] / undisturbed.moments


def chain(job, undisturbed, inputs, folder, rng, most):
    """Kill a job up to `most` times, let it finish, and return what was counted."""
    done, left, held, ended = none_yet(), 1.0, set(), False
    folder.mkdir()
    while done["kills"] < most and round(left * undisturbed.moments) >= 1 and not ended:
        found, part = disturbed(job, undisturbed, left, inputs, folder, rng)
        add_up(done, found)
        left -= part if job.continues else 0
        now = job.held(folder)
        done["losses"] += len(held - now)
        held = now
        ended = not found["kills"] or job.done(folder)
    if not ended:
        Process(job, inputs, folder).finish()
    done["finished"] = 1
    done["double payments"] = max(0, job.paid(folder) - undisturbed.paid)
    found = job.result(folder)
    strays = [p.name for p in folder.rglob(".*") if p.name.endswith("fedcohort-tmp")]
    if found != undisturbed.result or strays:
        done["differences"] = 1
        done["examples"] = [strays[:3] or "another result"]
    return done


def add_up(total, part):
    for key, value in part.items():
        total[key] = (total[key] + value)[:5] if key == "examples" else total[key] + value


def chains(name, undisturbed, root, numbers, until, enough, seed, out):
    """Run chains until the time is over or the kills are enough; put what was counted into `out`.

    This runs in a process of its own, which forks those that are killed.
    """
    inputs = root / f"{name}-inputs"
    try:
        for number in numbers:
            if number and (enough.value <= 0 or time.monotonic() > until):
                break
            rng, folder = random.Random(f"{seed} {name} {number}"), root / f"{name}-{number}"
            try:
                part = chain(JOBS[name], undisturbed, inputs, folder, rng, rng.randint(1, 4))
            except Exception as error:  # a job that cannot go on after a kill is a difference
                part = {"differences": 1, "examples": [f"{type(error).__name__}: {error}"[:2000]]}
            with enough.get_lock():
                enough.value -= part.get("kills", 0)
            out.put(part)
            shutil.rmtree(folder)
    finally:
        out.put(None)


def trial(name, seconds, kills, seed=0, jobs=1):
    """Run chains of one job until one of `kills` or `seconds` is spent, and count."""
    with tempfile.TemporaryDirectory() as place:
        job, root = JOBS[name], Path(place)
        (root / f"{name}-inputs").mkdir()
        job.prepare(root / f"{name}-inputs")
        until = time.monotonic() + seconds
        undisturbed = calm(job, root / f"{name}-inputs", root / f"{name}-calm")
        about = {"moments": undisturbed.moments, "syncs": undisturbed.syncs}
        about["calm seconds"] = round(undisturbed.seconds, 2)
        total, out = {"job": name, **none_yet(), **about}, FORK.SimpleQueue()
        enough = FORK.Value("q", kills)
        for j in range(jobs):
            numbers = range(j, 10**9, jobs)
            shared = (name, undisturbed, root, numbers, until, enough, seed, out)
            FORK.Process(target=chains, args=shared).start()
        working = jobs
        while working:
            part = out.get()
            if part is None:
                working -= 1
            else:
                add_up(total, part)
    return total


def failures(result):
    return sum(result[key] for key in ("differences", "losses", "double payments"))


if __name__ == "__main__":
    drive(__doc__, "jobs", JOBS, trial, failures, kills=10**9, seed=0, jobs=1)
