"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --jobs 4 --out result.json

Each parser runs in child processes with bounded memory. A crash in a library ends only its child;
it is counted, and another child continues with the next trial. The input of every trial is a
function of the seed and the number of the trial. It is written to a file before it is parsed, and
``--keep`` keeps the inputs that crash a process.

All parsers get the same time. With ``--shortest-first``, the parser with the least work left runs
next, in batches, so that as many parsers as possible reach ``--count``. Results are written after
each batch. With an ``--out`` that exists, trials continue where it ends. ``--merge`` adds the
trials of other result files, which had other seeds; with ``--seconds 0`` it does nothing else.
Parsers whose packages are not installed are left out, and named in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fuzzing import TARGETS

from fedcohort.exceptions import FedcohortError

MEMORY = 2 << 30  # bytes that a parser may take beyond what it had before the first trial
SECONDS = 20  # for one trial
BATCH = 60  # seconds of one parser before the next is chosen, with --shortest-first
FIRST = 5  # seconds that tell how fast a parser is


class Progress:
    """Three counters in memory that a child shares with its parent, and its errors in a file.

    They outlive a crash of the child: the parent sees in which trial it happened.
    """

    def __init__(self, folder):
        self.counts = memoryview(mmap.mmap(-1, 24)).cast("q")
        self.errors = Path(folder) / "errors.jsonl"

    def note(self, error, trial):
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        what = {"error": f"{type(error).__name__} at {place}", "trial": trial}
        with self.errors.open("a") as file:
            file.write(json.dumps({**what, "message": str(error)[:200]}) + "\n")


TRIAL, REFUSED, ACCEPTED = range(3)
COUNTS = ("trials", "refused", "accepted", "crashes", "seconds", "cpu_seconds")


def limit_memory():
    status = Path("/proc/self/status").read_text()
    held = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def child(target, seed, trials, until, progress):
    """Run trials, each with its own random numbers, until they or the time are over."""
    examples = target.examples() if target.made is None else target.made
    for data in examples:  # everything is imported
        target.write(data)
        with contextlib.suppress(FedcohortError):
            target.parse()
    gc.freeze()  # what is imported is not searched for garbage again and again
    limit_memory()
    signal.signal(signal.SIGALRM, _too_slow)
    counts, rng = progress.counts, Random()
    for trial in trials:
        if time.monotonic() > until:
            return
        counts[TRIAL] = trial
        rng.seed((seed << 40) + trial)
        target.write(target.damaged(rng.choice(examples), rng))
        signal.alarm(SECONDS)
        try:
            target.parse()
            counts[ACCEPTED] += 1
        except FedcohortError:
            counts[REFUSED] += 1
        except BaseException as error:
            progress.note(error, trial)
        finally:
            signal.alarm(0)


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def fork(target, seed, trials, until, progress):
    process = os.fork()
    if process == 0:
        status = 70
        try:
            child(target, seed, trials, until, progress)
            status = 0
        except BaseException as error:
            progress.note(error, progress.counts[TRIAL])
        finally:
            os._exit(status)
    return process


class Worker:
    """A child that runs every `step`-th trial, and is started again behind a crash."""

    def __init__(self, target, seed, trials, until, keep):
        self.target, self.seed, self.trials, self.until = target, seed, trials, until
        self.keep, self.progress = keep, Progress(target.folder)
        self.peak = self.crashes = self.cpu = 0
        self.start(trials)

    def start(self, trials):
        self.progress.counts[TRIAL] = trials.start
        self.process = fork(self.target, self.seed, trials, self.until, self.progress)

    def ended(self, status, usage):
        """Take note of the end of the child; return whether it is over."""
        self.peak = max(self.peak, usage.ru_maxrss / 1024)
        self.cpu += usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return True
        trial = self.progress.counts[TRIAL]
        if code != 70:
            self.crashes += 1
            with self.progress.errors.open("a") as file:
                file.write(json.dumps({"error": f"exit status {code}", "trial": trial}) + "\n")
            self.keep_input(trial)
        rest = range(trial + self.trials.step, self.trials.stop, self.trials.step)
        if code == 70 or not rest or time.monotonic() > self.until:
            return True
        self.start(rest)
        return False

    def keep_input(self, trial):
        file, name = self.target.path, f"crash-{self.target.name}-{self.seed}-{trial}"
        if self.keep is not None and file.exists():
            Path(self.keep).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, Path(self.keep) / name)


