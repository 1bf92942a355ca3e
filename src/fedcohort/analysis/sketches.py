"""What a sketch is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fedcohort.files.columns import Column, columns_of
from fedcohort.privacy.release import signal_to_noise
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
    facts |= column_facts(columns_of(sketch))
    for key, value in spec["transform"].items():
        facts[key.replace("_", " ")] = _short(value) if isinstance(value, list) else str(value)
    facts["records"] = f"{sketch.n:,.0f}"
    facts["privacy"] = privacy(sketch)
    if sketch.private:
        facts["signal to noise"] = f"{signal_to_noise(sketch):.2g}"
    return facts


def column_facts(columns: Sequence[Column]) -> dict[str, str]:
    """Say which columns were hashed and, where they share them, by which constants.

    Examples
    --------
    >>> column_facts([Column("a", center=0.5), Column("b", center=0.5)])
    {'columns': 'a, b', 'center': '0.5'}
    """
    if not columns:
        return {}
    plain = {column.kind for column in columns} <= {"number", "value"}
    named = [c.name if plain else f"{c.name} ({c.kind})" for c in columns]
    facts = {"columns": _short(named)}
    for key, default in (("center", 0.0), ("scale", 1.0), ("weight", 1.0)):
        own = [c for c in columns if key == "weight" or c.kind == "number" or c.since is not None]
        values = {c.name: getattr(c, key) for c in own}
        if any(value != default for value in values.values()):
            same = len(set(values.values())) == 1
            listed = [f"{name} {value:g}" for name, value in values.items()]
            facts[key] = f"{values[own[0].name]:g}" if same else _short(listed)
    return facts


def privacy(sketch: RaceSketch) -> str:
    """Say in one line what protects the records in all, and what is public.

    Examples
    --------
    >>> privacy(RaceSketch.minhash(rows=2))
    'none: exact counts'
    """
    return sketch.claim() if sketch.private else "none: exact counts"


def _short(values: Sequence[object], most: int = 12) -> str:
    text = ", ".join(str(v) for v in values[:most])
    return text if len(values) <= most else f"{text}, ... ({len(values)} in all)"
