"""The style of all figures, drawn with Altair: in a page, and as SVG and PNG from the same code.

One style for all: the baseline is grey, the runs that matter most have a color and a label at the
line, and the others are faint. In a page, the reader chooses which runs are highlighted through the
parameter ``highlighted``, and whose cohorts are shown through ``chosen``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import altair as alt

Theme = Literal["light", "dark"]
#: Okabe and Ito's colors for readers with any color vision, the most legible ones first.
COLORS: dict[Theme, list[str]] = {
    "light": ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
    "dark": ["#56b4e9", "#e69f00", "#2cc295", "#cc79a7", "#f0e442", "#e8814a"],
}
#: From few to many; many always stands out from the background.
RAMP: dict[Theme, list[str]] = {
    "light": ["#dce9f5", "#6baed6", "#08519c"],
    "dark": ["#1f3347", "#3b7fb8", "#a6dcff"],
}
GREY = "#8a939e"  # legible on light and dark
INK: dict[Theme, dict[str, str]] = {
    "light": {"text": "#1f2933", "soft": "#5b6573", "grid": "#e6e9ed", "faint": "#c9cfd6"},
    "dark": {"text": "#e4e7eb", "soft": "#a3adb8", "grid": "#2d3640", "faint": "#48525e"},
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
HEIGHT = 320
WIDTH = 620
LABEL_GAP = 15  # pixels between labels at lines
LABEL_ROOM = 36  # pixels to the right of a plot, in a page
DASHES = [[1, 0], [6, 3], [2, 2]]
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


Rows = list[dict[str, Any]]


class Labels(NamedTuple):
    """Where the lines of a chart end, so that a page can label other lines."""

    ends: dict[str, dict[str, float]]
    domain: tuple[float, float]
    height: int


class Figure(NamedTuple):
    """A chart with its words and its data.

    Attributes
    ----------
    name, title, caption : str
        The name is that of its file.
    chart : altair chart
        It reads its data by name.
    data : dict
        The rows of each name.
    control : {"highlighted", "chosen"} or None
        The parameter that a page's reader sets.
    wide : bool
        Whether a page gives it the whole width.
    labels : Labels or None
        Of a chart with labels at its lines.
    """

    name: str
    title: str
    caption: str
    chart: alt.LayerChart | alt.Chart
    data: dict[str, Rows]
    control: Literal["highlighted", "chosen"] | None = None
    wide: bool = False
    labels: Labels | None = None


class Roles(NamedTuple):
    """How runs are drawn: ranked ones have colors in this order, some are highlighted."""

    ranked: list[str]
    highlighted: list[str]
    baselines: list[str]

    def among(self, names: set[str]) -> Roles:
        """Return the roles of the runs that a chart has."""
        return Roles(*([name for name in own if name in names] for own in self))


class LineChart(NamedTuple):
    """A chart of lines with its data and the ends of the lines."""

    chart: alt.LayerChart
    data: dict[str, Rows]
    labels: Labels


def config(theme: Theme = "light") -> dict[str, Any]:
    """Return the Vega-Lite configuration of a theme."""
    ink = INK[theme]
    return {
        "background": "transparent" if theme == "dark" else "white",
        "font": FONT,
        "view": {"stroke": None},
        "range": {"category": COLORS[theme], "ramp": RAMP[theme], "heatmap": RAMP[theme]},
        "axis": {
            "labelColor": ink["soft"],
            "titleColor": ink["soft"],
            "titleFontWeight": "normal",
            "gridColor": ink["grid"],
            "domainColor": ink["faint"],
            "tickColor": ink["faint"],
            "labelFontSize": 12,
            "titleFontSize": 12,
            "labelLimit": 160,
        },
        "legend": {"labelColor": ink["soft"], "titleColor": ink["soft"]},
        "title": {"color": ink["text"], "anchor": "start", "fontSize": 13},
        "header": {"labelColor": ink["text"], "titleColor": ink["soft"]},
        "text": {"color": ink["text"], "fontSize": 12},
        "style": {
            "faint": {"color": ink["faint"], "strokeWidth": 1.2},
            "baseline": {"color": ink["soft"], "strokeWidth": 2.6},
            "baseline-label": {"color": ink["soft"]},
            "target": {"color": ink["soft"], "strokeDash": [3, 3], "strokeWidth": 1},
            "target-label": {"color": ink["soft"]},
            "small-label": {"color": ink["soft"], "fontSize": 10},
        },
    }


def specification(figure: Figure, *, width: int | str = WIDTH) -> dict[str, Any]:
    """Return a figure as a Vega-Lite specification without colors of a theme."""
    single = isinstance(figure.chart, alt.Chart | alt.LayerChart)  # panels have their own widths
    chart = figure.chart.properties(width=width) if single else figure.chart
    spec: dict[str, Any] = chart.to_dict()
    spec["description"] = f"{figure.title}. {figure.caption}"
    spec.pop("config", None)
    spec["datasets"] = figure.data
    if width == "container":
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
        if figure.labels is not None:
            # Vega measures labels before it narrows the plot for its axes, so that a label at a
            # line that ends within the plot would be cut on a phone.
            spec["padding"] = {"left": 5, "top": 5, "bottom": 5, "right": LABEL_ROOM}
    found: dict[str, Any] = without_controls(spec)
    return found


def without_controls(value: Any) -> Any:
    r"""Replace characters that an SVG cannot hold in all texts; vl-convert aborts the process.

    These are control characters, lone surrogates, U+FFFE and U+FFFF.

    Examples
    --------
    >>> without_controls({"client": ["eve\x1b[2J", "\uffff"]})
    {'client': ['eve�[2J', '�']}
    """
    if isinstance(value, str):
        return _NOT_IN_XML.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {without_controls(k): without_controls(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_controls(v) for v in value]
    return value


def only_visible(svg: str) -> str:
    """Leave out paths that nobody sees: they react to the pointer, which a still picture has not.

    Examples
    --------
    >>> only_visible('<g><path d="M0,0" opacity="0"/><path d="M1,1" stroke="red"/></g>')
    '<g><path d="M1,1" stroke="red"/></g>'
    """

    def kept(match: re.Match[str]) -> str:
        path = match[0]
        painted = " fill=" in path or " stroke=" in path or " class=" in path
        return path if painted and ' opacity="0"' not in path else ""

    return re.sub(r"<path [^>]*/>", kept, svg)


def rendered(figure: Figure, ending: str, *, width: int = WIDTH) -> bytes:
    """Return the content of a figure's file; `ending` is ".svg" or ".png"."""
    import vl_convert

    spec = {**specification(figure, width=width), "config": config()}
    spec["title"] = {"text": without_controls(figure.title), "offset": 14}
    if ending == ".svg":
        return only_visible(vl_convert.vegalite_to_svg(spec)).encode()
    if ending == ".png":
        return bytes(vl_convert.vegalite_to_png(spec, scale=2))
    raise ValueError(f"{ending!r}: figures are written as .svg or .png")


