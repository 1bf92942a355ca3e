"""Run all trials, one after the other, in a given time.

    python tests/soak/soak.py --seconds 3600 --jobs 2 --out runs/soak

Surroundings (full disks, folders that cannot be written, several writers) as tests; then at least
1,000 kills, attacks on the private mechanisms, load, and damaged files in the time that is left. A
step that fails does not stop the others; the exit status tells.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KILLS = 170  # per job, of which there are six
TESTS = ("test_environment.py", "test_writers.py")


def steps(seconds, jobs, out):
    """Yield each step's name, its arguments and the seconds that it may take."""
    began = time.monotonic()

    def left(share):
        return max(1.0, share * (seconds - (time.monotonic() - began)))

    yield "surroundings", ["-m", "pytest", "-q", *(HERE / name for name in TESTS)]
    kills = ["--kills", KILLS, "--seconds", left(0.5), "--jobs", jobs]
    yield "kills", [HERE / "kills.py", *kills, "--out", out / "kills.json"]
    trials = ["--trials", int(min(400_000, 100 * seconds)), "--jobs", jobs]
    yield "audit", [HERE / "audit.py", *trials, "--out", out / "audit.json"]
    load = ["--seconds", left(0.5), "--jobs", jobs]
    yield "load", [HERE / "load.py", *load, "--out", out / "load.json"]
    fuzz = ["--seconds", left(1.0)]
    yield "damaged files", [HERE / "fuzz.py", *fuzz, "--out", out / "fuzz.json"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="for everything [3600]")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time [2]")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder [runs/soak]")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, arguments in steps(args.seconds, args.jobs, args.out):
        began = time.monotonic()
        done = subprocess.run([sys.executable, *map(str, arguments)])
        ended = "holds" if done.returncode == 0 else "FAILS"
        print(f"{name}: {ended} after {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] * (done.returncode != 0)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
