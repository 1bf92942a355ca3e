"""From exact sketches to what leaves the site: noise, budget, files, and what is said of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import typer

from fedcohort.cli.common import Format, progress, show, show_json
from fedcohort.cli.sketch_options import Privacy, user_values
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.finding import INDEX, FileNames
from fedcohort.files.sketching import OnRows
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.planning import signal_to_noise
from fedcohort.report.sketches import describe, facts_table
from fedcohort.sketch.race import RaceSketch


@dataclass(frozen=True)
class Budget:
    """A ledger, the budget that it holds, and whose account is charged."""

    path: Path | None
    epsilon: float | None
    delta: float
    client: str | None


class Written(NamedTuple):
    """One sketch that was written."""

    client: str
    file: str
    n: float
    bytes: int
    signal_to_noise: float


class Publisher:
    """Writes sketches, with noise and on a budget where those were asked for.

    Everything that can be refused is refused here, before the data are read.
    """

    def __init__(self, out: Path, many: bool, privacy: Privacy, budget: Budget) -> None:
        if many and budget.client is not None:
            raise ConfigError("--client and --by: each client of the table has its own account")
        self.out, self.privacy, self.budget = out, privacy, budget
        self.ledger = open_ledger(privacy, budget)
        self.written: list[Written] = []
        self.last: RaceSketch | None = None
        folder = out if many else out.parent
        with writing(out):
            if many:
                folder.mkdir(parents=True, exist_ok=True)
            if not folder.is_dir() or not os.access(folder, os.W_OK) or (out.is_dir() and not many):
                raise DataError(f"{out}: cannot be written; {folder} must be a folder to write to")

    def write(self, sketch: RaceSketch, client: str | None = None, name: str | None = None) -> None:
        """Make one sketch private if asked for, and save it."""
        path = self.out if name is None else self.out / name
        owner = client or self.budget.client or path.stem
        made = self._private(sketch, owner)
        with writing(path):
            made.save(path)
        ratio = signal_to_noise(made)
        self.written.append(Written(owner, str(path), made.n, path.stat().st_size, ratio))
        self.last = made

    def write_all(self, sketches: Iterable[tuple[str, RaceSketch]]) -> None:
        """Write the sketches of all clients and the index that says whose they are."""
        names, index = FileNames(), {}
        for client, sketch in sketches:
            name = names.of(client)
            index[name] = client
            self.write(sketch, client, name)
        with writing(self.out / INDEX):
            (self.out / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True), "utf-8")

    def _private(self, sketch: RaceSketch, client: str) -> RaceSketch:
        p = self.privacy
        if p.epsilon is None:
            return sketch
        options: dict[str, Any] = {"neighbors": str(p.neighbors), "n": str(p.n)}
        with user_values():
            if self.ledger is None:
                return sketch.privatize(p.epsilon, p.delta, **options)
            with writing(self.ledger.path):
                return self.ledger.release(client, sketch, p.epsilon, p.delta, **options)

    def report(self, format: Format) -> None:
        """Say what was written, and warn on standard error where noise exceeds the signal."""
        drowned = [w.signal_to_noise for w in self.written if w.signal_to_noise < 1]
        if drowned:
            typer.echo(
                f"warning: the noise exceeds the signal in {len(drowned)} of {len(self.written)} "
                f"sketches (worst signal to noise {min(drowned):.2g}): use fewer --rows, a larger "
                "--epsilon, a --delta above 0, or more records",
                err=True,
            )
        if self.last is None:
            return
        if format is Format.json:
            show_json({"sketches": self.written, **self.last.spec, "release": self._release()})
            return
        facts = describe(self.last)
        if len(self.written) > 1:
            sizes = sorted(w.n for w in self.written)
            facts["records"] = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f}, {sum(sizes):,.0f} in all"
            if "signal to noise" in facts:
                ratios = [w.signal_to_noise for w in self.written]
                facts["signal to noise"] = f"{min(ratios):.2g} to {max(ratios):.2g}"
        facts["size"] = f"{sum(w.bytes for w in self.written) / 1e3:,.1f} kB"
        what = f"{len(self.written)} sketches in {self.out}" if self.out.is_dir() else self.out
        show(facts_table(facts, str(what)))

    def _release(self) -> dict[str, Any] | None:
        return None if self.last is None else self.last.header()["release"]


def open_ledger(privacy: Privacy, budget: Budget) -> BudgetLedger | None:
    """Open the ledger with the budget that it holds, or begin one with the budget given."""
    if budget.path is None:
        if budget.epsilon is not None or budget.client is not None:
            raise ConfigError("--budget-epsilon and --client need --budget")
        return None
    if privacy.epsilon is None:
        raise ConfigError("--budget needs --epsilon: exact sketches are no private release")
    epsilon, delta = budget.epsilon, budget.delta
    if epsilon is None:
        epsilon, delta = _held(budget.path)
    with user_values():
        return BudgetLedger(budget.path, epsilon, delta)


def _held(path: Path) -> tuple[float, float]:
    if not path.exists():
        raise ConfigError(f"--budget {path}: a new ledger needs --budget-epsilon")
    try:
        held = json.loads(path.read_text("utf-8"))
        return float(held["epsilon"]), float(held["delta"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is no budget ledger: {error}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a line that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def watching(name: str, rows: int | None) -> Iterator[OnRows]:
    """Show on standard error how many rows were read; a further pass begins anew."""
    bar = progress()
    task = bar.add_task(name[:18], total=rows, note="rows")

    def on_rows(count: int) -> None:
        bar.start()
        done = bar.tasks[task].completed + count
        bar.update(task, completed=count if rows is not None and done > rows else done)

    try:
        yield on_rows
    except BaseException:
        bar.live.transient = True  # the only thing to read is what went wrong
        bar.live.stop()
        raise
    bar.stop()
