"""The pictures of the heterogeneity page, drawn with Altair in the style of all figures.

Each is returned as SVG for an HTML page that loads nothing: marks carry their words as tooltips
and for screen readers. A matrix of many clients becomes one image.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count
from typing import Any, NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fedcohort.report.figures import Figure, Rows, config, specification, without_controls

Floats = NDArray[np.float64]
RAMP = ["#f7fbff", "#d6e6f4", "#abcfe6", "#6aaed6", "#3787c0", "#105ba4", "#08306b"]
COLORS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9",
    "#d55e00", "#8c6bb1", "#7f7f7f", "#b5a400", "#5b4636",
)  # fmt: skip
REFERENCE = "#d55e00"
MOST_COVERED = 12.0  # square pixels of other marks and names
NAMED = 40  # clients; beyond, the names at a matrix would not be readable
MOST_CELLS = 120  # rows of a matrix; beyond, neighbors are averaged
#: Where a name stands beside its mark: how it is aligned, and how far it is moved.
PLACES = {
    "right": ("left", 8, 4),
    "left": ("right", -8, 4),
    "above": ("center", 0, -9),
    "below": ("center", 0, 17),
}
_pictures = count()


class Mark(NamedTuple):
    """One client in a picture."""

    name: str
    value: float
    low: float
    high: float
    color: str
    strong: bool
    tip: str


def short(name: str, most: int = 22) -> str:
    """Cut a long name in the middle."""
    return name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}"


def bars(marks: Sequence[Mark], lines: Mapping[str, float] | None = None) -> str:
    """Draw labeled bars from the largest, with their standard errors and lines to compare with."""
    width, height = 720, 20 * len(marks)
    top = _most(marks, lines)
    x = alt.X("value:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False))
    x = x.axis(tickCount=5, format="~g")
    y = alt.Y("row:O", axis=None)
    base = alt.Chart(alt.NamedData("marks")).encode(y=y, description="tip:N")
    error = base.encode(x="low:Q", x2="high:Q")
    names = alt.Chart(alt.NamedData("marks")).encode(y=y, text="name:N", x=alt.value(-8))
    layers = [
        base.mark_bar(size=14, cornerRadius=2, opacity=0.85).encode(
            x=x, color=alt.Color("color:N", scale=None)
        ),
        error.mark_rule(color="#555", opacity=0.7),
        base.mark_text(align="left", dx=6, fontSize=11, aria=False).encode(
            x="high:Q", text=alt.Text("value:Q", format=".3f")
        ),
        names.transform_filter("!datum.strong").mark_text(align="right", aria=False),
        names.transform_filter("datum.strong").mark_text(align="right", fontWeight=600, aria=False),
        *_references(lines, upright=True, length=height),
    ]
    chart = alt.layer(*layers).properties(height=height)
    label = "Distance of each client to all data together"
    return _svg(chart, {"marks": _rows(marks)}, label, width)


def dots(marks: Sequence[Mark], lines: Mapping[str, float] | None = None) -> str:
    """Draw many clients side by side, from the largest, naming the strong ones where it fits."""
    width, height = 880, 270
    top = _most(marks, lines)
    scale = height / top
    right = width / max(len(marks), 1)
    at = [(right * (i + 0.5), height - scale * m.value) for i, m in enumerate(marks)]
    strong = [i for i, m in enumerate(marks) if m.strong][:NAMED]
    rows = _rows(marks)
    names = [short(marks[i].name) for i in strong]
    for i, place in zip(strong, places(names, [at[i] for i in strong], [], width), strict=True):
        rows[i]["place"] = place
    x = alt.X("row:Q", axis=None, scale=alt.Scale(domain=[-0.5, len(marks) - 0.5], nice=False))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False))
    base = alt.Chart(alt.NamedData("marks")).encode(x=x, description="tip:N")
    layers = [
        base.mark_rule(strokeWidth=0.8, color="#cdd3da", aria=False).encode(
            y=alt.Y("low:Q"), y2="high:Q"
        ),
        base.mark_circle(opacity=1).encode(
            y=y.axis(tickCount=5, format="~g"),
            color=alt.Color("color:N", scale=None),
            size=alt.condition("datum.strong", alt.value(50), alt.value(18)),
        ),
        *_names(base.encode(y=y)),
        *_references(lines, upright=False, length=width),
    ]
    chart = alt.layer(*layers).properties(height=height)
    label = "Distance of each client to all data together, the farthest first"
    return _svg(chart, {"marks": rows}, label, width)


def scatter(marks: Sequence[Mark], positions: Floats, name_all: bool) -> str:
    """Draw a map with equal scales on both axes; names are placed where they cover least."""
    width, height, rim = 540, 440, 46
    span = float(np.ptp(positions, axis=0).max()) or 1.0
    unit = span / (min(width, height) - 2 * rim)  # distance per pixel
    middle = (positions.max(axis=0) + positions.min(axis=0)) / 2
    size = np.array([width, height]) * unit / 2
    low, high = middle - size, middle + size
    at = [((x - low[0]) / unit, (high[1] - y) / unit) for x, y in positions.tolist()]
    rows = _rows(marks)
    named = [i for i, m in enumerate(marks) if name_all or m.strong]
    found = places([short(marks[i].name, 18) for i in named], [at[i] for i in named],
                   [(x - 5, y - 5, x + 5, y + 5) for x, y in at], width)  # fmt: skip
    for i, place in zip(named, found, strict=True):
        rows[i]["place"] = place
    for row, (px, py) in zip(rows, positions.tolist(), strict=True):
        row |= {"x": px, "y": py}
    x, y = (
        alt.X("x:Q", axis=None, scale=alt.Scale(domain=[low[0], high[0]], nice=False)),
        alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[low[1], high[1]], nice=False)),
    )
    base = alt.Chart(alt.NamedData("marks")).encode(x=x, y=y, description="tip:N")
    points = base.mark_circle(opacity=0.85).encode(
        color=alt.Color("color:N", scale=None),
        size=alt.condition("datum.strong", alt.value(130), alt.value(70)),
        stroke=alt.condition("datum.strong", alt.value("#111"), alt.value("#fff")),
        strokeWidth=alt.condition("datum.strong", alt.value(2), alt.value(1)),
    )
    length = _round_below(span / 4)
    ends = [{"x": low[0] + 16 * unit, "x2": low[0] + 16 * unit + length, "y": low[1] + 16 * unit}]
    bar = alt.Chart(alt.Data(values=ends)).encode(x="x:Q", y="y:Q")
    layers = [
        points,
        *_names(base),
        bar.mark_rule(color="#555", strokeWidth=2, aria=False).encode(x2="x2:Q"),
        bar.mark_text(align="left", dy=-8, text=f"{length:g}", aria=False),
    ]
    chart = alt.layer(*layers).properties(height=height)
    return _svg(chart, {"marks": rows}, "Map of the clients", width)


def matrix(values: Floats, names: Sequence[str], colors: Sequence[str]) -> str:
    """Draw a matrix with a strip of the clients' colors; that of many clients is one image."""
    side, n = 400, len(values)
    most = float(np.quantile(values, 0.99)) or 1.0  # a few extreme pairs must not pale all others
    groups = np.array_split(np.arange(n), min(n, MOST_CELLS))
    cells = [
        {"row": i, "column": j, "distance": float(values[np.ix_(a, b)].mean())}
        for i, a in enumerate(groups)
        for j, b in enumerate(groups)
    ]
    strip = [{"row": i, "name": short(names[g[0]], 18), "color": colors[g[0]]}
             for i, g in enumerate(groups)]  # fmt: skip
    legend = alt.Legend(title=None, orient="bottom", gradientLength=side - 20, format=".2~g")
    color = alt.Color("distance:Q", legend=legend)
    color = color.scale(range=RAMP, domain=[0, most], clamp=True)
    y = alt.Y("row:O", axis=None)
    plain = alt.Chart(alt.NamedData("cells")).encode(x=alt.X("column:O", axis=None), y=y)
    side_of = alt.Chart(alt.NamedData("strip")).encode(y=y)
    layers = [
        plain.mark_rect(aria=False).encode(color=color),
        side_of.mark_rect(aria=False).encode(
            x=alt.value(-10), x2=alt.value(-3), fill=alt.Color("color:N", scale=None)
        ),
    ]
    if n <= NAMED:
        text = side_of.mark_text(align="right", fontSize=min(11.0, side / n), aria=False)
        layers.append(text.encode(x=alt.value(-14), text="name:N"))
    chart = alt.layer(*layers).properties(height=side)
    data: dict[str, Rows] = {"cells": cells, "strip": strip}
    label = "Distance between every two clients; light pairs are alike"
    if n > len(groups):
        label += f"; averages of {len(groups[0])} neighbors"
    return _svg(chart, data, label, side, image=n > NAMED)


