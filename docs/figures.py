"""Make the pictures of README and docs again; all are drawn by `fedcohort.report`.

python docs/figures.py            # all of them, some minutes
python docs/figures.py NAME...    # some of them

===========================  =====================================================================
images/demo.png              screenshot of the report that ``make demo`` ends with
images/report-dark.png       the same in dark, its figures of clients
images/report-phone.png      the same on a phone
heterogeneity.png            screenshot of the page of ``fedcohort profile`` in docs/measure.md
images/tutorial-*.svg        the settings of docs/tutorials
images/cold-start.svg        paper 0's Figure 3, from committed results
images/skipping.svg          paper 2's Figures 1 and 2, from docs/tables/skipping.csv
images/selection-speed.svg   seconds per round of every policy, from committed results
images/benchmark-*.svg       ``make docs-numbers``, from committed results
===========================  =====================================================================

Screenshots need Chromium (``apt-get install chromium``, or set CHROMIUM). The drawings of
docs/concepts.md, in docs/drawings, are written by hand.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
IMAGES = DOCS / "images"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run"
)


def fedcohort(command: str, folder: Path) -> None:
    program = [sys.executable, "-c", "from fedcohort.cli import main; main()"]
    subprocess.run([*program, *shlex.split(command)], cwd=folder, check=True)


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def save(figure: Any, path: Path) -> None:
    """Draw a figure into a file."""
    from fedcohort.report.figures import render

    path.write_bytes(render(figure, path.suffix))


def screenshot(page: Path, target: Path, *, width: int, height: int, **options: object) -> None:
    """Take a picture of a page; `scroll_to` names an element that is brought to the top."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        tab = browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=options.get("scale", 1.5),
            color_scheme=options.get("theme", "light"),
        )
        tab.set_default_timeout(180_000)
        tab.goto(page.as_uri())
        if options.get("charts"):
            tab.wait_for_selector("html[data-ready=true]")
        if "scroll_to" in options:
            tab.locator(str(options["scroll_to"])).first.evaluate("e => e.scrollIntoView()")
            tab.wait_for_timeout(500)
        tab.screenshot(path=target)
        browser.close()


def demo(folder: Path) -> None:
    fedcohort("compare --seeds 5 --out demo", folder)
    fedcohort("report demo -o demo/report.html", folder)
    page = folder / "demo" / "report.html"
    screenshot(page, IMAGES / "demo.png", width=1180, height=890, charts=True)
    dark = {"theme": "dark", "charts": True, "scroll_to": "h2:has-text('Clients')"}
    screenshot(page, IMAGES / "report-dark.png", width=1180, height=760, **dark)
    phone = {"charts": True, "scale": 2, "scroll_to": "#title-accuracy-megabytes"}
    screenshot(page, IMAGES / "report-phone.png", width=375, height=760, **phone)


def heterogeneity(folder: Path) -> None:
    page = DOCS / "measure.md"
    exec(blocks(page, "python")[0], {"__name__": "measure"})
    fedcohort("sketch scans.parquet -o sites --by site --columns 'p*' --set center=0.3", folder)
    fedcohort("profile sites -o page.html --cohort-size 0", folder)
    screenshot(folder / "page.html", DOCS / "heterogeneity.png", width=1160, height=1460, scale=1.2)


def tutorial_figure(name: str, figure: str, folder: Path) -> None:
    """Run the command of a tutorial and keep one of its figures."""
    for line in (
        blocks(DOCS / "tutorials" / f"{name}.md", "bash")[0].replace("\\\n", "").split("\n")
    ):
        if line.strip():
            fedcohort(line.removeprefix("fedcohort "), folder)
    shutil.copy(folder / "figures" / f"{figure}.svg", IMAGES / f"tutorial-{name}.svg")


def tutorial_select(folder: Path) -> None:
    tutorial_figure("select", "accuracy-rounds", folder)


def tutorial_skip(folder: Path) -> None:
    tutorial_figure("skip", "accuracy-megabytes", folder)


