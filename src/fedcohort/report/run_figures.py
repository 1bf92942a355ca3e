"""The figures of a report on runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from fedcohort.report.content import Content, FederationMap, Line, Participation
from fedcohort.report.figures import (
    GREY,
    HEIGHT,
    Figure,
    LineChart,
    Roles,
    line_chart,
    rounded,
    x_axis,
)
from fedcohort.report.tables import Curve


def run_figures(found: Content) -> list[Figure]:
    """Return all figures for which there are data."""
    made = [_accuracy(found, over) for over in ("rounds", "megabytes", "seconds")]
    if found.gemd:
        made.append(_gemd(found))
    if found.withheld:
        made.append(_withheld(found))
    if found.participation:
        made += [_evenness(found), _participation(found)]
    made += [_map(found, one) for one in found.maps]
    made += [_distances(found, one) for one in found.maps[:1]]
    return [figure for figure in made if figure is not None]


class Axis(NamedTuple):
    """The horizontal axis of an accuracy curve."""

    title: str
    words: str
    log: bool


AXES: dict[str, Axis] = {
    "rounds": Axis("round", "rounds", False),
    "megabytes": Axis("megabytes sent so far, both directions", "bytes", True),
    "seconds": Axis("simulated seconds", "simulated time", True),
}


def _accuracy(found: Content, over: str) -> Figure | None:
    curves = [c for c in found.curves if c.rounds]
    if not curves:
        return None
    axis = AXES[over]
    band = " Bands are one standard deviation over seeds." if _has_bands(curves) else ""
    log = " The axis is logarithmic." if axis.log else ""
    tooltip = [
        alt.Tooltip("run:N"),
        alt.Tooltip("round:Q"),
        alt.Tooltip("y:Q", title="accuracy", format=".1%"),
        *(
            [alt.Tooltip("low:Q", format=".1%"), alt.Tooltip("high:Q", format=".1%")]
            if band
            else []
        ),
    ]
    rows = [row for c in curves for row in _curve_rows(c, over)]
    drawn = line_chart(
        rows,
        _roles(found),
        x=x_axis(axis.title, rows, axis.log),
        y=alt.Y("y:Q", title="test accuracy", axis=alt.Axis(format=".0%")),
        domain=_accuracy_domain(curves),
        tooltip=tooltip,
        target=found.target,
    )
    return Figure(
        f"accuracy-{over}",
        f"Accuracy over {axis.words}",
        f"Test accuracy of the global model, mean over seeds.{band}{log} {_end(found.setting)}",
        drawn.chart,
        drawn.data,
        "highlighted",
        over == "rounds",
        drawn.labels,
    )


def _roles(found: Content) -> Roles:
    return Roles(found.ranked, found.highlighted, found.baselines)


def _end(setting: str) -> str:
    return f"{setting[:1].upper()}{setting[1:]}." if setting else ""


def _has_bands(curves: Iterable[Curve]) -> bool:
    return any(math.isfinite(v) for c in curves for v in c.low)


def _curve_rows(curve: Curve, over: str) -> list[dict[str, Any]]:
    xs = getattr(curve, over)
    rows = zip(curve.rounds, xs, curve.mean, curve.low, curve.high, strict=True)
    return [
        {
            "run": curve.policy,
            "round": number,
            "x": rounded(x),
            "y": rounded(y),
            "low": rounded(low),
            "high": rounded(high),
        }
        for number, x, y, low, high in rows
    ]


def _accuracy_domain(curves: Iterable[Curve]) -> tuple[float, float]:
    values = [v for c in curves for v in (*c.mean, *c.low, *c.high) if math.isfinite(v)]
    low = 0.0 if min(values) < 0.3 else math.floor(10 * min(values)) / 10
    return low, max(low + 0.1, math.ceil(10 * max(values)) / 10)


def _plain_lines(found: Content, lines: Sequence[Line], title: str, percent: bool) -> LineChart:
    rows = [
        {"run": line.policy, "round": n, "x": n, "y": rounded(v)}
        for line in lines
        for n, v in zip(line.rounds, line.values, strict=True)
    ]
    top = max(max(line.values) for line in lines)
    form = ".0%" if percent else ".2~f"
    return line_chart(
        rows,
        _roles(found),
        x=x_axis("round", rows),
        y=alt.Y("y:Q", title=title, axis=alt.Axis(format=form)),
        domain=(0.0, 1.0 if percent else max(0.1, math.ceil(10 * top) / 10)),
        tooltip=[
            alt.Tooltip("run:N"),
            alt.Tooltip("round:Q"),
            alt.Tooltip("y:Q", title=title, format=".1%" if percent else ".3f"),
        ],
    )


def _window(found: Content) -> str:
    return f", running mean over {found.window} rounds" if found.window > 1 else ""


def _gemd(found: Content) -> Figure:
    drawn = _plain_lines(found, found.gemd, "GEMD", False)
    return Figure(
        "gemd",
        "Label balance of the cohorts (GEMD)",
        "L1 distance between the labels of a cohort and of all clients; 0 is balanced. Mean over "
        f"seeds{_window(found)}. {_end(found.setting)}",
        drawn.chart,
        drawn.data,
        "highlighted",
        labels=drawn.labels,
    )


def _withheld(found: Content) -> Figure:
    drawn = _plain_lines(found, found.withheld, "uploads withheld", True)
    return Figure(
        "withheld",
        "What the gate withheld",
        "Share of the trained models that were not uploaded. Mean over seeds"
        f"{_window(found)}. {_end(found.setting)}",
        drawn.chart,
        drawn.data,
        "highlighted",
        labels=drawn.labels,
    )


def _evenness(found: Content) -> Figure:
    rows = [
        {"run": p.policy, "client": client, "times": times}
        for p in found.participation
        for client, times in _some(p.totals)
    ]
    order = found.baselines + found.ranked
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .transform_aggregate(clients="count()", example="min(client)", groupby=["run", "times"])
        .mark_circle(opacity=0.75)
        .encode(
            x=alt.X("times:Q", title="times selected", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("run:N", sort=order, title=None, axis=alt.Axis(grid=True)),
            size=alt.Size("clients:Q", scale=alt.Scale(range=[12, 260]), legend=None),
            color=alt.condition(
                alt.FieldOneOfPredicate("run", found.highlighted),
                alt.Color("run:N", scale=alt.Scale(domain=found.ranked), legend=None),
                alt.value(GREY),
            ),
            tooltip=["run:N", alt.Tooltip("times:Q", title="times selected"), "clients:Q"],
        )
        .properties(height=22 * len(found.participation))
    )
    return Figure(
        "evenness",
        "How evenly clients take part",
        "Each circle stands for the clients that were selected that often; its area is their "
        f"number. First seed. {_end(found.setting)}",
        chart,
        {"rows": rows},
    )


def _some(totals: Mapping[str, int], most: int = 5000) -> list[tuple[str, int]]:
    """Return the counts of all clients, or evenly spread ones of very many."""
    ranked = sorted(totals.items(), key=lambda item: item[1])
    step = -(-len(ranked) // most) or 1
    return ranked[::step]


def _chosen(found: Content) -> alt.Parameter:
    first = found.highlighted[0] if found.highlighted else found.participation[0].policy
    return alt.param(name="chosen", value=first)


def _participation(found: Content) -> Figure:
    rows = [row for p in found.participation for row in _participation_rows(p)]
    most = max(len(p.clients) for p in found.participation)
    grouped = any(
        len(p.clients) < len(p.totals) or len(p.rounds) < p.rounds[-1][1]
        for p in found.participation
    )
    legend = alt.Legend(title="times", tickMinStep=1, format="d") if grouped else None
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .transform_filter("datum.run == chosen")
        .transform_calculate(left="datum.first - 0.5", right="datum.last + 0.5")
        .mark_rect()
        .encode(
            x=alt.X("left:Q", title="round", scale=alt.Scale(zero=False, nice=False))
            .axis(grid=False, format="d"),
            x2="right:Q",
            y=alt.Y("row:O", title="clients, the most selected first")
            .axis(labels=False, ticks=False, domain=False),
            color=alt.Color("times:Q", scale=alt.Scale(domainMin=0), legend=legend),
            tooltip=[
                alt.Tooltip("client:N"),
                alt.Tooltip("first:Q", title="round" if not grouped else "first round"),
                *([alt.Tooltip("last:Q", title="last round")] if grouped else []),
                alt.Tooltip("times:Q", title="times selected"),
            ],
        )
        .properties(height=max(120, min(HEIGHT, 7 * most)))
        .add_params(_chosen(found))
    )  # fmt: skip
    extra = " Neighboring clients and rounds are counted together." if grouped else ""
    return Figure(
        "participation",
        "Who was selected when",
        f"One row per client, one column per round, first seed.{extra} {_end(found.setting)}",
        chart,
        {"rows": rows},
        "chosen",
    )


def _participation_rows(p: Participation) -> Iterable[dict[str, Any]]:
    for i, j in zip(*p.counts.nonzero(), strict=True):
        first, last = p.rounds[j]
        yield {
            "run": p.policy,
            "row": int(i) + 1,
            "client": p.clients[i],
            "first": first,
            "last": last,
            "times": int(p.counts[i, j]),
        }


SOURCES = {
    "race_sketch": "their RACE sketches",
    "feature_profile": "their feature profiles",
    "model_sketch": "sketches of their models",
    "update_sketch": "sketches of their updates",
    "gradient_sketch": "sketches of their gradients",
    "FedCor embedding": "FedCor's embedding of their loss changes",
    "labels": "their label distributions, because no run saved sketches",
}


def _map(found: Content, one: FederationMap) -> Figure:
    totals = {p.policy: p.totals for p in found.participation}
    rows = [
        {
            "run": run,
            "client": p.client,
            "x": rounded(p.x),
            "y": rounded(p.y),
            "examples": p.examples,
            "label": "unknown" if p.main_label is None else str(p.main_label),
            "times": known.get(p.client, 0),
        }
        for run, known in totals.items()
        for p in one.points
    ]
    span = alt.Scale(zero=False, nice=True)
    plain = alt.Axis(labels=False, ticks=False, grid=False, domain=False)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .transform_filter("datum.run == chosen")
        .encode(
            x=alt.X("x:Q", scale=span, axis=plain, title=None),
            y=alt.Y("y:Q", scale=span, axis=plain, title=None),
        )
    )
    points = chart.mark_circle(size=150, opacity=0.95, stroke=GREY, strokeWidth=0.6).encode(
        color=alt.Color("times:Q", scale=alt.Scale(domainMin=0),
                        legend=alt.Legend(title="times", tickMinStep=1, format="d")),
        tooltip=[
            alt.Tooltip("client:N"),
            alt.Tooltip("examples:Q"),
            alt.Tooltip("label:N", title="most frequent label"),
            alt.Tooltip("times:Q", title="times selected"),
        ],
    )  # fmt: skip
    few = len(one.points) <= 120
    layers: list[alt.Chart] = [points]
    if few:
        text = chart.mark_text(style="small-label", dy=-12, aria=False, tooltip=False)
        layers.append(text.encode(text="label:N"))
    part = " A random part of the clients is shown." if one.sampled else ""
    digits = " Digits are the most frequent label." if few else ""
    return Figure(
        "map" if one is found.maps[0] else "map-fedcor",
        "Map of the federation"
        if one.source != "FedCor embedding"
        else "Map of the federation by FedCor",
        f"Clients placed by {SOURCES[one.source]}: close clients are alike. Two dimensions keep "
        f"{one.share:.0%} of the variation. The stronger the color, the more often a client was "
        f"selected.{digits}{part} "
        f"First seed. {_end(found.setting)}",
        alt.layer(*layers).properties(height=HEIGHT).add_params(_chosen(found)),
        {"rows": rows},
        "chosen",
    )


def _distances(found: Content, one: FederationMap) -> Figure:
    rows = [
        {"a": i, "b": j, "distance": rounded(one.distances[i, j])}
        for i in range(len(one.names))
        for j in range(len(one.names))
    ]
    names = [{"i": i, "name": name} for i, name in enumerate(one.names)]
    lookup = alt.LookupData(alt.NamedData("names"), key="i", fields=["name"])
    plain = alt.Axis(labels=False, ticks=False, domain=False, title=None)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .transform_lookup(lookup="a", from_=lookup, as_=["first"])
        .transform_lookup(lookup="b", from_=lookup, as_=["second"])
        .mark_rect()
        .encode(
            x=alt.X("a:O", axis=plain),
            y=alt.Y("b:O", axis=plain),
            color=alt.Color("distance:Q", legend=alt.Legend(title="distance"))
            .scale(scheme="viridis", domainMin=0),
            tooltip=["first:N", "second:N", alt.Tooltip("distance:Q", format=".3~f")],
        )
        .properties(height=HEIGHT)
    )  # fmt: skip
    grouped = " Groups of neighbors are averaged." if len(one.names) < len(one.points) else ""
    return Figure(
        "distances",
        "Distance between every two clients",
        f"By {SOURCES[one.source]}; clients are ordered so that like ones are neighbors."
        f"{grouped} First seed. {_end(found.setting)}",
        chart,
        {"rows": rows, "names": names},
    )
