"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --jobs 4 --out result.json

Each parser runs in child processes with bounded memory. A crash in a library ends only its child;
it is counted, and another child continues with the next trial. The input of every trial is a
function of the seed and the number of the trial; inputs that crash a process lie in ``--keep``.
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
TRIAL, REFUSED, ACCEPTED = range(3)
STOPPED = 70  # exit status of a child that could not go on


class Child:
    """Runs every `step`-th trial in a process of its own, and starts again behind a crash.

    Its counters lie in shared memory and its errors in a file: both outlive a crash.
    """

    def __init__(self, target, seed, trials, until, keep):
        self.target, self.seed, self.trials, self.until = target, seed, trials, until
        self.counts = memoryview(mmap.mmap(-1, 24)).cast("q")
        self.errors, self.keep = target.folder / "errors.jsonl", keep
        self.peak = self.crashes = self.cpu = 0
        self.start(trials)

    def start(self, trials):
        self.counts[TRIAL], self.process = trials.start, os.fork()
        if self.process == 0:
            status = STOPPED
            try:
                self.run(trials)
                status = 0
            except BaseException as error:
                self.note(error)
            finally:
                os._exit(status)

    def run(self, trials):
        target, rng = self.target, Random()
        examples = target.examples() if target.made is None else target.made
        for data in examples:  # everything is imported
            target.write(data)
            with contextlib.suppress(FedcohortError):
                target.parse()
        gc.freeze()  # what is imported is not searched for garbage again and again
        status = Path("/proc/self/status").read_text()
        most = (int(status.split("VmSize:")[1].split()[0]) << 10) + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGALRM, _too_slow)
        for trial in trials:
            if time.monotonic() > self.until:
                return
            self.counts[TRIAL] = trial
            rng.seed((self.seed << 40) + trial)
            target.write(target.damaged(rng.choice(examples), rng))
            signal.alarm(SECONDS)
            try:
                target.parse()
                self.counts[ACCEPTED] += 1
            except FedcohortError:
                self.counts[REFUSED] += 1
            except BaseException as error:
                self.note(error)
            finally:
                signal.alarm(0)

    def note(self, error, kind=None):
        frames = traceback.extract_tb(getattr(error, "__traceback__", None))
        ours = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        what = {"error": kind or f"{type(error).__name__} at {place}", "message": str(error)[:200]}
        with self.errors.open("a") as file:
            file.write(json.dumps({**what, "trial": self.counts[TRIAL], "seed": self.seed}) + "\n")

    def ended(self, status, usage):
        """Take note of the end of the process; return whether it is over."""
        self.peak = max(self.peak, usage.ru_maxrss / 1024)
        self.cpu += usage.ru_utime + usage.ru_stime
        code, trial = os.waitstatus_to_exitcode(status), self.counts[TRIAL]
        if code in (0, STOPPED):
            return True
        self.crashes += 1
        self.note("", f"exit status {code}")
        if self.keep is not None and self.target.path.exists():
            Path(self.keep).mkdir(parents=True, exist_ok=True)
            name = f"crash-{self.target.name}-{self.seed}-{trial}"
            shutil.copyfile(self.target.path, Path(self.keep) / name)
        rest = range(trial + self.trials.step, self.trials.stop, self.trials.step)
        if not rest or time.monotonic() > self.until:
            return True
        self.start(rest)
        return False


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def run(name, *, seed=0, count=10**9, seconds=10.0, jobs=1, keep=None):
    """Run `count` trials of one parser in `jobs` children, and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory) as root:
        target = TARGETS[name](root)
        if "pyarrow" not in target.needs:  # its threads do not survive a fork
            target.made = target.examples()
        parts = [range(j, count, jobs) for j in range(min(jobs, count))]
        until = time.monotonic() + seconds
        children = [Child(target.elsewhere(), seed, part, until, keep) for part in parts]
        running = {child.process: child for child in children}
        while running:
            process, status, usage = os.wait4(-1, 0)
            child = running.pop(process, None)
            if child is not None and not child.ended(status, usage):
                running[child.process] = child
        lines = [x for c in children if c.errors.exists() for x in c.errors.read_text().split("\n")]
    errors = {}
    for found in map(json.loads, filter(None, lines)):
        errors.setdefault(found.pop("error"), {"count": 0, **found})["count"] += 1
    refused, accepted = (sum(c.counts[at] for c in children) for at in (REFUSED, ACCEPTED))
    return {
        "target": name,
        "trials": refused + accepted + sum(error["count"] for error in errors.values()),
        "refused": refused,
        "accepted": accepted,
        "crashes": sum(child.crashes for child in children),
        "errors": errors,
        "peak_mb": round(max(child.peak for child in children)),
        "cpu_seconds": round(sum(child.cpu for child in children), 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main():
    from provenance import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated parsers of {', '.join(TARGETS)} [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--count", type=int, default=10**6, help="trials per parser [10**6]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together [60]")
    parser.add_argument("--keep", help="folder for inputs that crash a process")
    parser.add_argument("--out", help="write the counts and where they come from, as JSON")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(TARGETS)
    if unknown := set(wanted) - set(TARGETS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    logging.disable()
    left_out = {name: missing for name in wanted if (missing := TARGETS[name].missing())}
    for name, missing in left_out.items():
        print(f"left out: {name} needs {', '.join(missing)}", file=sys.stderr)
    names = [name for name in wanted if name not in left_out]
    for module in sorted({module for name in names for module in TARGETS[name].imports}):
        importlib.import_module(module)  # once for all children
    end, rows = time.monotonic() + args.seconds, []
    for at, name in enumerate(names):
        limits = {"seconds": (end - time.monotonic()) / (len(names) - at), "count": args.count}
        rows.append(run(name, seed=args.seed, **limits, jobs=args.jobs, keep=args.keep))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:  # after each parser, so that an interruption leaves what there is
            write(args.out, {"parsers": rows, "left out": left_out})
    sys.exit(any(row["errors"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
