"""All figures, drawn with Altair: in a page, and as SVG and PNG from the same code.

The baseline is gray, the runs that matter most have a color and a label at the line, and the others
are faint. Readers of a page set ``highlighted`` and ``chosen``, the run whose cohorts are shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count
from typing import Any, Literal, NamedTuple

import altair as alt
import numpy as np
import vl_convert
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from fedcohort.report.content import MAX_WAITED_FOR, Content, Roles, Rows

Floats = NDArray[np.float64]
Theme = Literal["light", "dark"]
#: Okabe and Ito's colors for readers with any color vision, the most legible ones first.
COLORS: dict[Theme, list[str]] = {
    "light": ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
    "dark": ["#56b4e9", "#e69f00", "#2cc295", "#cc79a7", "#f0e442", "#e8814a"],
}
CLUSTERS = [*COLORS["light"], "#8c6bb1", "#7f7f7f", "#b5a400", "#5b4636"]
#: From few to many; many always stands out from the background.
RAMP: dict[Theme, list[str]] = {
    "light": ["#dce9f5", "#6baed6", "#08519c"],
    "dark": ["#1f3347", "#3b7fb8", "#a6dcff"],
}
GREY = "#8a939e"  # legible on light and dark
REFERENCE = "#d55e00"
INK: dict[Theme, dict[str, str]] = {
    "light": {"text": "#1f2933", "soft": "#5b6573", "grid": "#e6e9ed", "faint": "#c9cfd6"},
    "dark": {"text": "#e4e7eb", "soft": "#a3adb8", "grid": "#2d3640", "faint": "#48525e"},
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
HEIGHT = 320
WIDTH = 620
LABEL_GAP = 15  # pixels between labels at lines
LABEL_ROOM = 36  # pixels to the right of a plot, in a page
#: An axis of clients' names; Vega shortens long ones.
NAMES = alt.Axis(title=None, ticks=False, domain=False, labelLimit=140, labelPadding=6)
MAX_BARS = 60  # clients, the farthest
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_pictures = count()


class Figure(NamedTuple):
    """A chart with its words and its data, which the chart reads by name."""

    name: str
    title: str
    caption: str
    chart: alt.LayerChart | alt.Chart
    data: dict[str, Rows]
    control: Literal["highlighted", "chosen"] | None = None
    labels: dict[str, Any] | None = None  # where lines end, so that a page can label others


def config(theme: Theme = "light") -> dict[str, Any]:
    """Return the Vega-Lite configuration of a theme."""
    ink = INK[theme]
    soft = {"labelColor": ink["soft"], "titleColor": ink["soft"]}
    sizes = {"labelFontSize": 12, "titleFontSize": 12, "labelLimit": 160}
    lines = {"gridColor": ink["grid"], "domainColor": ink["faint"], "tickColor": ink["faint"]}
    return {
        "background": "transparent" if theme == "dark" else "white",
        "font": FONT,
        "view": {"stroke": None},
        "range": {"category": COLORS[theme], "ramp": RAMP[theme], "heatmap": RAMP[theme]},
        "axis": {**soft, **sizes, **lines, "titleFontWeight": "normal"},
        "legend": soft,
        "title": {"color": ink["text"], "anchor": "start", "fontSize": 13},
        "text": {"color": ink["text"], "fontSize": 12},
        "style": {
            "faint": {"color": ink["faint"], "strokeWidth": 1.2},
            "baseline": {"color": ink["soft"], "strokeWidth": 2.6},
            "baseline-label": {"color": ink["soft"]},
            "target": {"color": ink["soft"], "strokeDash": [3, 3], "strokeWidth": 1},
            "target-label": {"color": ink["soft"]},
        },
    }


def specification(figure: Figure, *, width: int | str = WIDTH) -> dict[str, Any]:
    """Return a figure as a Vega-Lite specification without colors of a theme."""
    spec: dict[str, Any] = figure.chart.to_dict()
    spec |= {"width": width, "description": f"{figure.title}. {figure.caption}"}
    spec.pop("config", None)
    spec["datasets"] = figure.data
    if width == "container":
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
        if figure.labels is not None:
            # Vega measures labels before it narrows the plot for its axes, so that a label at a
            # line that ends within the plot would be cut on a phone.
            spec["padding"] = {"left": 5, "top": 5, "bottom": 5, "right": LABEL_ROOM}
    cleaned: dict[str, Any] = without_controls(spec)
    return cleaned


def without_controls(value: Any) -> Any:
    """Replace characters that an SVG cannot hold in all texts; vl-convert aborts the process."""
    if isinstance(value, str):
        return _NOT_IN_XML.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {without_controls(k): without_controls(v) for k, v in value.items()}
    return [without_controls(v) for v in value] if isinstance(value, list | tuple) else value


def _svg(spec: dict[str, Any]) -> str:
    """Draw a figure without the paths that nobody sees: they react to a pointer."""
    svg = vl_convert.vegalite_to_svg({**spec, "config": config()})
    return re.sub(r'<path [^>]*opacity="0"[^>]*/>', "", svg)


def render(figure: Figure, ending: str) -> bytes:
    """Return the content of a figure's file; `ending` is ".svg" or ".png"."""
    spec = specification(figure)
    spec["title"] = {"text": without_controls(figure.title), "offset": 14}
    if ending == ".svg":
        return _svg(spec).encode()
    return bytes(vl_convert.vegalite_to_png({**spec, "config": config()}, scale=2))


