"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --out result.json

Each parser runs in a child process with bounded memory. A crash in a library ends only its child;
it is counted, and another child continues with the next trial. The input of every trial is a
function of the seed and the number of the trial. Parsers whose packages are not installed are left
out, and named in the result.
"""

from __future__ import annotations

import gc
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
from driver import drive
from parsers import PARSERS, example_sketch

from fedcohort.exceptions import FedcohortError

MEMORY = 2 << 30  # bytes that a parser may take beyond what it had before the first trial
SECONDS = 20  # for one trial
TRIAL, REFUSED, ACCEPTED = range(3)
STOPPED = 70  # exit status of a child that could not go on


def attack(parser, folder, seed, trials, until, counts, note):
    """Run trials in this process; `counts` lies in shared memory, which outlives a crash."""
    path, rng = folder / parser.file, Random()
    path.parent.mkdir(exist_ok=True)
    examples = parser.examples(folder)
    for data in examples:  # everything is imported, and nothing refused for another reason
        path.write_bytes(data)
        parser.parse(path)
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
        path.write_bytes(parser.damaged(rng.choice(examples), rng))
        signal.alarm(SECONDS)
        try:
            parser.parse(path)
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


def run(name, seconds, count, seed=0):
    """Run `count` trials of one parser and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    peak = crashes = cpu = first = 0
    counts = memoryview(mmap.mmap(-1, 24)).cast("q")
    with tempfile.TemporaryDirectory(dir=memory) as root:
        parser, folder, log = PARSERS[name], Path(root) / "files", Path(root) / "errors.jsonl"
        folder.mkdir()

        def note(error):
            frames = traceback.extract_tb(getattr(error, "__traceback__", None))
            ours = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            kind = error if isinstance(error, str) else f"{type(error).__name__} at {place}"
            about = {"message": str(error)[:200], "trial": counts[TRIAL], "seed": seed}
            with log.open("a") as file:
                file.write(json.dumps({"error": kind, **about}) + "\n")

        while first < count and (not first or time.monotonic() < began + seconds):
            trials = range(first, count)
            code, usage = in_child(
                lambda t=trials: attack(parser, folder, seed, t, began + seconds, counts, note),
                note,
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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()
    example_sketch()  # compiled once, for all children
    failed = lambda row: bool(row["errors"])  # noqa: E731
    drive(__doc__, "parsers", PARSERS, run, failed, count=10**6, seed=0)