def run(name, *, seed=0, count=10**9, seconds=10.0, jobs=1, first=0, keep=None):
    """Run `count` trials of one parser in `jobs` children, and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory) as root:
        target = TARGETS[name](root)
        if "pyarrow" not in target.needs:  # its threads do not survive a fork
            target.made = target.examples()
        parts = [range(first + j, first + count, jobs) for j in range(min(jobs, count))]
        until = time.monotonic() + seconds
        workers = [Worker(target.elsewhere(), seed, part, until, keep) for part in parts]
        running = {worker.process: worker for worker in workers}
        while running:
            process, status, usage = os.wait4(-1, 0)
            worker = running.pop(process, None)
            if worker is not None and not worker.ended(status, usage):
                running[worker.process] = worker
        result = gathered(name, seed, workers)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def gathered(name, seed, workers):
    errors, noted = {}, 0
    for worker in workers:
        if worker.progress.errors.exists():
            for line in worker.progress.errors.read_text().splitlines():
                found, noted = json.loads(line), noted + 1
                known = errors.setdefault(found.pop("error"), {"count": 0, "seed": seed, **found})
                known["count"] += 1
    refused, accepted = (sum(w.progress.counts[at] for w in workers) for at in (REFUSED, ACCEPTED))
    return {
        "target": name,
        "trials": refused + accepted + noted,
        "refused": refused,
        "accepted": accepted,
        "crashes": sum(worker.crashes for worker in workers),
        "errors": errors,
        "next": max(worker.progress.counts[TRIAL] for worker in workers) + 1,
        "peak_mb": round(max(worker.peak for worker in workers)),
        "cpu_seconds": round(sum(worker.cpu for worker in workers), 1),
    }


def joined(before, now):
    """Add the trials of an earlier result file to those of now."""
    if before is None:
        return now
    errors = dict(before["errors"])
    for name, found in now["errors"].items():
        count = errors.get(name, {"count": 0})["count"] + found["count"]
        errors[name] = {**found, "count": count}
    added = {k: before[k] + now[k] for k in COUNTS}
    return {**now, **added, "errors": errors, "peak_mb": max(before["peak_mb"], now["peak_mb"])}


class Result:
    """Counts by parser; written after each run, so that an interruption loses little."""

    def __init__(self, out, wanted):
        self.out, self.rows, self.made = out, {}, []
        if out and Path(out).exists():
            self.merge(out)
        self.left_out = {n: missing for n in wanted if (missing := TARGETS[n].missing())}
        for name, missing in self.left_out.items():
            print(f"left out: {name} needs {', '.join(missing)}", file=sys.stderr)

    def merge(self, path):
        """Add the trials of a result file."""
        held = json.loads(Path(path).read_text())
        made = held["provenance"]
        self.made += made if isinstance(made, list) else [made]
        for row in held["result"]["parsers"]:
            known = self.rows.get(row["target"])
            then = row["next"] if known is None else known["next"]
            self.rows[row["target"]] = {**joined(known, row), "next": then}

    def add(self, row):
        """Add what a run of this process counted."""
        from provenance import write

        self.rows[row["target"]] = joined(self.rows.get(row["target"]), row)
        if self.out:
            write(self.out, self.content(), earlier=self.made)

    def left(self, name, count):
        """Return how many of `count` trials a parser has still to do."""
        return count - self.rows[name]["trials"] if name in self.rows else count

    def work(self, name, count):
        """Return the CPU seconds that they will take, 0 if the parser never ran."""
        row = self.rows.get(name, {"trials": 0, "cpu_seconds": 0})
        return self.left(name, count) * row["cpu_seconds"] / max(1, row["trials"])

    def content(self):
        parsers = [self.rows[name] for name in TARGETS if name in self.rows]
        return {"parsers": parsers, "left out": self.left_out}

    def save_merged(self):
        """Write what was merged, without a run of this process."""
        merged = {"provenance": self.made, "result": self.content()}
        Path(self.out).write_text(json.dumps(merged, indent=1) + "\n")


def equal_shares(names, seconds):
    """Yield each parser with its share of the time that is left."""
    end = time.monotonic() + seconds
    for at, name in enumerate(names):
        yield name, (end - time.monotonic()) / (len(names) - at)


def shortest_first(names, seconds, count, result):
    """Yield the parser with the least work left, and how long to run it, until all are done.

    A parser that never ran comes first, for a moment.
    """
    end = time.monotonic() + seconds
    while unfinished := [name for name in names if result.left(name, count) > 0]:
        if (rest := end - time.monotonic()) <= 0:
            return
        name = min(unfinished, key=lambda name: (name in result.rows, result.work(name, count)))
        yield name, min(rest, BATCH if name in result.rows else FIRST)


def warm_up(names):
    """Import what the parsers need, once for all children."""
    for module in sorted({module for name in names for module in TARGETS[name].imports}):
        importlib.import_module(module)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated parsers of {', '.join(TARGETS)} [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--count", type=int, default=10**6, help="trials per parser [10**6]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together [60]")
    parser.add_argument("--shortest-first", action="store_true", help="least work left runs next")
    parser.add_argument("--keep", help="folder for inputs that crash a process")
    parser.add_argument("--out", help="JSON file; if it exists, its trials go on from there")
    parser.add_argument("--merge", nargs="*", default=[], help="result files of other seeds")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(TARGETS)
    if unknown := set(wanted) - set(TARGETS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    logging.disable()
    result = Result(args.out, wanted)
    for path in args.merge:
        result.merge(path)
    if args.merge and args.seconds <= 0:
        result.save_merged()
        return
    names = [n for n in wanted if n not in result.left_out and result.left(n, args.count) > 0]
    turns = equal_shares(names, args.seconds)
    if args.shortest_first:
        turns = shortest_first(names, args.seconds, args.count, result)
    warm_up(names)
    for name, seconds in turns:
        first = result.rows.get(name, {"next": 0})["next"]
        limits = {"count": result.left(name, args.count), "seconds": seconds, "first": first}
        result.add(run(name, seed=args.seed, **limits, jobs=args.jobs, keep=args.keep))
        print(json.dumps(result.rows[name]), flush=True)
    sys.exit(any(row["errors"] for row in result.rows.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
