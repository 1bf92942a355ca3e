"""Pages: one HTML file each that needs no network, or Markdown with figures.

All pages share a base template, a style sheet and a script. A page's own policy forbids loading
anything, and allows only the scripts that are part of it, by their hashes: a client that is called
``<script>`` is text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from vl_convert import javascript_bundle

from fedcohort.analysis.heterogeneity import OUTLIER, ClientRow, Heterogeneity
from fedcohort.analysis.plan import Plan
from fedcohort.analysis.verdict import BY_CHANCE, few, marked_in_words
from fedcohort.report import figures
from fedcohort.report.content import Content, group_neighbors
from fedcohort.report.figures import CLUSTERS, MAX_BARS, Figure, run_figures
from fedcohort.report.tables import Cell, Cells, Column, cells, number

TEMPLATES = Path(__file__).with_name("templates")
VEGA_LITE = "6.4"  # the version of Altair's specifications
WORDS = ("name", "title", "caption", "control", "labels")  # of a figure, for the script
MAX_NAMES_AT_MATRIX = 40  # of more clients, groups of neighbors are averaged


def run_page(report: Content, *, live: bool = False) -> str:
    """Lay out runs, finished or not; a `live` page asks its server for new rounds."""
    charts = run_figures(report)
    return _render(
        "runs.html",
        data=_data(report, charts),
        live=live,
        title=report.title,
        report=report,
        figures=charts,
    )


def run_markdown(report: Content, figure_folder: str) -> str:
    """Lay out runs in Markdown, for a paper or a pull request, with SVG figures in a folder."""
    template = _templates().get_template("runs.md")
    return template.render(report=report, figures=run_figures(report), folder=figure_folder)


def profile_page(
    profile: Heterogeneity, title: str = "How different are the clients?", plan: Plan | None = None
) -> str:
    """Lay out a federation's differences, and what to expect of chosen cohorts."""
    marks = [_mark(client) for client in profile.clients]
    return _render(
        "profile.html",
        title=title,
        profile=profile,
        verdict=profile.verdict(plan),
        outliers=few([c.name for c in profile.outliers]),
        left_out=few(profile.left_out),
        bars=Markup(figures.distances_to_all(marks, profile.random_distance)),
        hidden=max(0, len(marks) - MAX_BARS),
        matrix=Markup(_matrix(profile)),
        table=client_cells(profile),
        histograms=[
            (h, Markup(figures.histogram(h.bins, h.here, h.elsewhere, f"{h.column} of {h.client}")))
            for h in profile.histograms
        ],
        changes=change_cells(profile),
        limits={"outlier": OUTLIER, "by_chance": BY_CHANCE},
    )


def _matrix(profile: Heterogeneity) -> str:
    groups = group_neighbors(profile.clusters.order.tolist(), MAX_NAMES_AT_MATRIX)
    means = np.array([[profile.matrix[np.ix_(a, b)].mean() for b in groups] for a in groups])
    names = [few([profile.clients[i].name for i in group], 1) for group in groups]
    return figures.matrix(means, names)


def client_cells(profile: Heterogeneity) -> Cells:
    """Lay out the clients, the farthest from all data first; outliers stand out."""
    mixed = 0 < profile.private < len(profile.clients)

    def marked(client: ClientRow) -> Cell:
        text = marked_in_words(profile.marked(client.name))
        return Cell(text or ("none" if profile.columns else ""), mark="odd" if text else "")

    columns = [
        Column("client", lambda c: Cell(c.name, c.name, mark="odd" * c.outlier), number=False),
        Column("columns that differ", marked, number=False, wraps=True),
        Column("records", lambda c: number(c.n, 0)),
        Column("distance", lambda c: number(c.distance, 4)),
        Column("± standard error", lambda c: Cell(f"{c.low:.4f} to {c.high:.4f}", c.high - c.low)),
        Column("robust score", lambda c: number(c.z)),
        Column("cluster", lambda c: Cell(f"{c.cluster + 1}", c.cluster, color=_color(c))),
        Column("nearest client", lambda c: Cell(f"{c.nearest} ({c.nearest_distance:.3f})"), False),
        Column("private", lambda c: Cell(("no", "yes")[c.private] if mixed else ""), number=False),
    ]
    return cells(sorted(profile.clients, key=lambda c: -c.distance), columns)


def change_cells(profile: Heterogeneity) -> Cells:
    """Lay out what has changed since earlier sketches, the largest changes first."""
    what = "columns that changed"
    columns = [
        Column("client", lambda c: Cell(c.client, mark="odd" * c.changed), number=False),
        Column("changed", lambda c: Cell("yes" if c.changed else "no"), number=False),
        Column(what, lambda c: Cell(marked_in_words(c.columns)), number=False, wraps=True),
        Column("distance to before", lambda c: number(c.distance, 4)),
    ]
    return cells(profile.changes, columns)


def _color(client: ClientRow) -> str:
    return CLUSTERS[client.cluster % len(CLUSTERS)]


def _mark(c: ClientRow) -> dict[str, Any]:
    around = f"distance {c.distance:.3f} ({c.low:.3f} to {c.high:.3f})"
    return {**c._asdict(), "color": _color(c), "tip": f"{c.name}: {c.n:,.0f} records, {around}"}


def _render(template: str, *, data: str = "", live: bool = False, **values: Any) -> str:
    """Fill a template; `data` is what the script draws figures from, as JSON."""
    library = _library() if data else ""
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digests = [hashlib.sha256(text.encode()).digest() for text in (library, script) if text]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    policy += "; connect-src 'self'" if live else ""
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    ours = {"policy": policy, "style": style, "script": script, "library": library, "data": data}
    safe = {name: Markup(text) for name, text in ours.items()}
    return _templates().get_template(template).render(live=live, **safe, **values)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader,
        autoescape=lambda name: name is None or name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    # Shows characters that Markdown would read.
    environment.filters["plain"] = lambda text: re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)
    return environment


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; bundling takes some seconds."""
    bundle: str = javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")


def _data(report: Content, charts: Sequence[Figure]) -> str:
    """Return what the page's script needs, as JSON without any character that HTML could read."""
    values = {
        **report.roles._asdict(),
        "chosen": report.chosen,
        "label_gap": figures.LABEL_GAP,
        "config": {"light": figures.config("light"), "dark": figures.config("dark")},
        "figures": [
            {name: getattr(figure, name) for name in WORDS}
            | {"spec": figures.specification(figure, width="container")}
            for figure in charts
        ],
    }
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
