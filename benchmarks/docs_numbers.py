"""Write the numbers of the documentation from the committed results, between markers.

python benchmarks/docs_numbers.py            # rewrite README.md, docs/*.md and their figures
python benchmarks/docs_numbers.py --check    # exit 1 and name the pages that differ

A page marks a place with ``<!-- numbers: NAME ARGUMENTS -->`` and ``<!-- /numbers -->``; NAME is a
function of a module in `docs_tables`, which returns Markdown. What was not run says so.
"""

from __future__ import annotations

import re
import shlex
import sys

from docs_tables import (
    benchmark,
    measure,
    papers,
    personalize,
    plan,
    reliability,
    repeated,
    results,
    skipping,
    speed,
)

MODULES = (
    *(results, benchmark, repeated, skipping, papers),
    *(plan, measure, personalize, reliability, speed),
)
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


def pages():
    return [results.ROOT / "README.md", *sorted((results.ROOT / "docs").rglob("*.md"))]


def main() -> int:
    differ = []
    for page in pages():
        text = page.read_text()
        wanted = filled(text)
        if wanted != text:
            differ.append(page.relative_to(results.ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(wanted)
    for page in differ:
        print(page)
    return int(bool(differ) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