def save(figure: Figure, path: Path, *, width: int = WIDTH) -> None:
    """Write a figure; the suffix of `path`, .svg or .png, picks the format."""
    path.write_bytes(rendered(figure, path.suffix, width=width))


def x_axis(title: str, rows: Rows, log: bool = False) -> alt.X:
    """Return a horizontal axis over the field ``x`` of the rows."""
    values = [row["x"] for row in rows if row["x"] is not None and (row["x"] > 0 or not log)]
    domain = [min(values), max(values)] if values else [0, 1]
    scale = alt.Scale(type="log" if log else "linear", domain=domain, nice=False)
    axis = alt.Axis(grid=False, tickCount=6, labelFlush=True, format="~g" if log else "d")
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def rounded(value: float) -> float | None:
    """Return five significant digits, which no screen tells from more; None for NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def line_chart(
    rows: Rows,
    roles: Roles,
    *,
    x: alt.X,
    y: alt.Y,
    domain: tuple[float, float],
    tooltip: list[alt.Tooltip],
    target: float | None = None,
) -> LineChart:
    """Draw one line per run: baselines grey, highlighted runs in color and labeled, others faint.

    Parameters
    ----------
    rows : list of dict
        With ``run``, ``x`` and ``y``; with ``low`` and ``high`` for a band.
    roles : Roles
        Which runs are baselines, ranked and highlighted.
    x, y : altair channels
        Of the fields ``x`` and ``y``.
    domain : tuple
        Of the vertical axis.
    tooltip : list
        What hovering shows.
    target : float, optional
        Draw a horizontal line here.
    """
    own = roles.among({row["run"] for row in rows})
    y = y.scale(domain=list(domain), clamp=True)
    color = alt.Color("run:N", scale=alt.Scale(domain=own.ranked), legend=None)
    dashes = [DASHES[i // len(COLORS["light"]) % len(DASHES)] for i in range(len(own.ranked))]
    dash = alt.StrokeDash("run:N", scale=alt.Scale(domain=own.ranked, range=dashes), legend=None)
    base = alt.Chart(alt.NamedData("lines")).encode(x=x, y=y, detail="run:N")
    on = base.transform_filter("indexof(highlighted, datum.run) >= 0 && !datum.baseline")
    off = base.transform_filter("indexof(highlighted, datum.run) < 0 && !datum.baseline")
    grey = base.transform_filter("datum.baseline")
    near = alt.selection_point(
        name="near",
        nearest=True,
        on="pointerover",
        clear="pointerout",
        empty=False,
        fields=["run", "x"],
    )
    layers = []
    if any(row.get("low") is not None for row in rows):
        band = on.mark_area(opacity=0.16, tooltip=False, aria=False)
        low = alt.Y("low:Q", scale=alt.Scale(domain=list(domain), clamp=True))
        layers.append(band.encode(y=low, y2="high:Q", color=color))
    layers += [
        off.mark_line(style="faint", aria=False),
        grey.mark_line(style="baseline", aria=False),
        on.mark_line(strokeWidth=2.2, aria=False).encode(color=color, strokeDash=dash),
        base.mark_point(size=50, filled=True, aria=False)
        .encode(
            color=alt.condition("datum.baseline", alt.value(GREY), color),
            opacity=alt.condition(near, alt.value(1), alt.value(0)),
            tooltip=tooltip,
        )
        .add_params(near),
        *_target(target, domain),
        _names("labels", x, y).encode(color=color),
        _names("baseline-labels", x, y, style="baseline-label"),
    ]
    chart = alt.layer(*layers).properties(height=HEIGHT)
    chart = chart.add_params(alt.param(name="highlighted", value=own.highlighted))
    ends = {str(row["run"]): {"x": row["x"], "y": row["y"]} for row in rows}
    data = {
        "lines": [{**row, "baseline": row["run"] in own.baselines} for row in rows],
        **_label_data(ends, own, domain),
    }
    return LineChart(chart, data, Labels(ends, domain, HEIGHT))


def _target(target: float | None, domain: tuple[float, float]) -> list[alt.Chart]:
    if target is None or not domain[0] <= target <= domain[1]:
        return []
    data = alt.Chart(alt.Data(values=[{"y": target, "text": f"target {target:.0%}"}]))
    y = alt.Y("y:Q")
    return [
        data.mark_rule(style="target", aria=False).encode(y=y),
        data.mark_text(style="target-label", align="left", dy=-6, dx=4, aria=False).encode(
            y=y, x=alt.value(0), text="text:N"
        ),
    ]


def _names(data: str, x: alt.X, y: alt.Y, **style: Any) -> alt.Chart:
    """Write the names of runs at the ends of their lines."""
    chart = alt.Chart(alt.NamedData(data)).encode(x=x, y=y, text="run:N")
    return chart.mark_text(align="left", dx=7, fontWeight=600, aria=False, **style)


def _label_data(
    ends: Mapping[str, Mapping[str, float]], roles: Roles, domain: tuple[float, float]
) -> dict[str, Rows]:
    """Return where names stand; a page's script does the same when others are highlighted."""
    shown = [*roles.highlighted, *roles.baselines]
    placed = separated({name: ends[name]["y"] for name in shown}, domain)

    def rows(names: list[str]) -> Rows:
        return [{"run": name, "x": ends[name]["x"], "y": placed[name]} for name in names]

    return {"labels": rows(roles.highlighted), "baseline-labels": rows(roles.baselines)}


