"""The heterogeneity page: one HTML file that works offline and loads nothing.

Its only script sorts and searches the table of clients. The page's own policy allows that script
by its hash, and forbids all others.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

import numpy as np

from fedcohort.analysis.heterogeneity import OUTLIER, ClientRow, Heterogeneity
from fedcohort.analysis.plan import Plan
from fedcohort.analysis.verdict import few, marked_in_words
from fedcohort.report.drawing import (
    COLORS,
    Mark,
    bars,
    dots,
    matrix,
    scatter,
)

BARS = 60  # clients; more are drawn as dots
NAMES_ON_MAP = 25
SCRIPT = """
const table = document.getElementById("clients"), body = table.tBodies[0];
const rows = Array.from(body.rows), find = document.getElementById("find");
const shown = document.getElementById("shown");
function search() {
  const words = find.value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    row.hidden = !row.textContent.toLowerCase().includes(words);
    count += row.hidden ? 0 : 1;
  }
  shown.textContent = count + " of " + rows.length;
}
function sort(column, head) {
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
  const order = (a, b) => key(a).localeCompare(key(b), "en", {numeric: true});
  const number = (a, b) => Number(key(a)) - Number(key(b));
  const numeric = rows.every(row => row.cells[column].dataset.v !== undefined);
  rows.sort(numeric ? number : order);
  if (down) rows.reverse();
  for (const row of rows) body.append(row);
}
find.addEventListener("input", search);
Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
  head.addEventListener("click", () => sort(column, head));
});
search();
"""
ALLOWED = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{ALLOWED}'"
)
STYLE = """
:root { color-scheme: light }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 60px; background: #fff; color: #1c2430;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 6px }
p { margin: 6px 0; max-width: 72ch } .soft { color: #5b6573 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin: 18px 0 }
.tile { background: #f5f7fa; border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 22px; line-height: 1.25; overflow-wrap: anywhere }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 20px }
svg { width: 100%; height: auto; display: block }
.scroll { max-height: 620px; overflow: auto; border: 1px solid #e3e6ea; border-radius: 8px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid #edf0f3;
  overflow-wrap: anywhere }
th { position: sticky; top: 0; background: #f5f7fa; white-space: nowrap }
td.r, th.r { text-align: right; white-space: nowrap }
td:first-child { min-width: 14ch } td.wide { min-width: 32ch }
tr.odd td { background: #fff4e5 } .dot { display: inline-block; width: 9px; height: 9px;
  border-radius: 5px; margin-right: 6px }
.verdict { border-left: 6px solid #0072b2; background: #f3f8fc; border-radius: 6px;
  padding: 12px 18px; margin: 16px 0 }
.verdict.kind { border-color: #d55e00; background: #fdf5ef }
.verdict.unknown { border-color: #8a8a8a; background: #f6f6f6 }
.verdict.columns { border-color: #d55e00; background: #fdf5ef }
.verdict.alike { border-color: #009e73; background: #f0f9f6 }
.verdict h2 { margin: 0 0 6px; font-size: 20px } .verdict h3 { margin: 10px 0 2px; font-size: 15px }
.verdict ul { margin: 4px 0; padding-left: 20px } .verdict li { max-width: 90ch }
.warning { background: #fff4e5; border-radius: 6px; padding: 8px 14px; margin: 8px 0 }
th { cursor: pointer } th[aria-sort=descending]::after { content: " ▾" }
th[aria-sort=ascending]::after { content: " ▴" }
input { font: inherit; padding: 5px 10px; border: 1px solid #c8ccd2; border-radius: 6px;
  margin: 4px 10px 8px 0; width: 260px }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px } dt { color: #5b6573 }
dd { margin: 0; overflow-wrap: anywhere }
@media print { .scroll { max-height: none } }
"""


def page(
    found: Heterogeneity,
    title: str = "How different are the clients?",
    plan: Plan | None = None,
) -> str:
    """Lay out a federation's differences as an HTML page.

    Every name is escaped, and the page's own policy forbids loading anything.

    Parameters
    ----------
    found : Heterogeneity
    title : str
    plan : Plan, optional
        What to expect of chosen cohorts, for the verdict.
    """
    content = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{_subtitle(found)}</p>',
        _verdict(found, plan),
        *(f'<p class="warning">{escape(line)}</p>' for line in found.warnings),
        _tiles(found),
        f"<p>{_details(found)}</p>",
        "<h2>Distance to all data together</h2>",
        '<p class="soft">0: the client looks like the whole federation. The thin line is one '
        "standard error, an upper bound. The dashed lines are what to compare with: random samples "
        "of the same data"
        + (
            ", and the classes of the label."
            if found.references.label is not None
            else f". There is no line for the classes of a label: {found.references.no_label}."
        )
        + "</p>",
        _distances(found),
        '<div class="pair">',
        "<section><h2>Map</h2>"
        f'<p class="soft">Clients drawn close are alike; two dimensions keep '
        f"{found.map_share:.0%} of what there is to see.</p>{_map(found)}</section>",
        "<section><h2>Every pair</h2>"
        '<p class="soft">Light pairs are alike. Clients are ordered so that like ones are '
        f"neighbors.</p>{_matrix(found)}</section>",
        "</div>",
        "<h2>Clients</h2>",
        _table(found),
        _explanation(found),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{chr(10).join(content)}<script>{SCRIPT}</script></body></html>\n"
    )


def _subtitle(found: Heterogeneity) -> str:
    parts = [f"{escape(what)} ({n} clients)" for what, n in found.privacy.items()]
    return f"{found.records:,.0f} records. Privacy: {'; '.join(parts)}."


def _tiles(found: Heterogeneity) -> str:
    facts = found.summary()
    tiles = {
        "clients": f"{facts['clients']:,}",
        "of the pairs told apart": f"{found.told_apart:.0%}",
        "median distance to all": f"{facts['median_distance']:.3f}",
        "largest distance to all": f"{facts['largest_distance']:.3f}",
        "outliers": f"{len(found.outliers)}",
        "suggested clusters": f"{found.clusters.number}",
    }
    made = "".join(f'<div class="tile"><b>{v}</b>{k}</div>' for k, v in tiles.items())
    return f'<div class="tiles">{made}</div>'


def _verdict(found: Heterogeneity, plan: Plan | None) -> str:
    made = found.verdict(plan)
    why, do = (
        "".join(f"<li>{escape(line)}</li>" for line in lines)
        for lines in (made.reasons, made.next_steps)
    )
    return (
        f'<section class="verdict {made.kind}"><h2>{escape(made.headline)}</h2><ul>{why}</ul>'
        f"<h3>What to do next</h3><ul>{do}</ul></section>"
    )


def _details(found: Heterogeneity) -> str:
    odd, gone = "No client is an outlier.", ""
    if found.outliers:
        odd = f"Outliers: {escape(few([c.name for c in found.outliers]))}."
    if found.left_out:
        names = escape(few([c.name for c in found.left_out]))
        gone = f" Left out, with too few records, or too few for their noise: {names}."
    return f"{odd} Suggested clusters: {escape(found.clusters.reason())}.{gone}"


def _marks(found: Heterogeneity) -> list[Mark]:
    return [
        Mark(c.name, c.distance, c.low, c.high, _color(c), c.outlier, _tip(c))
        for c in found.clients
    ]


def _color(client: ClientRow) -> str:
    return COLORS[client.cluster % len(COLORS)]


def _tip(c: ClientRow) -> str:
    return f"{c.name}: {c.n:,.0f} records, distance {c.distance:.3f} ({c.low:.3f} to {c.high:.3f})"


def _distances(found: Heterogeneity) -> str:
    marks = sorted(_marks(found), key=lambda m: -m.value)
    lines = {"random samples": found.references.random}
    if found.references.label is not None:
        lines["classes"] = found.references.label
    return bars(marks, lines) if len(marks) <= BARS else dots(marks, lines)


def _map(found: Heterogeneity) -> str:
    positions = np.array([(c.x, c.y) for c in found.clients])
    return scatter(_marks(found), positions, len(found.clients) <= NAMES_ON_MAP)


def _matrix(found: Heterogeneity) -> str:
    order = found.order
    clients = [found.clients[i] for i in order]
    values = found.matrix[np.ix_(order, order)]
    return matrix(values, [c.name for c in clients], [_color(c) for c in clients])


def _table(found: Heterogeneity) -> str:
    """Lay out the clients in a table that sorts and searches; cells hold numbers as data-v."""
    explained, mixed = bool(found.columns), 0 < found.private < len(found.clients)
    rows = sorted(found.clients, key=lambda c: -c.distance)
    head = (
        '<tr><th>client</th><th class="r">records</th><th class="r">distance</th>'
        '<th class="r">± standard error</th><th class="r">robust score</th><th>cluster</th>'
        f"<th>nearest client</th>{'<th>columns that differ</th>' if explained else ''}"
        f"{'<th>private</th>' if mixed else ''}</tr>"
    )
    body = "".join(_row(found, c, explained, mixed) for c in rows)
    return (
        '<input id="find" type="search" placeholder="Search" aria-label="Search the clients">'
        f'<span class="soft" id="shown">{len(rows)}</span>'
        f'<div class="scroll"><table id="clients"><thead>{head}</thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _row(found: Heterogeneity, c: ClientRow, explained: bool, mixed: bool) -> str:
    columns = marked_in_words(found.marked(c.name)) or "none"
    last = f'<td class="wide">{escape(columns)}</td>' if explained else ""
    last += f"<td>{'yes' if c.private else 'no'}</td>" if mixed else ""
    return (
        f"<tr{' class=odd' if c.outlier else ''}><td>{escape(c.name)}</td>"
        f'<td class="r" data-v="{c.n:.6g}">{c.n:,.0f}</td>'
        f'<td class="r" data-v="{c.distance:.6g}">{c.distance:.4f}</td>'
        f'<td class="r" data-v="{c.high - c.low:.6g}">{c.low:.4f} to {c.high:.4f}</td>'
        f'<td class="r" data-v="{c.z:.6g}">{c.z:.1f}</td><td data-v="{c.cluster}">'
        f'<span class="dot" style="background:{_color(c)}"></span>{c.cluster + 1}</td>'
        f"<td>{escape(c.nearest)} ({c.nearest_distance:.3f})</td>{last}</tr>"
    )


def _explanation(found: Heterogeneity) -> str:
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in found.sketch.items())
    return f"""<h2>What the numbers mean</h2>
<p>Every client's data were hashed into a small table of counts, the sketch. The distance of two
clients is that of their counts, less the part that is only sample size and noise; it is 0 for
equal distributions and grows with the share of the data that differ. It does not depend on the
number of rows: it is the Frobenius distance of the normalized sketches / √rows, an estimate of
the maximum mean discrepancy.</p>
<p>A pair is told apart if its squared distance is more than two standard errors above zero. A
client is an outlier if its squared distance to all data together is more than {OUTLIER} robust
deviations above the median client's, where the deviation includes the client's own standard
error. Clusters come from average linkage; their number is the one with the best silhouette. The
nearest client is ranked as a registry ranks: a client of few or noisy records is not near to
everybody because its distance is uncertain.</p>
<p>The verdict follows these rules, the first that holds. Unknown: the noise exceeds the signal in
more than half of the sketches, or nearly all records fall into one bucket. Different in kind:
there are outliers, or several clusters of three clients or more on average. Different in columns:
fewer than 15% of the pairs are told apart, but a column of some client differs. Alike: fewer than
15% of the pairs are told apart. Different in degree: all else.</p>
<h2>What is protected</h2>
<p>Sketches with noise protect single records: whoever reads the counts can hardly tell whether one
record was there. They do not hide what the client's data look like as a whole, which is what this
page shows, nor several records of one person, nor, where n is public, how many records there are.
Sketches with exact counts protect nothing by themselves.</p>
<h2>The sketches</h2><dl>{facts}</dl>"""
