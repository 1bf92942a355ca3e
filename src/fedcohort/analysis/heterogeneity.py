"""Sketches -> how different the clients are, as values that a test can read and a page can draw.

Distances are debiased and do not depend on the number of rows: the root of the squared MMD, which
is the paper's Frobenius distance / sqrt(rows). Two data sets that never meet in a bucket, and
fill one bucket per row each, are sqrt(2) apart. Debiased squares scatter around zero where clients
are alike and may then be negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from fedcohort.analysis.verdict import Verdict, describe, few, judge, privacy, with_hint
from fedcohort.exceptions import DataError
from fedcohort.files.columns import columns_of
from fedcohort.files.marginals import FALSE_MARKS, ColumnGap, bin_labels, column_gaps
from fedcohort.files.sketching import ONE_BUCKET, concentration, same_data
from fedcohort.privacy.release import signal_to_noise
from fedcohort.sketch import uncertainty
from fedcohort.sketch.distances import Stack, distance_matrix, squares_to_global
from fedcohort.sketch.race import RaceSketch, pooled

if TYPE_CHECKING:
    from fedcohort.analysis.plan import Plan

Floats = NDArray[np.float64]

MAX_CLUSTERS = 10
MIN_SILHOUETTE = 0.5  # from here on Kaufman and Rousseeuw (1990) see a reasonable structure
AS_GOOD = 0.02  # difference of silhouettes that chance makes
MIN_GAP = 3.0  # standard errors of one pair
MAX_ORDERED = 200  # clients; beyond, the best order of leaves takes too long
OUTLIER = 3.5  # robust z-score (Iglewicz and Hoaglin 1993)
TOLD_APART = 2.0  # standard errors
ONE_SIDED = 1.645  # standard deviations: 95 of 100 are below
CHANGED = 3.0  # standard errors
MAX_HISTOGRAMS = 12


class Clusters(NamedTuple):
    """A suggested division."""

    number: int
    labels: NDArray[np.int64]  # from 0, larger clusters first
    order: NDArray[np.int64]  # puts like clients side by side
    reason: str  # why it is this number of clusters


class ClientRow(NamedTuple):
    """One client."""

    name: str
    n: float
    private: bool
    distance: float  # to the data of all clients but the outliers
    low: float  # one standard error (of the square) away
    high: float
    z: float  # the robust score by which `outlier` is judged
    outlier: bool
    cluster: int
    nearest: str
    nearest_distance: float


class Histogram(NamedTuple):
    """The values of a marked column at one client and at all others, as shares of each bin."""

    client: str
    column: str
    what: str
    bins: list[str]
    here: Floats
    elsewhere: Floats


class Change(NamedTuple):
    """One client since an earlier sketch of it."""

    client: str
    distance: float
    error: float  # the standard error of its square
    changed: bool  # the square is beyond three standard errors, or columns are marked
    columns: list[ColumnGap]


class Heterogeneity(NamedTuple):
    """All that the page shows; `matrix` and the order of `clusters` index `clients`."""

    clients: list[ClientRow]
    left_out: list[str]  # clients with too few records, or too few for their noise
    records: float
    matrix: Floats  # of distances
    clusters: Clusters
    told_apart: float  # share of the pairs
    privacy: dict[str, int]  # clients by what protects them
    sketch: dict[str, str]  # how the sketches were made, in words
    random_distance: float  # 95 % of pairs of random samples, like the median client, are nearer
    columns: dict[str, list[ColumnGap]]  # by client; empty unless all sketches have `explain`
    histograms: list[Histogram]
    changes: list[Change]  # since earlier sketches, if given
    warnings: list[str]
    blind: bool  # whether the sketches tell nothing

    def verdict(self, plan: Plan | None = None) -> Verdict:
        """Judge in plain words; `plan` adds what to expect of chosen cohorts."""
        return judge(self, plan)

    def marked(self, client: str) -> list[ColumnGap]:
        """Return the columns in which a client differs beyond chance, the surest first."""
        gaps = [gap for gap in self.columns.get(client, []) if gap.marked]
        return sorted(gaps, key=lambda gap: gap.chance)

    @property
    def marked_clients(self) -> list[str]:
        """Clients with such columns, the surest first."""
        surest = {c: gaps[0].chance for c in self.columns if (gaps := self.marked(c))}
        return sorted(surest, key=lambda client: surest[client])

    @property
    def unknown_columns(self) -> dict[str, str]:
        """Columns that cannot be judged at some client, and what to state so that they can."""
        gaps = (gap for gaps in self.columns.values() for gap in gaps)
        return {gap.column: gap.unknown for gap in gaps if gap.unknown}

    @property
    def median_distance(self) -> float:
        """The median client's distance to all data."""
        return float(np.median([c.distance for c in self.clients]))

    @property
    def farthest(self) -> ClientRow:
        """The client farthest from all data."""
        return max(self.clients, key=lambda client: client.distance)

    @property
    def private(self) -> int:
        """How many of the clients are protected by noise."""
        return sum(c.private for c in self.clients)

    @property
    def outliers(self) -> list[ClientRow]:
        """Clients far from all others, the farthest first."""
        return sorted((c for c in self.clients if c.outlier), key=lambda c: -c.distance)

    def facts(self, plan: Plan | None = None) -> dict[str, str]:
        """Return the main numbers in words."""
        far, verdict = self.farthest, self.verdict(plan)
        changed = [c.client for c in self.changes if c.changed]
        left_out = f"{few(self.left_out)}: too few records, or too few for the noise"
        facts = {
            "verdict": verdict.headline,
            "why": "\n".join(verdict.reasons),
            "next": "\n".join(verdict.next_steps),
            "clients": f"{len(self.clients)}, {self.records:,.0f} records",
            "privacy": "; ".join(f"{what} ({n} clients)" for what, n in self.privacy.items()),
            "distance to all": f"median {self.median_distance:.3f}, largest {far.distance:.3f} "
            f"({far.name})",
            "told apart": f"{self.told_apart:.0%} of the pairs, beyond sampling error and noise",
            "outliers": few([c.name for c in self.outliers]) or "none",
            "clusters": self.clusters.reason,
            "changed": self.changes and (few(changed) or "nothing beyond chance"),
            "warnings": "\n".join(self.warnings),
            "left out": self.left_out and left_out,
        }
        return {name: text for name, text in facts.items() if text}

    def as_dict(self, plan: Plan | None = None) -> dict[str, Any]:
        """Return everything for JSON; distances to seven digits."""
        same = "left_out records private privacy median_distance random_distance told_apart"
        same += " warnings sketch columns changes"
        return {
            "clients": len(self.clients),
            **{name: getattr(self, name) for name in same.split()},
            "distance": "root of the debiased squared MMD = Frobenius / sqrt(rows)",
            "outliers": [c.name for c in self.outliers],
            "clusters": self.clusters.number,
            "verdict": self.verdict(plan),
            "client": self.clients,
            "order": self.clusters.order.tolist(),
            "matrix": [[float(f"{v:.7g}") for v in row] for row in self.matrix.tolist()],
        }