def separated(
    values: Mapping[str, float], domain: tuple[float, float], height: int = HEIGHT
) -> dict[str, float]:
    """Move values apart, in order and inside the chart, so that labels at them do not overlap.

    Examples
    --------
    >>> separated({"a": 0.5, "b": 0.5}, (0.0, 1.0), height=100)
    {'a': 0.425, 'b': 0.575}
    >>> separated({"a": 0.99, "b": 1.0}, (0.0, 1.0), height=100)
    {'a': 0.85, 'b': 1.0}
    """
    gap = LABEL_GAP / height * (domain[1] - domain[0])

    def inside(center: float, members: list[str]) -> float:
        room = gap * (len(members) - 1) / 2
        return max(min(center, domain[1] - room), domain[0] + room)

    names = sorted(values, key=lambda name: (values[name], name))
    groups: list[tuple[float, list[str]]] = []
    for name in names:
        members = [name]
        center = inside(values[name], members)
        while groups and center - gap * len(members) / 2 < _top(groups[-1], gap):
            other, above = groups.pop()
            total = len(members) + len(above)
            center = (center * len(members) + other * len(above)) / total
            members = above + members
            center = inside(center, members)
        groups.append((center, members))
    return {
        name: round(center + gap * (i - (len(members) - 1) / 2), 6)
        for center, members in groups
        for i, name in enumerate(members)
    }


def _top(group: tuple[float, list[str]], gap: float) -> float:
    return group[0] + gap * len(group[1]) / 2
