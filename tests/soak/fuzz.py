"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --out result.json

Each parser runs in a child process with bounded memory. A crash in a library ends only its child;
it is counted, and another child continues with the next trial. The input of every trial is a
function of the seed and the number of the trial. Parsers whose packages are not installed are left
out, and named in the result.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fuzzing.parsers import PARSERS

from fedcohort.exceptions import FedcohortError

MEMORY = 2 << 30  # bytes that a parser may take beyond what it had before the first trial
SECONDS = 20  # for one trial
TRIAL, REFUSED, ACCEPTED = range(3)
STOPPED = 70  # exit status of a child that could not go on


def attack(parser, seed, trials, until, counts, note):
    """Run trials in this process; `counts` lies in shared memory, which outlives a crash."""
    examples, rng = parser.examples(), Random()
    for data in examples:  # everything is imported, and nothing refused for another reason
        parser.write(data)
        parser.parse()
    gc.freeze()  # what is imported is not searched for garbage again and again
    status = Path("/proc/self/status").read_text()
    most = (int(status.split("VmSize:")[1].split()[0]) << 10) + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, _too_slow)
    for trial in trials:
        if time.monotonic() > until:
            return
        counts[TRIAL] = trial
        rng.seed((seed << 40) + trial)
        parser.write(parser.damaged(rng.choice(examples), rng))
        signal.alarm(SECONDS)
        try:
            parser.parse()
            counts[ACCEPTED] += 1
        except FedcohortError:
            counts[REFUSED] += 1
        except BaseException as error:
            note(error)
        finally:
            signal.alarm(0)


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def in_child(work, note):
    """Do something in a child process; return its exit status and what it used."""
    process = os.fork()
    if process == 0:
        status = STOPPED
        try:
            work()
            status = 0
        except BaseException as error:
            note(error)
        finally:
            os._exit(status)
    _, status, usage = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status), usage


def run(name, *, seed=0, count=10**9, seconds=10.0):
    """Run `count` trials of one parser and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    peak = crashes = cpu = first = 0
    counts = memoryview(mmap.mmap(-1, 24)).cast("q")
    with tempfile.TemporaryDirectory(dir=memory) as root:
        parser, log = PARSERS[name](Path(root)), Path(root) / "errors.jsonl"

        def note(error):
            frames = traceback.extract_tb(getattr(error, "__traceback__", None))
            ours = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            kind = error if isinstance(error, str) else f"{type(error).__name__} at {place}"
            line = {
                "error": kind,
                "message": str(error)[:200],
                "trial": counts[TRIAL],
                "seed": seed,
            }
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")

        while first < count and (not first or time.monotonic() < began + seconds):
            trials = range(first, count)
            code, usage = in_child(
                lambda t=trials: attack(parser, seed, t, began + seconds, counts, note), note
            )
            peak = max(peak, usage.ru_maxrss / 1024)
            cpu += usage.ru_utime + usage.ru_stime
            if code in (0, STOPPED):
                break
            crashes += 1
            note(f"exit status {code}")
            first = counts[TRIAL] + 1
        lines = log.read_text().splitlines() if log.exists() else []
    errors = {}
    for found in map(json.loads, lines):
        errors.setdefault(found.pop("error"), {"count": 0, **found})["count"] += 1
    refused, accepted = counts[REFUSED], counts[ACCEPTED]
    return {
        "target": name,
        "trials": refused + accepted + sum(error["count"] for error in errors.values()),
        "refused": refused,
        "accepted": accepted,
        "crashes": crashes,
        "errors": errors,
        "peak_mb": round(peak),
        "cpu_seconds": round(cpu, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main():
    from provenance import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated parsers of {', '.join(PARSERS)} [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**6, help="trials per parser [10**6]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together [60]")
    parser.add_argument("--out", help="write the counts and where they come from, as JSON")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(PARSERS)
    if unknown := set(wanted) - set(PARSERS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(PARSERS)}")
    logging.disable()
    left_out = {name: missing for name in wanted if (missing := PARSERS[name].missing())}
    names = [name for name in wanted if name not in left_out]
    for module in sorted({module for name in names for module in PARSERS[name].imports}):
        importlib.import_module(module)  # once for all children
    end, rows = time.monotonic() + args.seconds, []
    for at, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - at)
        rows.append(run(name, seed=args.seed, seconds=share, count=args.count))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:  # after each parser, so that an interruption leaves what there is
            write(args.out, {"parsers": rows, "left out": left_out})
    sys.exit(any(row["errors"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