def measure(
    sketches: Sequence[RaceSketch],
    names: Sequence[str],
    against: Mapping[str, RaceSketch] | None = None,
) -> Heterogeneity:
    """Compare the sketches of all clients with each other and with all data together.

    Parameters
    ----------
    sketches, names : sequences
        One sketch and name per client.
    against : mapping of str to RaceSketch, optional
        Earlier sketches by client, to say what has changed since.
    """
    usable = np.flatnonzero(~uncertainty.too_few(sketches)).tolist()
    if len(usable) < 2:  # hardly any can be compared: all with two records
        usable = [i for i, sketch in enumerate(sketches) if sketch.n >= 2]
    if len(usable) < 2:
        raise DataError("a profile needs at least two sketches of two records or more")
    used, kept_names = [sketches[i] for i in usable], [names[i] for i in usable]
    squares, errors = distance_matrix(used, "mmd"), uncertainty.pair_errors(used)
    if not any(s.private for s in used):
        errors = uncertainty.cap_by_observed(squares, errors)
    clusters, pairs = suggest_clusters(squares, errors), np.triu_indices(len(used), 1)
    warnings, blind = _warnings(used, kept_names)
    explained = all(s.marginals is not None and s.marginals.n >= 2 for s in used)
    columns = dict(zip(kept_names, column_gaps(used), strict=True)) if explained else {}
    by_name = dict(zip(kept_names, used, strict=True))
    before = {name: sketch for name, sketch in (against or {}).items() if name in by_name}
    if small := [name for name, sketch in before.items() if uncertainty.too_few([sketch])[0]]:
        warnings.append(f"Earlier sketches with too few records to say what changed: {few(small)}.")
        before = {name: sketch for name, sketch in before.items() if name not in small}
    own = ("records", "privacy", "signal to noise")  # of one sketch; the rest all share
    return Heterogeneity(
        clients=_rows(used, kept_names, squares, clusters),
        left_out=[name for i, name in enumerate(names) if i not in usable],
        records=float(sum(s.n for s in used)),
        matrix=np.sqrt(np.maximum(squares, 0)),
        clusters=clusters,
        told_apart=float((squares[pairs] > TOLD_APART * errors[pairs]).mean()),
        privacy=dict(Counter(map(privacy, used))),
        sketch={name: text for name, text in describe(used[0]).items() if name not in own},
        random_distance=float(np.sqrt(ONE_SIDED * np.median(errors[pairs]))),
        columns=columns,
        histograms=_histograms(by_name, columns),
        changes=_changes(by_name, before),
        warnings=warnings,
        blind=blind,
    )


