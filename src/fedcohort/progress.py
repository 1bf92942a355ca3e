"""How far a long piece of work is, on standard error: bars on a terminal, plain lines elsewhere.

Nothing is shown before the first step is done, so that mistakes are reported first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds of work whose progress nobody needs to see


class Progress:
    """Tasks with a name, a count and a note: a Rich bar or a line per tenth for each.

    With `whole`, the steps of all tasks, there is a line for all; `done`, by task, were done
    before. Nothing is shown in the first `patience` seconds.
    """

    def __init__(
        self, whole: int | None = None, done: Mapping[str, int] | None = None, patience: float = 0.0
    ) -> None:
        self._whole, self._done = whole, dict(done or {})
        self._start = time.monotonic() + patience
        self._bars = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[str, Any] = {}  # the bar of each, or the last tenth that was printed

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, name: str, done: int, total: int | None, note: str = "") -> None:
        """Show that `done` of `total` steps are done; only a bar shows an unknown total."""
        self._done[name] = done
        if time.monotonic() < self._start:
            return
        if self._whole is not None and total is not None and self._whole > total:
            self._show("all", sum(self._done.values()), self._whole, "")
        self._show(name, done, total, note)

    def _show(self, name: str, done: int, total: int | None, note: str) -> None:
        if self._bars is None:
            if total is None:
                return
            tenth = 10 * done // max(total, 1)
            if tenth > self._tasks.get(name, -1) and (tenth or total < 10):
                self._tasks[name] = tenth
                print(f"{name}: {done} of {total}" + (f", {note}" if note else ""), file=sys.stderr)
            return
        self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)


def watched(items: Iterable[T], name: str, total: int) -> Iterator[T]:
    """Yield the items; work that takes longer than `PATIENCE` shows its progress."""
    with Progress(patience=PATIENCE) as show:
        for done, item in enumerate(items, start=1):
            yield item
            show(name, done, total)


def _bars() -> Any:
    """Return bars on standard error; each task has a field `note`."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description:>18}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
