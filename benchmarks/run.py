"""Run published suites, or some of their parts, and join the results.

python benchmarks/run.py --suite selection --quick --out trial
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
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from against import DIFFERS, read_published, repetitions, twins
from parts import Datasets, Unfinished, join, split_done, write_part
from suite import Part, read_suite

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.storage import write_atomically

DEVICES = ("cpu", "cuda")


@dataclass
class Outcome:
    """What was left: parts not run, and errors by the name of their part."""

    left: list[Part] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def arguments(words: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", action="append", help="a published suite, or a TOML file; may be repeated")
    add("--out", type=Path, default=Path("benchmark"), help="folder for the results of each part")
    add("--quick", action="store_true", help="minutes instead of hours; not for publication")
    add("--resume", action="store_true", help="run only what the folder does not hold yet")
    add("--only", default="", help="only parts whose 'SUITE: SETTING, VARIANT' this finds")
    add("--device", default="auto", help="where models train: auto, cpu or cuda")
    add("--workers", help="processes by device, such as cuda=5,cpu=9; replaces --device")
    add("--seconds", type=float, default=float("inf"), help="when to stop and save")
    add("--list", action="store_true", help="print the parts, run none")
    add("--join", type=Path, help="write all parts of the suite into this one result file")
    add("--partial", action="store_true", help="with --join: run nothing, join what there is")
    add("--seeds", type=int, help="only the first seeds of each part, for a check")
    add("--against", type=Path, action="append", help="compare with this published result file")
    add("--format", choices=("table", "json"), default="table")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    try:
        return command(arguments(words))
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command(args: argparse.Namespace) -> int:
    names = args.suite or ["selection"]
    every = [part for name in names for part in read_suite(name, quick=args.quick)]
    if args.seeds is not None:
        every = [part.first(args.seeds) for part in every]
    chosen = matching(every, args.only)
    if args.list:
        rows = [listed(part) for part in chosen]
        print(json.dumps(rows) if args.format == "json" else "\n".join(p.name for p in chosen))
        return 0
    pairs = twins(chosen, read_published(args.against)) if args.against else []
    if args.join is not None and len(names) > 1:
        raise ConfigError("--join writes one suite: give --suite once")
    outcome = Outcome()
    if args.join is None or not args.partial:
        outcome = run(chosen, args)
    for name, error in outcome.failed.items():
        say(f"failed: {name}\n{error}")
    if outcome.left:
        say(f"{len(outcome.left)} of {len(chosen)} parts are left: continue with --resume")
    if args.join is not None:
        parts, suite = chosen if args.quick or args.partial else every, Path(names[0]).stem
        result = join(parts, args.out, suite, quick=args.quick, partial=args.partial)
        write_atomically(args.join, (json.dumps(result) + "\n").encode())
        say(f"wrote {args.join}")
    repeated = repetitions(pairs, args.out)
    if args.format == "json":
        unfinished = {part.name for part in outcome.left} | set(outcome.failed)
        done = [part.file_name for part in chosen if part.name not in unfinished]
        told = {"done": done, "left": len(outcome.left), "failed": outcome.failed}
        told |= {"joined": None if args.join is None else str(args.join)}
        print(json.dumps(told | {"repeated": [asdict(row) for row in repeated]}))
    for row in repeated if args.format == "table" else ():
        here, published, apart = (
            f"{100 * value:.2f} %" for value in (row.accuracy, row.published_accuracy, row.largest)
        )
        print(
            f"{row.verdict}: {row.setting}, {row.variant}: {row.seeds} seeds, {here} here, "
            f"{published} published, {apart} apart at most"
        )
    differs = any(row.verdict == DIFFERS for row in repeated)
    return int(bool(outcome.failed) or differs)


def run(chosen: list[Part], args: argparse.Namespace) -> Outcome:
    if args.workers is not None:
        workers = parse_workers(args.workers)
        return in_processes(chosen, args.out, args.resume, args.seconds, workers)
    return in_turn([part.on(args.device) for part in chosen], args.out, args.resume, args.seconds)


def parse_workers(text: str) -> dict[str, int]:
    """How many processes each device has, from a text such as cuda=5,cpu=9."""
    try:
        counts = {d.strip(): int(n) for d, _, n in (w.partition("=") for w in text.split(","))}
    except ValueError:
        counts = {}
    if not counts or any(d not in DEVICES or n < 1 for d, n in counts.items()):
        raise ConfigError(f"workers {text!r} must look like cuda=5,cpu=9")
    return counts


def in_turn(parts: list[Part], folder: Path, resume: bool, seconds: float) -> Outcome:
    """Run the parts here, one after the other, until the time is over."""
    outcome, loaded, until = Outcome(), Datasets(), time.monotonic() + seconds
    for part in missing(parts, folder, resume):
        try:
            if time.monotonic() >= until:
                raise Unfinished(part.name)
            write_part(part, folder, loaded, until)
            say(f"done: {part.name}")
        except Unfinished:
            outcome.left.append(part)
    return outcome


def in_processes(
    parts: list[Part], folder: Path, resume: bool, seconds: float, workers: dict[str, int]
) -> Outcome:
    """Run the parts in processes with one thread each, until the time is over.

    Scripts that have begun come to their end. A part that fails is reported and does not end the
    others. Where a process ends, by want of memory for example, the parts of its device are left
    for another call.
    """
    outcome, until = Outcome(), time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    pools = {d: ProcessPoolExecutor(n, context, begin_worker) for d, n in workers.items()}
    todo = sorted(missing(parts, folder, resume), key=lambda part: part.runs_on == "gpu-heavy")
    tasks: dict[Future[str], Part] = {}
    for part in todo:
        device = device_of(part, workers)
        task = pools[device].submit(work, part.on(device), folder, until)
        tasks[task] = part
    for task in as_completed(tasks):
        part = tasks[task]
        try:
            error = task.result()
        except (Unfinished, BrokenProcessPool):
            outcome.left.append(part)
        else:
            if error:
                outcome.failed[part.name] = error
            else:
                say(f"done: {part.name}")
    for pool in pools.values():
        pool.shutdown()
    return outcome


def device_of(part: Part, workers: dict[str, int]) -> str:
    """The device that a part is for, or the one there is."""
    wanted = "cpu" if part.runs_on == "cpu" else "cuda"
    return wanted if wanted in workers else next(iter(workers))


LOADED = Datasets()  # of a worker


def begin_worker() -> None:
    import torch

    torch.set_num_threads(1)


def work(part: Part, folder: Path, until: float) -> str:
    """Run a part in a worker, and return its error, if there is one."""
    if time.monotonic() >= until:
        raise Unfinished(part.name)
    try:
        write_part(part, folder, LOADED, until)
    except Unfinished:
        raise
    except Exception:  # one part must not end the others; its traceback is reported
        return traceback.format_exc(limit=-3)
    return ""


def missing(parts: list[Part], folder: Path, resume: bool) -> list[Part]:
    """The parts whose result the folder does not hold yet."""
    done, left = split_done(parts, folder, resume)
    for part in done:
        say(f"kept: {part.name}")
    return left


def matching(parts: list[Part], only: str) -> list[Part]:
    """The parts whose name the expression finds, the important ones first."""
    try:
        wanted = re.compile(only, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--only {only!r} is not a regular expression: {error}") from None
    chosen = [part for part in parts if wanted.search(part.name)]
    if not chosen:
        raise ConfigError(f"--only {only!r} matches none of {len(parts)} parts; --list shows them")
    return sorted(chosen, key=lambda part: part.rank)


def listed(part: Part) -> dict[str, Any]:
    """What --list tells machines about a part."""
    names = ("name", "suite", "setting", "variant", "runs_on", "rank", "targets", "file_name")
    return {name: getattr(part, name) for name in names} | {"seeds": part.experiment.seeds}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