def _histograms(
    sketches: Mapping[str, RaceSketch], columns: Mapping[str, Sequence[ColumnGap]]
) -> list[Histogram]:
    """Return the histograms of the marked columns, the surest first."""
    held = {name: s.marginals.counts for name, s in sketches.items() if s.marginals is not None}
    described = columns_of(next(iter(sketches.values())))
    position = {column.name: i for i, column in enumerate(described)}
    marked = [(gap, name) for name, gaps in columns.items() for gap in gaps if gap.marked]
    histograms = []
    for gap, name in sorted(marked, key=lambda pair: pair[0].chance)[:MAX_HISTOGRAMS]:
        at = position[gap.column]
        others = np.sum([counts[at] for other, counts in held.items() if other != name], axis=0)
        here, elsewhere = (np.maximum(c, 0) / max(c.sum(), 1) for c in (held[name][at], others))
        bins = bin_labels(described[at])
        shown = [i for i in range(len(bins)) if bins[i] and (i or here[0] + elsewhere[0] > 0.005)]
        shares = [bins[i] for i in shown], here[shown], elsewhere[shown]
        histograms.append(Histogram(name, gap.column, with_hint(gap), *shares))
    return histograms


def _changes(sketches: Mapping[str, RaceSketch], before: Mapping[str, RaceSketch]) -> list[Change]:
    """Compare clients with earlier sketches of them, with one bound for all marks together."""
    common = [name for name in sketches if name in before]
    changes = []
    for name in common:
        new, old = sketches[name], before[name]
        square, error = uncertainty.distance_with_error(new, old, "mmd")
        gaps = column_gaps([new, old])[0] if new.marginals and old.marginals else []
        tests = len(gaps) * len(common)
        marked = [gap for gap in gaps if gap.marked and gap.chance * tests < FALSE_MARKS]
        changed = square > CHANGED * error or bool(marked)
        changes.append(Change(name, float(np.sqrt(max(square, 0))), error, changed, marked))
    return sorted(changes, key=lambda change: (not change.changed, -change.distance))


def _warnings(sketches: Sequence[RaceSketch], names: Sequence[str]) -> tuple[list[str], bool]:
    """Say what makes the sketches tell little, and whether they tell nothing."""
    messages, blind = [], False
    noisy = [ratio for ratio in map(signal_to_noise, sketches) if ratio < 1]
    if noisy:
        blind = len(noisy) > len(sketches) / 2
        messages.append(
            f"The noise exceeds the signal in {len(noisy)} of {len(sketches)} sketches (worst "
            f"signal to noise {min(noisy):.2g}): make them with fewer rows, a larger epsilon, a "
            "delta above 0, or of more records."
        )
    full = [concentration(s.counts, s.n) for s in sketches if not s.private]
    if full and float(np.mean(full)) > ONE_BUCKET:
        blind = True
        messages.append(
            "Nearly all records fall into one bucket, so that every distance is about 0: center "
            "and scale the columns by public constants, or set hash=pstable."
        )
    columns = columns_of(sketches[0])
    if len(columns) > 1 and all((c.kind, c.center, c.scale) == ("number", 0, 1) for c in columns):
        messages.append(
            "The columns have neither center nor scale: a difference in a column of small numbers "
            "does not show beside one of large numbers."
        )
    specs = {str(s.origin.get("spec")) for s in sketches}
    if len(specs) > 1:
        messages.append(
            f"The sketches were made by {len(specs)} different specs: compare the files."
        )
    return messages + same_data(sketches, names), blind


