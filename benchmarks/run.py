"""Run published suites, or some of their parts, and join the results.

python benchmarks/run.py --suite selection --out parts --resume --join selection.json
python benchmarks/run.py --out parts --resume --workers cuda=12,cpu=2 --seconds 540
python benchmarks/run.py --only ', uniform$' --seeds 1 --against selection.json

Parts run in the order of their importance. With --workers, parts are spread over processes, heavy
ones last; CPU workers run the parts that need no GPU. What the time limit cuts off continues with
--resume. With --against, the exit status is 1 if a result differs from the published one by more
than rounding and the spread over seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from against import DIFFERS, read_published, repetitions, twins
from parts import Datasets, Unfinished, join, split_done, write_part
from suite import Part, read_suite

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.storage import write_atomically

DEVICES = ("cpu", "cuda")


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
    add("--workers", help="processes by device, such as cuda=5,cpu=9; replaces --device")
    add("--seconds", type=float, default=float("inf"), help="when to stop and save")
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
    if args.seeds is not None:
        every = [part.first(args.seeds) for part in every]
    chosen = matching(every, args.only)
    if args.list:
        print("\n".join(part.name for part in chosen))
        return 0
    pairs = twins(chosen, read_published(args.against)) if args.against else []
    left, failed = [], {}
    if args.join is None or not args.partial:
        left, failed = run(chosen, args)
    for name, error in failed.items():
        say(f"failed: {name}\n{error}")
    if left:
        say(f"{len(left)} of {len(chosen)} parts are left: continue with --resume")
    if args.join is not None:
        parts = chosen if args.partial else every
        result = join(parts, args.out, partial=args.partial)
        write_atomically(args.join, (json.dumps(result) + "\n").encode())
        say(f"wrote {args.join}")
    repeated = repetitions(pairs, args.out)
    for row in repeated:
        here, published, apart = (
            f"{100 * value:.2f} %" for value in (row.accuracy, row.published_accuracy, row.largest)
        )
        print(
            f"{row.verdict}: {row.setting}, {row.variant}: {row.seeds} seeds, {here} here, "
            f"{published} published, {apart} apart at most"
        )
    return int(bool(failed) or any(row.verdict == DIFFERS for row in repeated))


def run(chosen: list[Part], args: argparse.Namespace) -> tuple[list[Part], dict[str, str]]:
    """The parts that are left, and errors by the name of their part."""
    done, todo = split_done(chosen, args.out, args.resume)
    for part in done:
        say(f"kept: {part.name}")
    if args.workers is not None:
        return in_processes(todo, args.out, args.seconds, parse_workers(args.workers))
    return in_turn([part.on(args.device) for part in todo], args.out, args.seconds), {}


def parse_workers(text: str) -> dict[str, int]:
    """How many processes each device has, from a text such as cuda=5,cpu=9."""
    try:
        counts = {d.strip(): int(n) for d, _, n in (w.partition("=") for w in text.split(","))}
    except ValueError:
        counts = {}
    if not counts or any(d not in DEVICES or n < 1 for d, n in counts.items()):
        raise ConfigError(f"workers {text!r} must look like cuda=5,cpu=9")
    return counts


def in_turn(parts: list[Part], folder: Path, seconds: float) -> list[Part]:
    """Run the parts here, one after the other, until the time is over; return what is left."""
    left, loaded, until = [], Datasets(), time.monotonic() + seconds
    for part in parts:
        try:
            write_part(part, folder, loaded, until)
            say(f"done: {part.name}")
        except Unfinished:
            left.append(part)
    return left


def in_processes(
    parts: list[Part], folder: Path, seconds: float, workers: dict[str, int]
) -> tuple[list[Part], dict[str, str]]:
    """Run the parts in processes with one thread each, until the time is over.

    Scripts that have begun come to their end. A part that fails is reported and does not end the
    others. Where a process ends, by want of memory for example, the parts of its device are left
    for another call.
    """
    left, failed, until = [], {}, time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    pools = {d: ProcessPoolExecutor(n, context, begin_worker) for d, n in workers.items()}
    tasks = {}
    for part in sorted(parts, key=lambda part: part.runs_on == "gpu-heavy"):
        device = "cpu" if part.runs_on == "cpu" else "cuda"
        device = device if device in workers else next(iter(workers))
        tasks[pools[device].submit(work, part.on(device), folder, until)] = part
    for task in as_completed(tasks):
        part = tasks[task]
        try:
            error = task.result()
        except (Unfinished, BrokenProcessPool):
            left.append(part)
        else:
            if error:
                failed[part.name] = error
            else:
                say(f"done: {part.name}")
    for pool in pools.values():
        pool.shutdown()
    return left, failed


LOADED = Datasets()  # of a worker


def begin_worker() -> None:
    import torch

    torch.set_num_threads(1)


def work(part: Part, folder: Path, until: float) -> str:
    """Run a part in a worker, and return its error, if there is one."""
    try:
        write_part(part, folder, LOADED, until)
    except Unfinished:
        raise
    except Exception:  # one part must not end the others; its traceback is reported
        return traceback.format_exc(limit=-3)
    return ""


def matching(parts: list[Part], only: str) -> list[Part]:
    """The parts whose name the expression finds, the important ones first."""
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
