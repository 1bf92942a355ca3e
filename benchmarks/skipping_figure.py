"""Accuracy over the share of models sent, for every threshold: as paper 2's Figure 1.

A dashed line shows what fewer rounds without a gate reach with the same number of models.

python benchmarks/skipping_figure.py OUT.svg benchmarks/results/skipping-*.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import altair as alt
import numpy as np

from fedcohort.report.figures import COLORS, GREY, Figure, save

BLUE, RED, GREEN, PURPLE, ORANGE, _ = COLORS["light"]
FAMILIES = {  # pattern of the variant: legend, color, marker
    r"FedAvg, random": ("FedAvg, random cohorts", GREY, "square"),
    r"select": ("sketch-to-select", BLUE, "square"),
    r"select by steps": ("sketch-to-select by steps", ORANGE, "square"),
    r"select by steps, .*": ("and skip, by steps", ORANGE, "diamond"),
    r"select, skip ([\d.]+)": ("and skip: all or none (paper 2)", BLUE, "circle"),
    r"select, skip ([\d.]+), by client": ("and skip: by client", RED, "circle"),
    r"select, skip [\d.]+, at most (\d+) in a row": ("and skip: bounded run", GREEN, "triangle"),
    r"select, auto [\d.]+(?:, adaptive)?": ("and skip: automatic threshold", PURPLE, "diamond"),
}


def stopped_early(run) -> list[dict]:
    """Return the accuracy of a run without a gate over its rounds, as a share of all of them."""
    accuracy = np.mean([seed["accuracy"] for seed in run["seeds"]], axis=0)
    ends = range(1, len(accuracy) + 1)
    smooth = [accuracy[end - -(-end // 10) : end].mean() for end in ends]  # the last tenth
    shares = [100 * end / len(accuracy) for end in ends]
    points = zip(shares, smooth, strict=True)
    return [{"up": round(x, 3), "accuracy": round(float(y), 4)} for x, y in points if x >= 0.3]


def family_points(runs) -> list[dict]:
    points = []
    for pattern, (legend, _, _) in FAMILIES.items():
        found = [(re.fullmatch(pattern, run["variant"]), run) for run in runs]
        own = [(m[1] if m.re.groups else "", run) for m, run in found if m]
        joined = len(own) > 2 and bool(own[0][0])
        points += [
            {
                "family": legend,
                "text": text,
                "order": float(text or 0),
                "joined": joined,
                "up": run["up %"],
                "accuracy": run["accuracy"],
            }
            for text, run in own
        ]
    return points


def panel(key: str, title: str, bottom: float) -> alt.LayerChart:
    legends, colors, shapes = zip(*FAMILIES.values(), strict=True)
    x = alt.X("up:Q", title="models uploaded, % of FedAvg", axis=alt.Axis(grid=False, format="~g"))
    x = x.scale(type="log", domain=[0.3, 130], nice=False)
    y = alt.Y("accuracy:Q", title="test accuracy", axis=alt.Axis(format=".0%"))
    y = y.scale(domainMin=bottom, zero=False)
    color = alt.Color("family:N", scale=alt.Scale(domain=legends, range=colors), sort=None)
    color = color.legend(title=None, orient="bottom", columns=3, labelLimit=300)
    shape = alt.Shape("family:N", scale=alt.Scale(domain=legends, range=shapes), sort=None)
    points = alt.Chart(alt.NamedData(f"points-{key}")).encode(x=x, y=y, color=color)
    early = alt.Chart(alt.NamedData(f"early-{key}")).encode(x=x, y=y)
    return alt.layer(
        early.mark_line(strokeDash=[4, 3], color=GREY, strokeWidth=1.2, clip=True),
        points.transform_filter("datum.joined").mark_line(strokeWidth=1.6).encode(order="order:Q"),
        points.mark_point(filled=True, size=55, opacity=1).encode(shape=shape),
        points.mark_text(align="left", dx=6, dy=-6, fontSize=9).encode(text="text:N"),
    ).properties(title=title, width=360, height=230)


def main(target: str, *sources: str) -> None:
    panels: dict[tuple[str, str], list] = {}
    for source in sources:
        result = json.loads(Path(source).read_text())["result"]
        for run in result["runs"]:
            panels.setdefault((result["dataset"], run["case"]), []).append(run)
    charts, data = [], {}
    for i, ((dataset, case), runs) in enumerate(sorted(panels.items())):
        bottom = min(run["accuracy"] for run in runs if "reset" not in run["variant"]) - 0.02
        plain = next(run for run in runs if run["variant"] == "select")
        data[f"points-{i}"] = [p for p in family_points(runs) if p["accuracy"] >= bottom]
        data[f"early-{i}"] = [p for p in stopped_early(plain) if p["accuracy"] >= bottom]
        charts.append(panel(str(i), f"{dataset}, {case}", bottom))
    title = "Accuracy over models uploaded; dashed: the same run without a gate, stopped early"
    save(Figure("skipping", title, "", alt.concat(*charts, columns=2), data), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
