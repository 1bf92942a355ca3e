"""What a sketch is, in words and in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fedcohort.files.sketching import named_columns
from fedcohort.privacy.planning import signal_to_noise
from fedcohort.sketch.race import RaceSketch


def describe(sketch: RaceSketch) -> dict[str, str]:
    """Say what a sketch holds, how it was made and what it protects.

    Examples
    --------
    >>> describe(RaceSketch.srp(dim=2, rows=10, bits=3))["hash"]
    'srp, 10 rows of 8 buckets, bits=3, dim=2, family=fast, seed=0'
    """
    spec = sketch.spec
    options = {
        k: v for k, v in sorted(spec["hash"].items()) if k not in ("name", "rows", "buckets")
    }
    stated = ", ".join(f"{k}={v}" for k, v in options.items())
    facts = {
        "hash": f"{spec['hash']['name']}, {sketch.rows} rows of {sketch.buckets} buckets, {stated}"
    }
    for key, value in spec["transform"].items():
        columns = named_columns(value) if key == "embedding" else None
        if columns is not None:
            facts["columns"] = _short(columns)
        else:
            facts[key.replace("_", " ")] = _short(value) if isinstance(value, list) else str(value)
    facts["records"] = f"{sketch.n:,.0f}"
    facts["privacy"] = privacy(sketch)
    if sketch.private:
        facts["signal to noise"] = f"{signal_to_noise(sketch):.2g}"
    return facts


def privacy(sketch: RaceSketch) -> str:
    """Say in a line what protects the records.

    Examples
    --------
    >>> privacy(RaceSketch.minhash(rows=2))
    'none: exact counts'
    """
    made = sketch.release
    if made is None:
        return "none: exact counts"
    budget = f"epsilon={made.epsilon:g}" + (f", delta={made.delta:g}" if made.delta else "")
    merged = f", {made.parts} sketches merged" if made.parts > 1 else ""
    return f"{budget} for one record ({made.neighbors}), {made.mechanism} noise, n {made.n}{merged}"


def facts_table(facts: Mapping[str, str], title: str) -> Table:
    """Lay out facts line by line."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in facts.items():
        table.add_row(key, Text(value))  # names may hold what Rich takes for markup
    return table


def _short(values: Sequence[object], most: int = 12) -> str:
    text = ", ".join(str(v) for v in values[:most])
    return text if len(values) <= most else f"{text}, ... ({len(values)} in all)"