def _rows(marks: Sequence[Mark]) -> Rows:
    return [
        {**m._asdict(), "name": short(m.name), "row": i, "place": None} for i, m in enumerate(marks)
    ]


def _most(marks: Sequence[Mark], lines: Mapping[str, float] | None) -> float:
    return max(*(m.high for m in marks), *(lines or {}).values(), 1e-12) * 1.02


def _references(lines: Mapping[str, float] | None, upright: bool, length: int) -> list[alt.Chart]:
    """Return dashed lines to compare with, and their names."""
    if not lines:
        return []
    rows = [{"name": name, "value": value} for name, value in lines.items()]
    base = alt.Chart(alt.Data(values=rows))
    rule = base.mark_rule(color=REFERENCE, strokeDash=[5, 4], aria=False)
    if upright:
        text = base.mark_text(color=REFERENCE, align="left", dx=-2, aria=False)
        return [
            rule.encode(x="value:Q", y=alt.value(0), y2=alt.value(length)),
            text.encode(x="value:Q", y=alt.value(-8), text="name:N"),
        ]
    text = base.mark_text(color=REFERENCE, align="right", dy=-7, aria=False)
    return [
        rule.encode(y="value:Q"),
        text.encode(y="value:Q", x=alt.value(length), text="name:N"),
    ]


