"""Paper 0's Figure 3 from a result file: accuracy of each cold client, from worst to best.

python benchmarks/cold_start_figure.py benchmarks/results/benchmark-coldstart.json OUT.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import altair as alt

from fedcohort.report.figures import COLORS, GREY, Figure, save

LINES = {
    "random": ("random personal model", GREY),
    "global": ("global model", COLORS["light"][0]),
    "nearest": ("nearest sketch's model", COLORS["light"][1]),
    "best": ("best personal model (needs labels)", COLORS["light"][2]),
}
SPLITS = "twins", "as the text reads", "no twins"


def main(source: str, target: str) -> None:
    parts = [p for p in json.loads(Path(source).read_text())["parts"] if p["setting"] == "MNIST"]
    found = {p["variant"]: p["result"]["splits"][0] for p in parts}
    splits = {name: found[name] for name in SPLITS}
    rows = [
        {"split": name, "model": label, "client": place, "accuracy": accuracy}
        for name, split in splits.items()
        for key, (label, _) in LINES.items()
        for place, accuracy in enumerate(sorted(split["by client, first seed"][key]), start=1)
    ]
    labels, colors = zip(*LINES.values(), strict=True)
    color = alt.Color("model:N", scale=alt.Scale(domain=labels, range=colors), sort=None)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_line(strokeWidth=2.2)
        .encode(
            x=alt.X("client:Q", title="cold clients, sorted", axis=alt.Axis(grid=False)),
            y=alt.Y("accuracy:Q", title="test accuracy", scale=alt.Scale(domain=[0, 1])).axis(
                format=".0%"
            ),
            color=color.legend(title=None, orient="bottom", columns=2, labelLimit=300),
        )
    )
    panels = [
        chart.transform_filter(alt.FieldEqualPredicate(split, "split")).properties(
            title=f"MNIST, {split}", width=300, height=220
        )
        for split in splits
    ]
    caption = "MNIST, seed 1000: one model per cold client, without its labels"
    save(Figure("cold-start", caption, "", alt.hconcat(*panels), {"rows": rows}), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
