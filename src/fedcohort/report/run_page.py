"""The report on runs: one interactive HTML page that needs no network, or Markdown with figures.

The page holds its data, style and scripts. Its own policy forbids loading anything, and allows only
the two scripts that are part of it, by their hashes: a client that is called ``<script>`` is text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from fedcohort.experiments.results import Results
from fedcohort.report import figures
from fedcohort.report.content import Content, content
from fedcohort.report.figures import Figure
from fedcohort.report.run_figures import run_figures
from fedcohort.report.tables import ComparisonRow, Interval, gain_text, plus_minus

NO_BREAK = "\N{NO-BREAK SPACE}"
VEGA_LITE = "6.4"  # the version of Altair's specifications


class Cell(NamedTuple):
    """A cell of the page's table: its text, and the value that it is sorted by."""

    text: str
    value: str
    best: bool = False


def page(results: Results, *, live: bool = False) -> str:
    """Lay out runs as one HTML page.

    Parameters
    ----------
    results : Results
        The runs, finished or not.
    live : bool, default=False
        Whether the page asks its server for new rounds; see `fedcohort.report.watch`.
    """
    found = content(results)
    drawn = run_figures(found)
    library = _library()
    script = _asset("report.js") + (_asset("watch.js") if live else "")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    if live:
        policy += "; connect-src 'self'"
    return (
        '<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(found.title)}</title>\n<style>{_asset('report.css')}</style></head>\n"
        f"<body>\n{_body(found, drawn)}\n"
        f'<script type="application/json" id="report-data">{page_data(found, drawn)}</script>\n'
        f'<script type="module">{library}</script>\n'
        f'<script type="module">{script}</script>\n</body></html>\n'
    )


def page_data(found: Content, drawn: Sequence[Figure]) -> str:
    """Return what the page's script needs, as JSON without any character that HTML could read."""
    chosen = found.highlighted or [p.policy for p in found.participation]
    values = {
        "ranked": found.ranked,
        "highlighted": found.highlighted,
        "baselines": found.baselines,
        "chosen": chosen[0] if chosen else None,
        "label_gap": figures.LABEL_GAP,
        "config": {"light": figures.config("light"), "dark": figures.config("dark")},
        "figures": [
            {
                "name": figure.name,
                "title": figure.title,
                "caption": figure.caption,
                "control": figure.control,
                "labels": None if figure.labels is None else figure.labels._asdict(),
                "spec": figures.specification(figure, width="container"),
            }
            for figure in drawn
        ],
    }
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def markdown(results: Results, figure_paths: Mapping[str, str]) -> str:
    """Lay out runs in Markdown, for a paper or a pull request.

    `figure_paths` maps the names of figures to the files that `save_figures` wrote.
    """
    found = content(results)
    headers, rows = _table(found)
    lines = [f"# {found.title}", "", _markdown_text(found.headline), "", f"{_sentence(found)}", ""]
    lines.append("| " + " | ".join(_markdown_text(h) for h in headers) + " |")
    lines.append("|" + "---|" * len(headers))
    for row in rows:
        texts = [_markdown_text(c.text) for c in row]
        lines.append(
            "| "
            + " | ".join(f"**{t}**" if c.best else t for c, t in zip(row, texts, strict=True))
            + " |"
        )
    lines += ["", _explanation(found), ""]
    for figure in run_figures(found):
        if figure.name in figure_paths:
            caption = _markdown_text(figure.caption)
            lines += [f"## {figure.title}", ""]
            lines += [f"![{figure.title}]({figure_paths[figure.name]})", "", caption, ""]
    lines += ["## Settings", ""]
    lines += [f"- {key}: `{value}`" for key, value in found.settings.items()]
    for known in found.provenance:
        versions = ", ".join(f"{k} {v}" for k, v in known.get("versions", {}).items())
        lines += ["", f"Made with {versions} by:", "", "```", str(known.get("command", "")), "```"]
    return "\n".join(lines) + "\n"


