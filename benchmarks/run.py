"""Run published suites, or some of their parts, and join the results.

python benchmarks/run.py --suite selection --out parts --resume --join selection.json
python benchmarks/run.py --only ', uniform$' --seeds 1 --against selection.json

What was interrupted, or had no time left, continues with --resume. With --against, the exit status
is 1 if a result differs from the published one by more than rounding and the spread over seeds; it
is 3 if --seconds ended the run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from against import DIFFERS, read_published, repetitions, twins
from parts import join, split_done, write_part
from suite import Part, read_suite

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.storage import write_atomically


def arguments(words: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", default="selection", help="a published suite, or a TOML file [selection]")
    add("--out", type=Path, default=Path("benchmark"), help="folder for the results of each part")
    add("--resume", action="store_true", help="run only what the folder does not hold yet")
    add("--only", default="", help="only parts whose 'SUITE: SETTING, VARIANT' this finds")
    add("--device", default="auto", help="where models train: auto, cpu or cuda")
    add("--workers", type=int, default=1, help="processes that share the parts [1]")
    add("--seconds", type=float, default=math.inf, help="then save what runs, and stop")
    add("--list", action="store_true", help="print the parts, run none")
    add("--join", type=Path, help="write all parts of the suite into this one result file")
    add("--partial", action="store_true", help="with --join: run nothing, join what there is")
    add("--seeds", type=int, help="only the first seeds of each part")
    add("--against", type=Path, action="append", help="compare with this published result file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    try:
        return command(arguments(words))
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command(args: argparse.Namespace) -> int:
    every = read_suite(args.suite)
    every = every if args.seeds is None else [part.first(args.seeds) for part in every]
    chosen = matching(every, args.only)
    if args.list:
        print("\n".join(part.name for part in chosen))
        return 0
    pairs = twins(chosen, read_published(args.against)) if args.against else []
    if args.join is None or not args.partial:
        done, todo = split_done(chosen, args.out, args.resume)
        for part in done:
            say(f"kept: {part.name}")
        in_time = []
        for part, is_done in run_parts([part.on(args.device) for part in todo], args):
            say(f"{'done' if is_done else 'no time left'}: {part.name}")
            in_time.append(is_done)
        if not all(in_time):
            return 3
    if args.join is not None:
        result = join(chosen if args.partial else every, args.out, partial=args.partial)
        write_atomically(args.join, (json.dumps(result) + "\n").encode())
        say(f"wrote {args.join}")
    repeated = repetitions(pairs, args.out)
    for row in repeated:
        print(
            f"{row.verdict}: {row.setting}, {row.variant}: {row.seeds} seeds, "
            f"{row.accuracy:.2%} here, {row.published_accuracy:.2%} published, "
            f"{row.largest:.2%} apart at most".replace("%", " %")
        )
    return int(any(row.verdict == DIFFERS for row in repeated))


def run_parts(parts: list[Part], args: argparse.Namespace) -> Iterator[tuple[Part, bool]]:
    """Run the parts, by one process or several, and say of each whether it was in time."""
    until = time.time() + args.seconds
    if args.workers == 1:
        yield from ((part, write_part(part, args.out, until)) for part in parts)
        return
    pool = ProcessPoolExecutor(args.workers, get_context("spawn"))
    try:
        jobs = {pool.submit(write_part, part, args.out, until): part for part in parts}
        yield from ((jobs[job], job.result()) for job in as_completed(jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def matching(parts: list[Part], only: str) -> list[Part]:
    """The parts whose name the expression finds."""
    try:
        chosen = [part for part in parts if re.search(only, part.name, re.IGNORECASE)]
    except re.error as error:
        raise ConfigError(f"--only {only!r} is not a regular expression: {error}") from None
    if not chosen:
        raise ConfigError(f"--only {only!r} matches none of {len(parts)} parts; --list shows them")
    return chosen


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
