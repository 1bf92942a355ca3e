"""Write the numbers of the documentation from the committed results, between markers.

python benchmarks/docs_numbers.py            # rewrite README.md and docs/*.md
python benchmarks/docs_numbers.py --check    # exit 1 and name the pages that differ

A page marks a place with ``<!-- numbers: NAME ARGUMENTS -->`` and ``<!-- /numbers -->``; NAME is a
function of this file, which returns Markdown.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import numpy as np

from fedcohort.report.tables import paired_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- numbers: ([^\n]*?) -->\n)(.*?)(<!-- /numbers -->)", re.S)


@cache
def result(name):
    return json.loads((RESULTS / name).read_text())


def table(header, lines):
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def spread(values, form="{:.1f}"):
    mean = form.format(np.mean(values))
    return f"{mean} ± {form.format(np.std(values, ddof=1))}" if len(values) > 1 else mean


def parts(file, setting):
    found = {p["variant"]: p for p in result(file)["parts"] if p["setting"] == setting}
    if not found:
        raise KeyError(f"{file} has no setting {setting!r}")
    return found


def rounds_to(part, target):
    """Rounds to the target per seed; all rounds plus one for a seed that never got there."""
    at = part["targets"].index(target)
    last = part["experiment"]["rounds"] + 1
    return np.array(
        [last if r["rounds_to"][at] is None else r["rounds_to"][at] for r in part["seeds"]]
    )


def missing(part, target):
    at = part["targets"].index(target)
    return sum(row["rounds_to"][at] is None for row in part["seeds"])


def rounds_cell(part, target):
    left, seeds = missing(part, target), len(part["seeds"])
    if left == seeds:
        return f"not in {part['experiment']['rounds']}"
    text = spread(rounds_to(part, target).astype(float))
    return f"≥ {text} ({seeds - left} of {seeds} seeds)" if left else text


def ratio(part, base, target):
    """How many times fewer rounds than uniform: geometric mean over paired seeds, 95 % interval."""
    logs = np.log(rounds_to(base, target) / rounds_to(part, target))
    interval = paired_interval(logs.tolist())
    if interval is None:
        return f"{np.exp(logs.mean()):.2f}x", "one seed"
    mean, low, high = (float(np.exp(v)) for v in interval)
    word = "faster" if low > 1 else "slower" if high < 1 else "level"
    if missing(part, target) and missing(base, target):
        word = "undecided"  # some seeds of both never got there
    return f"{mean:.2f}x ({low:.2f} to {high:.2f})", word


def at_equal_bytes(part, base):
    """Accuracy of each seed when it has sent as much as uniform did in all its rounds."""
    budget = min(row["megabytes"][-1] for row in base["seeds"])
    values = []
    for row in part["seeds"]:
        known = [
            a
            for a, b in zip(row["curve"], row["megabytes"], strict=True)
            if a is not None and b <= budget + 1e-9
        ]
        values.append(100 * np.mean(known[-2:]) if known else np.nan)
    return np.array(values)


def benchmark(file, setting, target):
    """All variants of one setting, by rounds to the target."""
    found, target = parts(file, setting), float(target)
    base = found["uniform"]
    order = sorted(found, key=lambda v: rounds_to(found[v], target).mean())
    lines = []
    for name in order:
        part = found[name]
        rows = part["seeds"]
        times, word = ("1x", "baseline") if part is base else ratio(part, base, target)
        lines.append(
            [
                name,
                rounds_cell(part, target),
                times,
                word,
                spread([100 * r["accuracy"] for r in rows]),
                spread(at_equal_bytes(part, base)),
                spread([100 * r["worst_tenth_accuracy"] for r in rows]),
                f"{np.mean([r['gemd'] for r in rows]):.2f}",
                f"{np.mean([r['participation_entropy'] for r in rows]):.2f}",
                f"{1e3 * np.mean([r['select_seconds'] for r in rows]):.1f}",
            ]
        )
    header = ["policy", f"rounds to {target:.0%}", "fewer rounds", "against uniform", "accuracy %"]
    header += ["at equal bytes %", "worst tenth %", "GEMD", "entropy", "ms to select"]
    return table(header, lines)


def headline(file, *cases):
    """Uniform against SketchMatch at epsilon 1: SETTING=TARGET for each row."""
    lines = []
    for case in cases:
        setting, _, target = case.rpartition("=")
        found, goal = parts(file, setting), float(target)
        base, ours = found["uniform"], found["sketch-match, epsilon 1"]
        times, word = ratio(ours, base, goal)
        cells = [rounds_cell(part, goal) for part in (base, ours)]
        lines.append([f"{setting}, {goal:.0%}", *cells, times, word])
    header = ["setting, target", "uniform", "sketch-match", "fewer rounds", "verdict"]
    return table(header, lines)


def provenance(file):
    """Where a result comes from, in a sentence."""
    found = result(file)
    made = found["provenance"]
    machine = made[0]["gpu"] or made[0]["cpu"]
    count = len({m["command"] for m in made})
    text = (
        f"Made at commit `{found['commit'][:10]}` on {machine} with seeds 1000 and up, by {count}"
    )
    return f"{text} commands that `benchmarks/results/{file}` lists.\n"


FUNCTIONS = {f.__name__: f for f in (benchmark, headline, provenance)}


def filled(text):
    def fill(match):
        name, *arguments = shlex.split(match[2])
        return match[1] + FUNCTIONS[name](*arguments) + match[4]

    return PLACE.sub(fill, text)


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    differ = []
    for page in pages():
        text = page.read_text()
        wanted = filled(text)
        if wanted != text:
            differ.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(wanted)
    for page in differ:
        print(page)
    return int(bool(differ) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