def _rows(
    sketches: Sequence[RaceSketch], names: Sequence[str], apart: Floats, clusters: Clusters
) -> list[ClientRow]:
    squares, errors = squares_to_global(sketches), uncertainty.errors_to_global(sketches)
    scores = robust_scores(squares, errors)
    outlying = scores > OUTLIER
    usual = [s for s, far in zip(sketches, outlying, strict=True) if not far]
    if outlying.any() and len(usual) > 1:  # outliers must not make all others look far
        squares[~outlying] = squares_to_global(usual)
        errors[~outlying], center = uncertainty.errors_to_global(usual), pooled(usual)
        for i in np.flatnonzero(outlying).tolist():
            squares[i], errors[i] = uncertainty.distance_with_error(sketches[i], center, "mmd")
    # The nearest client is ranked as a registry ranks, with what luck can do: see its search.
    stack, counts = Stack(sketches), np.array([s.counts for s in sketches])
    sampling, noisy = uncertainty.possible_luck(counts, len(sketches) - 1)
    ranked = apart + (sampling / stack.n + noisy * stack.noise / stack.n**2) / stack.rows
    np.fill_diagonal(ranked, np.inf)
    nearest = ranked.argmin(axis=1)
    between = apart[np.arange(len(apart)), nearest]
    values = (squares, squares - errors, squares + errors, between)
    distances, low, high, near = (np.sqrt(np.maximum(v, 0)).tolist() for v in values)
    private = [s.private for s in sketches]
    groups, neighbors = clusters.labels.tolist(), [names[i] for i in nearest]
    shown = (distances, low, high, scores.tolist(), outlying.tolist(), groups, neighbors, near)
    rows = zip(names, [s.n for s in sketches], private, *shown, strict=True)
    return list(starmap(ClientRow, rows))


def robust_scores(squares: Floats, errors: Floats) -> Floats:
    """Say how far each client's squared distance is above the median, in robust deviations.

    The deviation is that of the clients among each other (1.4826 times the median absolute
    deviation) and the client's own standard error together, so that a client which is far only
    because it is small, or noisy, does not stand out.
    """
    scale = np.hypot(median_abs_deviation(squares, scale="normal"), errors)
    return np.asarray((squares - np.median(squares)) / np.where(scale > 0, scale, np.inf))


def suggest_clusters(squares: Floats, errors: Floats) -> Clusters:
    """Suggest a number of clusters from debiased squared distances (N, N) and standard errors.

    Average linkage is cut into 2, 3, ... clusters. The cut with the best mean silhouette
    (Rousseeuw 1987) is suggested; of several that are as good, the one with fewest clusters. One
    cluster is suggested instead if that silhouette is below 0.5, or if squared distances across
    clusters exceed those within by less than 3 standard errors of one pair: mere chance.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform
    from sklearn.metrics import silhouette_score

    n = len(squares)
    distances = np.sqrt(np.maximum(squares, 0))
    np.fill_diagonal(distances, 0)
    near = squareform(distances, checks=False)
    tree = linkage(near, "average", optimal_ordering=n <= MAX_ORDERED)
    order = leaves_list(tree).astype(np.int64)
    tried = range(2, min(MAX_CLUSTERS, n - 1) + 1)
    cuts = {k: fcluster(tree, k, "maxclust").astype(np.int64) - 1 for k in tried}
    scores = {
        k: float(silhouette_score(distances, cut, metric="precomputed"))
        for k, cut in cuts.items()
        if len(set(cut)) == k
    }
    one = Clusters(1, np.zeros(n, np.int64), order, "one, as there are too few clients to divide")
    if not scores:
        return one
    best = min(k for k, score in scores.items() if score >= max(scores.values()) - AS_GOOD)
    gap, score = _gap(squares, errors, cuts[best]), scores[best]
    if score < MIN_SILHOUETTE:
        seen = f"silhouette {score:.2f}, needed {MIN_SILHOUETTE}"
        return one._replace(reason=f"one, as no division stands out ({seen})")
    if gap < MIN_GAP:
        seen = f"{gap:.1f} standard errors, needed {MIN_GAP:g}"
        return one._replace(reason=f"one, as chance explains the best division ({seen})")
    by_size = np.argsort(np.argsort(-np.bincount(cuts[best]), kind="stable"), kind="stable")
    reason = f"{best}, silhouette {score:.2f}, {gap:.1f} standard errors apart"
    return Clusters(best, by_size[cuts[best]], order, reason)


def _gap(squares: Floats, errors: Floats, labels: NDArray[np.int64]) -> float:
    """By how many standard errors of one pair clusters are apart."""
    pairs = np.triu(np.ones_like(squares, bool), 1)
    same = labels[:, None] == labels
    inside, across = pairs & same, pairs & ~same
    within = float(squares[inside].mean()) if inside.any() else 0.0
    error = float(errors[across].mean())
    difference = float(squares[across].mean()) - within
    return difference / error if error > 0 else float("inf") if difference > 0 else 0.0