def _names(base: alt.Chart) -> list[alt.Chart]:
    """Write the names that have a place, with a rim so that they are legible on marks."""
    return [
        base.transform_filter(f"datum.place == '{place}'")
        .mark_text(align=align, dx=dx, dy=dy - 4, fontSize=11, aria=False, tooltip=None)
        .encode(text="name:N")
        for place, (align, dx, dy) in PLACES.items()
    ]


def places(
    names: Sequence[str],
    at: Sequence[tuple[float, float]],
    taken: Sequence[tuple[float, ...]],
    width: float,
) -> list[str | None]:
    """Say where each name stands beside its mark; None where it would cover another.

    Examples
    --------
    >>> places(["a", "b", "c"], [(50, 50), (50, 50), (50, 52)], [], 100)
    ['right', 'left', 'above']
    """
    boxes, found = list(taken), list[str | None]()
    for name, (x, y) in zip(names, at, strict=True):
        long = 6.2 * len(name)
        left = {"right": x + 8, "left": x - 8 - long, "above": x - long / 2, "below": x - long / 2}
        covered = {}
        for place, (_, _, dy) in PLACES.items():
            px = left[place]
            box = px, y + dy - 9, px + long, y + dy + 2
            outside = 1000.0 if px < 0 or px + long > width else 0.0
            covered[place] = outside + sum(_overlap(box, other) for other in boxes), box
        best = min(covered, key=lambda place: covered[place][0])
        if covered[best][0] > MOST_COVERED:
            found.append(None)
        else:
            boxes.append(covered[best][1])
            found.append(best)
    return found


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _round_below(value: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `value`.

    Examples
    --------
    >>> _round_below(0.35), _round_below(7.0)
    (0.2, 5.0)
    """
    power = 10.0 ** np.floor(np.log10(value))
    return float(f"{max(m * power for m in (1, 2, 5) if m * power <= value * 1.0001):.6g}")


def _svg(
    chart: alt.LayerChart, data: dict[str, Rows], label: str, width: int, image: bool = False
) -> str:
    """Render a chart as SVG that fits the width of a page and refers to nothing outside."""
    import vl_convert

    figure = Figure("picture", label, "", chart, data)
    spec: dict[str, Any] = {**specification(figure, width=width), "config": config()}
    spec["description"] = without_controls(label)
    if image:
        content = base64.b64encode(vl_convert.vegalite_to_png(spec, scale=1.5)).decode()
        return (
            f'<svg viewBox="0 0 {width + 20} {width + 60}" role="img" '
            f'aria-label="{escape(label)}" style="max-width:{width + 20}px"><image '
            f'width="100%" height="100%" href="data:image/png;base64,{content}"/></svg>'
        )
    return inline(vl_convert.vegalite_to_svg(spec), label)


def inline(svg: str, label: str) -> str:
    """Return SVG for use inside HTML: it scales, its ids are its own, its marks have tooltips."""
    own = f"p{next(_pictures)}-"
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", svg)
    wide, high = re.findall(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"', svg)[0]
    head = (
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{float(wide):.0f}px">'
    )
    svg = re.sub(r"<svg[^>]*>", head, svg, count=1)
    svg = re.sub(r'id="([\w-]+)"', rf'id="{own}\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#{own}\1)", svg)
    mark = re.compile(r'<path aria-label="([^"]*)"([^>]*?)/>')
    return mark.sub(r"<path\2><title>\1</title></path>", svg)