def tutorial_personalize(folder: Path) -> None:
    """Run the code of the tutorial, and draw what it prints for each newcomer."""
    import altair as alt
    import numpy as np

    from fedcohort.report.figures import COLORS, GREY, Figure

    known: dict = {"__name__": "tutorial"}
    for code in blocks(DOCS / "tutorials" / "personalize.md", "python")[:-2]:
        exec(code, known)
    rows = []
    for pair in ((3, 8), (0, 1), (4, 6), (5, 8), (2, 9), (1, 7)):
        mine = np.isin(known["digits"].y_test, pair)
        x, y = known["digits"].x_test[mine], known["digits"].y_test[mine]
        advised = known["start"].model(known["start"].advise(known["sketch_of"](x)))
        for which, arrays in (("global", known["shared"]), ("advised", advised)):
            share = known["accuracy"](arrays, x, y)
            rows.append({"digits": f"{pair[0]} and {pair[1]}", "model": which, "accuracy": share})
    known["registry"].close()
    kinds = alt.Scale(domain=["global", "advised"], range=[GREY, COLORS["light"][0]])
    base = alt.Chart(alt.NamedData("rows")).encode(
        x=alt.X("accuracy:Q", axis=alt.Axis(format=".0%"), scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("digits:N", sort=None, title="the newcomer's digits"),
    )
    line = base.mark_line(color=GREY, opacity=0.6).encode(detail="digits:N")
    legend = alt.Legend(title="model", orient="top")
    points = base.mark_circle(size=130, opacity=1).encode(
        color=alt.Color("model:N", scale=kinds, legend=legend)
    )
    chart = alt.layer(line, points).properties(height=200)
    title = "Accuracy of six newcomers without labels; handwritten digits, 30 warm clients, seed 0"
    save(Figure("personalize", title, "", chart, {"rows": rows}),
         IMAGES / "tutorial-personalize.svg")  # fmt: skip


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def cold_start(folder: Path) -> None:
    """Accuracy of each cold client, from worst to best."""
    import altair as alt

    from fedcohort.report.figures import COLORS, GREY, Figure

    lines = {
        "random": ("random personal model", GREY),
        "global": ("global model", COLORS["light"][0]),
        "nearest": ("nearest sketch's model", COLORS["light"][1]),
        "best": ("best personal model (needs labels)", COLORS["light"][2]),
    }
    parts = [p for p in result("benchmark-coldstart.json")["parts"] if p["setting"] == "MNIST"]
    held = {p["variant"]: p["result"]["splits"][0]["by client, first seed"] for p in parts}
    splits = "twins", "as the text reads", "no twins"
    rows = [
        {"split": split, "model": label, "client": place, "accuracy": accuracy}
        for split in splits
        for key, (label, _) in lines.items()
        for place, accuracy in enumerate(sorted(held[split][key]), start=1)
    ]
    labels, colors = zip(*lines.values(), strict=True)
    color = alt.Color("model:N", scale=alt.Scale(domain=labels, range=colors), sort=None)
    x = alt.X("client:Q", title="cold clients, sorted", axis=alt.Axis(grid=False))
    y = alt.Y("accuracy:Q", title="test accuracy", scale=alt.Scale(domain=[0, 1]))
    legend = color.legend(title=None, orient="bottom", columns=2, labelLimit=300)
    chart = alt.Chart(alt.NamedData("rows")).mark_line(strokeWidth=2.2)
    chart = chart.encode(x=x, y=y.axis(format=".0%"), color=legend)
    panels = [
        chart.transform_filter(alt.FieldEqualPredicate(split, "split")).properties(
            title=f"MNIST, {split}", width=300, height=220
        )
        for split in splits
    ]
    caption = "MNIST, seed 1000: one model per cold client, without its labels"
    figure = Figure("cold-start", caption, "", alt.hconcat(*panels), {"rows": rows})
    save(figure, IMAGES / "cold-start.svg")


def skipping(folder: Path) -> None:
    """Paper 2's Figures 1 and 2: traffic and accuracy by threshold, against redrawn cohorts."""
    import altair as alt

    from fedcohort.report.figures import Figure

    rows = []
    for row in csv.DictReader((DOCS / "tables" / "skipping.csv").open()):
        before, _, threshold = row["variant"].partition("select, skip ")
        if not before and threshold.replace(".", "").isdigit():
            traffic = (float(row["up %"]) + float(row["down to all %"])) / 2
            change = float(row["change against uniform %"])
            rows.append({"setting": row["setting"], "threshold": threshold, "traffic": traffic})
            rows[-1] |= {"change": change}
    axis = alt.Axis(grid=False, values=[0.5, 1, 2, 5, 10, 20, 50, 100])
    log = alt.Scale(type="log", domain=[0.3, 110], nice=False)
    x = alt.X("traffic:Q", title="traffic, % of FedAvg's", axis=axis, scale=log)
    y = alt.Y("change:Q", title="change of accuracy, %")
    legend = alt.Legend(title=None, orient="bottom", columns=2, labelLimit=300)
    color = alt.Color("setting:N", legend=legend)
    base = alt.Chart(alt.NamedData("rows")).encode(x=x, y=y, color=color)
    line = base.mark_line(strokeWidth=2, point=True).encode(order="threshold:Q")
    rule = alt.Chart(alt.NamedData("rows")).mark_rule(strokeDash=[4, 4], opacity=0.4)
    limits = (rule.encode(x=alt.datum(10)), rule.encode(y=alt.datum(-5)))
    chart = alt.layer(line, *limits).properties(height=320)
    title = "Traffic and accuracy of Sketch-to-Skip by threshold"
    save(Figure("skipping", title, "", chart, {"rows": rows}), IMAGES / "skipping.svg")


def selection_speed(folder: Path) -> None:
    """Seconds per round over clients; only the labeled policies have colors."""
    import altair as alt

    from fedcohort.report.figures import COLORS, GREY, Figure

    rows = result("selection-speed.json")["result"]["rounds"]
    largest = max(row["clients"] for row in rows)
    ends = {row["policy"]: row["median_round_s"] for row in rows if row["clients"] == largest}
    colors = {"uniform": GREY, max(ends, key=lambda name: ends[name]): COLORS["light"][1]}
    colors |= {"sketch-match": COLORS["light"][0], "fedcor": COLORS["light"][2]}
    data = [
        {"policy": r["policy"], "clients": r["clients"], "seconds": r["median_round_s"]}
        for r in rows
    ]
    named = alt.FieldOneOfPredicate("policy", list(colors)).to_dict()
    x = alt.X("clients:Q", axis=alt.Axis(grid=False, format="~s"), scale=alt.Scale(type="log"))
    y = alt.Y("seconds:Q", title="seconds per round (median)", axis=alt.Axis(format="~g"))
    base = alt.Chart(alt.NamedData("rows")).encode(x=x, y=y.scale(type="log"), detail="policy:N")
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    color = alt.Color("policy:N", scale=scale, legend=None)
    marked = base.transform_filter(named)
    label = marked.transform_filter(f"datum.clients == {largest}")
    chart = alt.layer(
        base.mark_line(style="faint"),
        marked.mark_line(strokeWidth=2.2, point=True).encode(color=color),
        label.mark_text(align="left", dx=8, fontWeight=600).encode(text="policy:N", color=color),
    ).properties(height=380)
    title = "Selection time as the federation grows; grey: the other policies"
    save(
        Figure("selection-speed", title, "", chart, {"rows": data}), IMAGES / "selection-speed.svg"
    )


MAKERS = {
    maker.__name__: maker
    for maker in (
        demo, heterogeneity, tutorial_select, tutorial_skip, tutorial_personalize,
        cold_start, selection_speed, skipping,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    home = Path.cwd()
    for name in names or list(MAKERS):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # the code of pages writes files beside itself
            MAKERS[name](Path(folder))
            os.chdir(home)
        print("made", name)


if __name__ == "__main__":
    main(sys.argv[1:])