def _markdown_text(text: str) -> str:
    for mark in "\\`*_<>|[]":
        text = text.replace(mark, f"\\{mark}")
    return text


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; bundling takes some seconds."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(  # type: ignore[call-arg]
        vl_version=VEGA_LITE
    )
    return bundle.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (files("fedcohort.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _body(found: Content, drawn: Sequence[Figure]) -> str:
    parts = [
        '<a class="skip" href="#results">Skip to the results</a>',
        f"<header><div><h1>{escape(found.title)}</h1>",
        f'<p class="soft">{escape(_sentence(found))}</p></div>',
        '<button id="theme" type="button">Dark theme</button></header>',
        '<main id="results">',
        f'<p class="lead">{escape(found.headline.replace(" %", NO_BREAK + "%"))}</p>',
        "" if found.finished else '<p class="note">Not all runs are finished.</p>',
    ]
    lines = [f for f in drawn if f.control == "highlighted"]
    if len(lines) % 2 == 0 and lines:  # the first is wide, and so is the last if it has no partner
        lines[-1] = lines[-1]._replace(wide=True)
    others = [f for f in drawn if f.control != "highlighted"]
    if lines:
        # The legend stays in sight as long as figures that it controls do.
        parts += ["<section>", "<h2>Accuracy and cost</h2>", _legend(found)]
        parts += ['<div class="grid">', *map(_figure, lines), "</div>", "</section>"]
    parts += ["<h2>All runs</h2>", _html_table(found)]
    if others:
        parts += ["<h2>Clients</h2>", _chooser(found)]
        parts += ['<div class="grid">', *map(_figure, others), "</div>"]
    parts += [_settings(found), "</main>"]
    return "\n".join(parts)


def _sentence(found: Content) -> str:
    return f"{found.setting[:1].upper()}{found.setting[1:]}." if found.setting else ""


def _legend(found: Content) -> str:
    items = [
        f'<li><button type="button" data-run="{escape(name)}" aria-pressed="false">'
        f'<span class="swatch"></span>{escape(name)}</button></li>'
        for name in found.ranked
    ]
    items += [
        f'<li class="baseline"><span class="swatch"></span>{escape(name)} (baseline)</li>'
        for name in found.baselines
    ]
    return (
        '<p class="soft">Choose which runs are highlighted, the most accurate first.</p>'
        f'<ul class="legend sticky" aria-label="Highlighted runs">{"".join(items)}</ul>'
    )


def _figure(figure: Figure) -> str:
    wide = ' class="wide"' if figure.wide else ""
    return (
        f'<figure{wide} aria-labelledby="title-{figure.name}">'
        f'<h3 id="title-{figure.name}">{escape(figure.title)}</h3>'
        f'<div class="chart" id="chart-{figure.name}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _chooser(found: Content) -> str:
    names = [p.policy for p in found.participation]
    first = found.highlighted[0] if found.highlighted else names[0]
    options = "".join(
        f'<option value="{escape(n)}"{" selected" if n == first else ""}>{escape(n)}</option>'
        for n in names
    )
    return (
        '<p class="choose"><label for="choose">Selections of</label>'
        f'<select id="choose" data-choose>{options}</select></p>'
    )


def _table(found: Content) -> tuple[list[str], list[list[Cell]]]:
    """Return the headers and cells of the table; only columns with a value are kept."""
    named = list(dict.fromkeys(key for own in found.columns for key in own))
    best = _best(found.rows)
    target = "" if found.target is None else f"rounds to {found.target:.0%}"
    rows = []
    both = zip(found.rows, found.columns, strict=True)
    for row, own in sorted(both, key=lambda pair: -np.nan_to_num(pair[0].accuracy.mean, nan=-1)):
        cells = {name: Cell(own.get(name, ""), own.get(name, "")) for name in named}
        cells["accuracy %"] = _spread(row.accuracy.mean, row.accuracy.std, row is best, 100)
        cells["against uniform"] = _gain(row.gain)
        if target:
            cells[target] = _rounds(row)
        cells["GEMD"] = _number(row.gemd.mean, 2)
        cells["evenness"] = _number(row.participation_entropy.mean, 2)
        cells["MB up"] = _number(row.megabytes_up.mean)
        cells["MB down"] = _number(row.megabytes_down.mean)
        if found.withheld:
            cells["rounds skipped %"] = _number(row.skipped.mean)
            cells["uplink, % of FedAvg"] = _number(row.overhead_up.mean)
            cells["downlink, % of FedAvg"] = _number(row.overhead_down.mean)
        cells["s"] = _number(row.seconds)
        rows.append(cells)
    headers = [h for h in (rows[0] if rows else {}) if any(row[h].text for row in rows)]
    return headers, [[row[h] for h in headers] for row in rows]


def _best(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    known = [row for row in rows if math.isfinite(row.accuracy.mean)]
    return max(known, key=lambda row: row.accuracy.mean, default=None)


def _number(value: float, digits: int = 1) -> Cell:
    return Cell(f"{value:,.{digits}f}", repr(value)) if math.isfinite(value) else Cell("", "")


def _spread(mean: float, std: float, best: bool, factor: float) -> Cell:
    text = plus_minus(factor * mean, factor * std)
    return Cell(text, repr(mean) if text else "", best)


def _gain(gain: Interval | None) -> Cell:
    return Cell("", "") if gain is None else Cell(gain_text(gain), repr(gain.mean))


def _rounds(row: ComparisonRow) -> Cell:
    value = row.rounds_to_target
    if value.missing == row.seeds:
        return Cell("not reached", "")
    share = f" ({row.seeds - value.missing}/{row.seeds})" if value.missing else ""
    return Cell(plus_minus(value.mean, value.std) + share, repr(value.mean))


def _html_table(found: Content) -> str:
    headers, rows = _table(found)
    names = len(dict.fromkeys(key for own in found.columns for key in own))
    sorted_by = {"accuracy %": ' aria-sort="descending"'}
    head = "".join(
        f'<th scope="col"{"" if i < names else " class=number"}{sorted_by.get(header, "")}>'
        f'<button type="button">{escape(header)}</button></th>'
        for i, header in enumerate(headers)
    )
    body = "".join(f"<tr>{_html_row(row, names)}</tr>" for row in rows)
    return (
        '<div class="scroll" role="region" aria-label="Results of all runs" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="soft">{escape(_explanation(found))}</p>'
    )


def _html_row(row: Sequence[Cell], names: int) -> str:
    cells = []
    for i, cell in enumerate(row):
        tag = 'th scope="row"' if i == 0 else "td"
        kinds = [] if i < names else ["number"]
        kinds += ["best"] if cell.best else []
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        end = "th" if i == 0 else "td"
        value = f' data-value="{escape(cell.value)}"'
        cells.append(f"<{tag}{kind}{value}>{escape(cell.text)}</{end}>")
    return "".join(cells)


def _explanation(found: Content) -> str:
    """Say what the columns mean."""
    text = (
        "Accuracy is the mean over the last rounds (a fifth of the run, at most 50 rounds), ± one "
        "standard deviation over seeds. "
    )
    if any(row.gain for row in found.rows):
        text += (
            "The difference to uniform selection is paired by seed; brackets are its bootstrap "
            "95 % interval, which is too narrow for very few seeds. "
        )
    return text + (
        "GEMD is the label imbalance of the cohorts, 0 if balanced. Evenness is the entropy of "
        "participation, 1 if all clients take part equally often. The last column is the "
        "wall-clock time in seconds."
    )


def _settings(found: Content) -> str:
    parts = ["<h2>How to make it again</h2>"]
    for known in found.provenance:
        versions = ", ".join(f"{k} {v}" for k, v in dict(known.get("versions", {})).items())
        parts.append(f"<pre><code>{escape(str(known.get('command', '')))}</code></pre>")
        parts.append(f'<p class="soft">{escape(versions)}; {escape(str(known.get("machine")))}</p>')
    facts = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in found.settings.items()
    )
    parts.append(
        f"<details><summary>Settings that all runs share</summary><dl>{facts}</dl></details>"
    )
    return "\n".join(parts)
