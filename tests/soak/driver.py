"""What the drivers share: options, a share of the time for each case, results as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def drive(doc, key, cases, trial, failed, **defaults):
    """Try each case for its share of the time; `defaults` are the options that are integers.

    Prints the rows and writes them, under `key`, after each case, so that an interruption leaves
    what there is. The exit status says whether a row `failed`.
    """
    from provenance import write

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated {key} of {', '.join(cases)} [all]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all together [60]")
    parser.add_argument("--out", help="write the rows and where they come from, as JSON")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"[{value}]")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(cases)
    if unknown := set(wanted) - set(cases):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(cases)}")
    options = {name: getattr(args, name) for name in defaults}
    end, rows = time.monotonic() + args.seconds, []
    for at, case in enumerate(wanted):
        share = (end - time.monotonic()) / (len(wanted) - at)
        rows.append(trial(case, seconds=share, **options))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            write(args.out, {**options, key: rows})
    sys.exit(any(map(failed, rows)))
