"""Write the numbers of the documentation from the committed results, between markers.

python benchmarks/docs_numbers.py            # rewrite README.md, docs/*.md and their figures
python benchmarks/docs_numbers.py --check    # exit 1 and name the pages that differ
python benchmarks/docs_numbers.py docs/benchmark.md    # only this page, and docs/tables

A page marks a place with ``<!-- numbers: NAME ARGUMENTS -->`` and ``<!-- /numbers -->``; NAME is a
function of a module in `docs_tables`, which returns Markdown. What was not run says so.
The tables behind `docs/tables/*.csv` are written too.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys

from docs_tables import benchmark, pages, reliability, results, speed

MODULES = (results, benchmark, pages, reliability, speed)
PLACE = re.compile(r"(<!-- numbers: ([^\n]*?) -->\n)(.*?)(<!-- /numbers -->)", re.S)
FUNCTIONS = {
    name: made
    for module in MODULES
    for name, made in vars(module).items()
    if getattr(made, "__module__", "") == module.__name__
}


def filled(text):
    def fill(match):
        name, *arguments = shlex.split(match[2])
        return match[1] + FUNCTIONS[name](*arguments) + match[4]

    return PLACE.sub(fill, text)


def chosen_pages():
    """The pages that are named on the command line, or all."""
    named = [results.ROOT / word for word in sys.argv[1:] if not word.startswith("--")]
    return named or [results.ROOT / "README.md", *sorted((results.ROOT / "docs").rglob("*.md"))]


# Tables of hundreds of numbers are files beside the pages.
TABLES = {
    "selection.csv": lambda: benchmark.selection_rows("benchmark-selection.json"),
    "grid.csv": lambda: benchmark.grid_rows("benchmark-grid.json"),
    "cases.csv": lambda: benchmark.case_rows("selection-cases.json"),
    "time.csv": lambda: benchmark.time_rows("benchmark-time.json"),
    "reproductions.csv": pages.reproduction_rows,
    "audit.csv": lambda: reliability.audit_rows("audit.json"),
    "liars.csv": lambda: reliability.liar_rows("forgery.json"),
    "skipping.csv": lambda: pages.skipping_rows("benchmark-skip.json"),
}


def csv_text(rows):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(k for row in rows for k in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().replace("\r\n", "\n")


def main() -> int:
    wanted = {page: filled(page.read_text()) for page in chosen_pages()}
    folder = results.ROOT / "docs" / "tables"
    tables = {folder / name: list(rows()) for name, rows in TABLES.items()}
    wanted |= {path: csv_text(rows) for path, rows in tables.items() if rows}
    differ = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in differ:
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
        print(path.relative_to(results.ROOT).as_posix())
    return int(bool(differ) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
