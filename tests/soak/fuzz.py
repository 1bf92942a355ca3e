"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --out result.json

Each parser runs in a child process with bounded memory. A crash in a library ends only its child;
it is counted, and another child continues with the next trial. The input of every trial is a
function of the seed and the number of the trial.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
from driver import drive
from mutate import damaged
from parsers import PARSERS, example_sketch

from fedcohort.exceptions import FedcohortError

FORK = get_context("fork")
MEMORY = 2 << 30  # bytes that a parser may take beyond what it had before the first trial
SECONDS = 20  # for one trial
TRIAL, REFUSED, ACCEPTED, PEAK = range(4)


def attack(parser, folder, seed, trials, until, counts, note):
    """Run trials in this process; `counts` lies in shared memory, which outlives a crash."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parser.write(folder)
    examples = {entry: content_of(entry) for entry in sorted(folder.iterdir())}
    for entry in examples:  # everything is imported, and nothing refused for another reason
        parser.read(entry)
    gc.freeze()  # what is imported is not searched for garbage again and again
    status = Path("/proc/self/status").read_text()
    most = (int(status.split("VmSize:")[1].split()[0]) << 10) + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, _too_slow)
    rng = Random()
    for trial in trials:
        if time.monotonic() > until:
            return
        counts[TRIAL] = trial
        rng.seed((seed << 40) + trial)
        entry = rng.choice(list(examples))
        if entry.is_dir():
            shutil.rmtree(entry)
        for path, content in examples[entry].items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        path = rng.choice(list(examples[entry]))
        path.write_bytes(damaged(examples[entry][path], rng))
        signal.alarm(SECONDS)
        try:
            parser.read(entry)
            counts[ACCEPTED] += 1
        except FedcohortError:
            counts[REFUSED] += 1
        except BaseException as error:
            note(error)
        finally:
            signal.alarm(0)
        counts[PEAK] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def content_of(entry):
    """The files of an example, which is a file or a folder."""
    files = [path for path in (entry, *sorted(entry.rglob("*"))) if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != ".lock"}


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def run(name, seconds, count, seed=0):
    """Run `count` trials of one parser and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    counts, crashes, peak, first, errors = FORK.RawArray("q", 4), 0, 0, 0, {}
    with tempfile.TemporaryDirectory(dir=memory) as root:
        folder, log = Path(root) / "examples", Path(root) / "errors.jsonl"

        def note(error):
            frames = traceback.extract_tb(getattr(error, "__traceback__", None))
            ours = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            kind = error if isinstance(error, str) else f"{type(error).__name__} at {place}"
            about = {"message": str(error)[:200], "trial": counts[TRIAL], "seed": seed}
            with log.open("a") as file:
                file.write(json.dumps({"error": kind, **about}) + "\n")

        while first < count and (not first or time.monotonic() < began + seconds):
            rest = (seed, range(first, count), began + seconds, counts, note)
            child = FORK.Process(target=attack, args=(PARSERS[name], folder, *rest))
            child.start()
            child.join()
            peak = max(peak, counts[PEAK])
            if child.exitcode == 0:
                break
            crashes += 1
            note(f"exit status {child.exitcode}")
            first = counts[TRIAL] + 1
        for found in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
            errors.setdefault(found.pop("error"), {"count": 0, **found})["count"] += 1
    refused, accepted = counts[REFUSED], counts[ACCEPTED]
    return {
        "target": name,
        "trials": refused + accepted + sum(error["count"] for error in errors.values()),
        "refused": refused,
        "accepted": accepted,
        "crashes": crashes,
        "errors": errors,
        "peak_mb": peak,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()
    example_sketch()  # compiled once, for all children
    failed = lambda row: bool(row["errors"])  # noqa: E731
    drive(__doc__, "parsers", PARSERS, run, failed, count=10**6, seed=0)