def picture(figure: Figure, *, width: int) -> str:
    """Return a figure as SVG inside HTML: it scales, and marks have their words as tooltips."""
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", _svg(specification(figure, width=width)))
    wide, high = re.findall(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"', svg)[0]
    label = escape(without_controls(f"{figure.title}. {figure.caption}"))
    head = (
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{label}" '
        f'style="max-width:{float(wide):.0f}px">'
    )
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    unique = f"p{next(_pictures)}-"  # the ids of several pictures on a page
    svg = re.sub(r'id="([\w-]+)"', rf'id="{unique}\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#{unique}\1)", svg)
    mark = re.compile(r'<path aria-label="([^"]*)"([^>]*?)/>')
    return mark.sub(r"<path\2><title>\1</title></path>", svg)


# The figures of runs.


def run_figures(content: Content) -> list[Figure]:
    """Return all figures for which there are data; time comes first where it differs most."""
    figures = [_accuracy(content, over) for over in content.axes] if content.curves else []
    figures += [_waiting(content)] if content.waiting else []
    figures += [_participation(content)] if content.cohorts else []
    end = f" {content.setting[:1].upper()}{content.setting[1:]}." if content.setting else ""
    return [figure._replace(caption=figure.caption + end) for figure in figures]


#: The horizontal axes of accuracy: title, the words of the figure's title, whether logarithmic.
AXES = {
    "rounds": ("round", "rounds", False),
    "megabytes": ("megabytes sent so far, both directions", "bytes", True),
    "seconds": ("simulated seconds", "simulated time", True),
}


def _accuracy(content: Content, over: str) -> Figure:
    axis, unit, log = AXES[over]
    names = ("round", "x", "y", "low", "high")
    rows = [
        {"run": c.policy, **{k: _rounded(v) for k, v in zip(names, point, strict=True)}}
        for c in content.curves
        for point in zip(c.rounds, getattr(c, over), c.mean, c.low, c.high, strict=True)
    ]
    caption = "Test accuracy of the global model, mean over seeds."
    if any(row["low"] is not None for row in rows):
        caption += " Bands are one standard deviation over seeds."
    caption += " The axis is logarithmic." if log else ""
    words = f"accuracy-{over}", f"Accuracy over {unit}", caption
    return accuracy_chart(*words, rows, content.roles, axis=axis, log=log, target=content.target)


def _rounded(value: float) -> float | None:
    """Return five significant digits, which no screen tells from more; None for NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def tips(titles: Mapping[str, str], **formats: str) -> list[alt.Tooltip]:
    """Return what hovering shows: fields with their titles, and some with a format."""
    return [
        alt.Tooltip(field, title=title, format=formats.get(field.partition(":")[0], alt.Undefined))
        for field, title in titles.items()
    ]


def accuracy_chart(
    name: str,
    title: str,
    caption: str,
    rows: Rows,
    roles: Roles,
    *,
    axis: str = "round",
    log: bool = False,
    target: float | None = None,
) -> Figure:
    """Draw one line per run: baselines grey, highlighted runs in color and labeled, others faint.

    Rows have "run", "x" and "y", and "low" and "high" for a band; a line is drawn at `target`.
    """
    ends = {str(row["run"]): {"x": row["x"], "y": row["y"]} for row in rows}
    ranked, highlighted, baselines = ([run for run in runs if run in ends] for runs in roles)
    values = [row[k] for row in rows for k in ("y", "low", "high") if row.get(k) is not None]
    bottom = 0.0 if min(values) < 0.3 else math.floor(10 * min(values)) / 10
    domain = (bottom, max(bottom + 0.1, math.ceil(10 * max(values)) / 10))
    scale = alt.Scale(domain=list(domain), clamp=True)
    y = alt.Y("y:Q", title="test accuracy", axis=alt.Axis(format=".0%"), scale=scale)
    xs = [row["x"] for row in rows if row["x"] > 0 or not log] or [0.1, 1.0]
    kind, format = ("log", "~g") if log else ("linear", "d")
    ticks = 6 if log else max(1, min(6, int(max(xs) - min(xs))))  # at whole rounds
    x = alt.X("x:Q", title=axis).scale(type=kind, domain=[min(xs), max(xs)], nice=False)
    x = x.axis(grid=False, tickCount=ticks, labelFlush=True, format=format)
    color = alt.Color("run:N", scale=alt.Scale(domain=ranked), legend=None)
    base = alt.Chart(alt.NamedData("lines")).encode(x=x, y=y, detail="run:N")
    on = base.transform_filter("indexof(highlighted, datum.run) >= 0 && !datum.baseline")
    off = base.transform_filter("indexof(highlighted, datum.run) < 0 && !datum.baseline")
    pointer = {"on": "pointerover", "clear": "pointerout", "fields": ["run", "x"]}
    near = alt.selection_point(name="near", nearest=True, empty=False, **pointer)
    titles, layers = {"run:N": "run", "round:Q": "round", "y:Q": "accuracy"}, []
    if any(row.get("low") is not None for row in rows):
        titles |= {"low:Q": "low", "high:Q": "high"}
        band = on.mark_area(opacity=0.16, tooltip=False, aria=False)
        layers.append(band.encode(y=alt.Y("low:Q", scale=scale), y2="high:Q", color=color))
    layers += [
        off.mark_line(style="faint", aria=False),
        base.transform_filter("datum.baseline").mark_line(style="baseline", aria=False),
        on.mark_line(strokeWidth=2.2, aria=False).encode(color=color),
        base.mark_point(size=50, filled=True, aria=False)
        .encode(
            color=alt.condition("datum.baseline", alt.value(GREY), color),
            opacity=alt.condition(near, alt.value(1), alt.value(0)),
            tooltip=tips(titles, y=".1%", low=".1%", high=".1%"),
        )
        .add_params(near),
    ]
    if target is not None and domain[0] <= target <= domain[1]:
        line = alt.Chart(alt.Data(values=[{"y": target, "text": f"target {target:.0%}"}]))
        text = line.mark_text(style="target-label", align="left", dy=-6, dx=4, aria=False)
        layers.append(line.mark_rule(style="target", aria=False).encode(y="y:Q"))
        layers.append(text.encode(y="y:Q", x=alt.value(0), text="text:N"))
    placed = spread_labels({run: ends[run]["y"] for run in (*highlighted, *baselines)}, domain)
    datasets = {"lines": [{**row, "baseline": row["run"] in baselines} for row in rows]}
    for data, runs in (("labels", highlighted), ("baseline-labels", baselines)):
        style = {} if runs is highlighted else {"style": "baseline-label"}
        text = alt.Chart(alt.NamedData(data)).encode(x=x, y=y, text="run:N")
        text = text.mark_text(align="left", dx=7, fontWeight=600, aria=False, **style)
        layers.append(text if style else text.encode(color=color))
        datasets[data] = [{"run": run, "x": ends[run]["x"], "y": placed[run]} for run in runs]
    chart = alt.layer(*layers).properties(height=HEIGHT)
    chart = chart.add_params(alt.param(name="highlighted", value=highlighted))
    labels = {"ends": ends, "domain": domain, "height": HEIGHT}
    return Figure(name, title, caption, chart, datasets, "highlighted", labels=labels)


def spread_labels(
    values: Mapping[str, float], domain: tuple[float, float], height: int = HEIGHT
) -> dict[str, float]:
    """Move values apart, in order and inside the chart, so that labels at them do not overlap.

    Each moves as little as possible, in squares: isotonic regression of values less their gaps.

    Examples
    --------
    >>> spread_labels({"a": 0.5, "b": 0.5}, (0.0, 1.0), height=100)
    {'a': 0.425, 'b': 0.575}
    >>> spread_labels({"a": 0.99, "b": 1.0}, (0.0, 1.0), height=100)
    {'a': 0.85, 'b': 1.0}
    """
    if not values:
        return {}
    low, high = domain
    names = sorted(values, key=lambda name: (values[name], name))
    gaps = LABEL_GAP / height * (high - low) * np.arange(len(names))
    level = isotonic_regression([values[name] for name in names] - gaps).x
    placed = np.clip(level, low, max(low, high - gaps[-1])) + gaps
    return dict(zip(names, placed.round(6).tolist(), strict=True))


def _of_chosen_run(content: Content, height: int) -> alt.Chart:
    """Return a chart without marks of the rows of one run, which the reader chooses."""
    chart = alt.Chart(alt.NamedData("rows"), height=max(120, height))
    chart = chart.transform_filter("datum.run == chosen")
    return chart.add_params(alt.param(name="chosen", value=content.chosen))


def _waiting(content: Content) -> Figure:
    """Draw who made the rounds wait, as bars of seconds per client."""
    titles = {"client:N": "client", "rounds:Q": "rounds", "seconds:Q": "seconds of these rounds"}
    chart = _of_chosen_run(content, 20 * MAX_WAITED_FOR).mark_bar(cornerRadius=2, color=GREY)
    chart = chart.encode(
        x=alt.X("seconds:Q", title="simulated seconds in which it was the slowest"),
        y=alt.Y("client:N", sort="-x", title=None),
        tooltip=tips(titles, seconds=",.1f"),
    )
    caption = "A round lasts as long as its slowest client. The clients whose rounds took most time"
    caption += " in all. First seed."
    data = {"rows": content.waiting}
    return Figure("waiting", "Who made the round wait", caption, chart, data, "chosen")


def _participation(content: Content) -> Figure:
    grouped, rows = content.grouped, content.cohorts
    legend = alt.Legend(title="times", tickMinStep=1, format="d") if grouped else None
    titles = {"client:N": "client", "first:Q": "first round" if grouped else "round"}
    titles |= {"last:Q": "last round"} if grouped else {}
    ends = alt.X("left:Q", title="round", scale=alt.Scale(zero=False, nice=False))
    clients = alt.Y("row:O", title="clients, the most selected first")
    chart = _of_chosen_run(content, min(HEIGHT, 7 * max(row["row"] for row in rows)))
    chart = chart.transform_calculate(left="datum.first - 0.5", right="datum.last + 0.5")
    chart = chart.mark_rect().encode(
        x=ends.axis(grid=False, format="d"),
        x2="right:Q",
        y=clients.axis(labels=False, ticks=False, domain=False),
        color=alt.Color("times:Q", scale=alt.Scale(domainMin=0), legend=legend),
        tooltip=tips(titles | {"times:Q": "times selected"}),
    )
    caption = "One row per client, one column per round."
    caption += " Neighboring clients and rounds are counted together." if grouped else ""
    title, caption = "Who was selected when", f"{caption} First seed."
    return Figure("participation", title, caption, chart, {"rows": rows}, "chosen")


# The pictures of a profile.


def matrix(values: Floats, names: Sequence[str]) -> str:
    """Draw the distances between clients, or groups of them, in the order given."""
    cells = [
        {"a": a, "b": b, "distance": _rounded(float(value)), "tip": f"{a}, {b}: {value:.3f}"}
        for a, row in zip(names, values, strict=True)
        for b, value in zip(names, row, strict=True)
    ]
    # A few extreme pairs must not pale all others.
    scale = alt.Scale(domain=[0, float(np.quantile(values, 0.99)) or 1.0], clamp=True)
    legend = alt.Legend(title="distance", format=".2~g")
    chart = (
        alt.Chart(alt.NamedData("cells"), height=380)
        .mark_rect()
        .encode(
            x=alt.X("b:N", sort=None, axis=None),
            y=alt.Y("a:N", sort=None, axis=NAMES),
            color=alt.Color("distance:Q", legend=legend, scale=scale),
            description="tip:N",
        )
    )
    title, caption = "Distance between every two clients", "Light pairs are alike."
    return picture(Figure("distances", title, caption, chart, {"cells": cells}), width=400)


def distances_to_all(clients: Rows, reference: float) -> str:
    """Draw how far clients are from all data, the farthest first, and random samples."""
    bars = sorted(clients, key=lambda client: -client["distance"])[:MAX_BARS]
    height, label = 20 * len(bars), {"align": "left", "aria": False}
    top = max(*(client["high"] for client in bars), reference, 1e-12) * 1.02
    x = alt.X("distance:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False))
    y = alt.Y("name:N", sort=None, axis=NAMES)
    base = alt.Chart(alt.NamedData("marks")).encode(y=y, description="tip:N")
    opacity = alt.condition("datum.outlier", alt.value(1), alt.value(0.6))
    color, number = alt.Color("color:N", scale=None), alt.Text("distance:Q", format=".3f")
    bar = base.encode(x=x.axis(tickCount=5, format="~g"), color=color, opacity=opacity)
    error = base.encode(x="low:Q", x2="high:Q").mark_rule(color="#555", opacity=0.7)
    line = alt.Chart(alt.Data(values=[{"name": "random samples", "value": reference}]))
    rule = line.encode(x="value:Q", y=alt.value(0), y2=alt.value(height))
    name = line.encode(x="value:Q", y=alt.value(-8), text="name:N")
    chart = alt.layer(
        bar.mark_bar(size=14, cornerRadius=2),
        error,
        base.encode(x="high:Q", text=number).mark_text(dx=6, fontSize=11, **label),
        rule.mark_rule(color=REFERENCE, strokeDash=[5, 4], aria=False),
        name.mark_text(color=REFERENCE, dx=-2, **label),
        height=height,
    )
    title, caption = "Distance of each client to all data together", "The farthest come first."
    return picture(Figure("to-all", title, caption, chart, {"marks": bars}), width=620)


def histogram(bins: Sequence[str], client: Floats, rest: Floats, title: str) -> str:
    """Draw the shares of a column's values at one client, and at all others as a line."""
    rows = [
        {"bin": name, "i": i, "client": a, "rest": b, "tip": tip}
        for i, (name, a, b) in enumerate(zip(bins, client.tolist(), rest.tolist(), strict=True))
        for tip in [f"{name}: {a:.0%} here, {b:.0%} elsewhere"]
    ]
    axis = alt.Axis(labelAngle=-40, labelLimit=90, labelOverlap=True, title=None)
    x = alt.X("bin:N", sort=alt.SortField("i"), axis=axis)
    y = alt.Y("client:Q", axis=alt.Axis(format=".0%", tickCount=3, title=None))
    base = alt.Chart(alt.NamedData("bins")).encode(x=x, description="tip:N")
    bar = base.mark_bar(color=COLORS["light"][0], opacity=0.75).encode(y=y)
    others = base.mark_tick(color="#1f2933", thickness=3).encode(y="rest:Q")
    caption = "Bars: this client; dark lines: all others."
    chart = alt.layer(bar, others, height=110)
    return picture(Figure("column", title, caption, chart, {"bins": rows}), width=300)
