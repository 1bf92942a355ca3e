"""Which column differs: planted shifts are named, and nothing where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import fisher_exact, norm

from fedcohort.exceptions import InvalidSketch
from fedcohort.files.columns import Column, columns_width
from fedcohort.files.marginals import (
    BINS,
    MIDDLES,
    bins_of,
    column_gaps,
    visible_shares,
)
from fedcohort.files.table_source import Encoded
from fedcohort.privacy.release import noise_for
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import ColumnCounts, RaceSketch

LEVEL = Column("level", "category", levels=("a", "b", "c"))
COLUMNS = (*(Column(f"x{i}") for i in range(6)), LEVEL)
WIDE = tuple(Column(f"x{i:02}") for i in range(64))


def part(order, missing=False):
    """What `files.table_source` hands over: a number to bin by, and which values are missing."""
    order = np.asarray(order, float)
    return Encoded(order[:, None], np.full(len(order), missing), order)


def site(columns, parts):
    """Return a sketch with the histograms of these columns; its joint counts play no part here."""
    made, n = RaceSketch(SRP(columns_width(columns), rows=5, bits=2)), len(parts[0].order)
    made.columns = tuple(column.spec() for column in columns)
    made.marginals = ColumnCounts.empty(len(columns))
    made.marginals.add(bins_of(columns, parts))
    made.counts[:, 0], made.n = n, n
    return made


def usual(rng, n):
    parts = [part(rng.normal(size=n)) for _ in COLUMNS[:-1]]
    return site(COLUMNS, [*parts, part(rng.choice(3, n, p=(0.5, 0.3, 0.2)))])


def wide(rng, n, planted=None):
    """64 columns of normal numbers; one of them shifted, stretched or with missing values."""
    parts = [part(rng.normal(size=n)) for _ in WIDE]
    if planted is not None:
        column, change = planted
        parts[column] = part(*change(parts[column].order, rng))
    return site(WIDE, parts)


def counted(column, *histograms):
    """Return two sites of one column with given counts."""
    pair = [site((column,), [part([])]) for _ in histograms]
    for sketch, counts in zip(pair, histograms, strict=True):
        sketch.marginals.counts[0, : len(counts)] = counts
        sketch.marginals.n = sum(counts)
    return pair


def of_numbers(*sides):
    """Return two sites of one column of numbers around 0, in scales."""
    bins = (bins_of((Column("x"),), [part(x)])[:, 0] for x in sides)
    return counted(Column("x"), *(np.bincount(b, minlength=BINS) for b in bins))


def marked(gaps):
    return [gap.column for gap in gaps if gap.marked]


def test_a_record_is_in_one_bin_per_column():
    made = usual(np.random.default_rng(0), 101).marginals
    assert made.counts.shape == (7, BINS)
    assert (made.counts.sum(axis=1) == 101).all()
    edges = bins_of(COLUMNS[:1], [part([-9, -3, 0, 3.1, 9, 0], np.arange(6) == 5)])
    assert edges[:, 0].tolist() == [1, 1, 8, 15, 15, 0]


@pytest.mark.parametrize("epsilon", [None, 1.0, 4.0])
def test_where_there_is_nothing_marks_are_as_rare_as_stated(epsilon):
    """150 pairs of equal sites, of 5 to 2000 records; fewer than 1% may have any mark.

    With marks at 1% the chance of more than 6 among 150 is below 0.001; a test that forgot the
    noise, or the small sites, marks most of them.
    """
    rng = np.random.default_rng(4)
    false = 0
    for _ in range(150):
        pair = [usual(rng, int(n)) for n in np.exp(rng.uniform(np.log(5), np.log(2000), 2))]
        if epsilon is not None:
            pair = [s.privatize(epsilon, rng=rng) for s in pair]
        false += bool(marked(column_gaps(pair)[0]))
    assert false <= 6


@pytest.mark.parametrize("budget", [None, (4.0, 0.0), (4.0, 1e-6)])
def test_of_64_columns_the_right_ones_are_named_and_none_where_there_is_nothing(budget):
    """40 sites of 200 to 2,000 records and one of three; three are planted, of 3,000 records.

    Seed 21. By the rule, the chance of even one false mark in both federations is below 2%; by the
    chi-square of two moments, used before, chances of 1e-13 occurred without a shift.
    """
    rng = np.random.default_rng(21)
    planted = [
        (5, lambda x, rng: (x + 1.2,)),
        (40, lambda x, rng: (x * 3,)),
        (63, lambda x, rng: (x, rng.random(len(x)) < 0.5)),
    ]
    sites = [wide(rng, int(n)) for n in np.exp(rng.uniform(np.log(200), np.log(2000), 39))]
    sites.append(wide(rng, 3))
    odd = [wide(rng, 3000, what) for what in planted]
    if budget is not None:
        sites, odd = ([s.privatize(*budget, rng=rng) for s in part] for part in (sites, odd))
    assert not any(marked(gaps) for gaps in column_gaps(sites))
    found = column_gaps([*sites, *odd])
    assert [marked(gaps) for gaps in found[-3:]] == [["x05"], ["x40"], ["x63"]]
    assert not any(marked(gaps) for gaps in found[:-3])
    assert found[-3][5].what.startswith("higher by about 1")
    assert found[-1][63].what.startswith("more missing values (+")


def test_levels_are_named():
    (gap,) = column_gaps(counted(LEVEL, (0, 500, 300, 200), (0, 200, 300, 500)))[0]
    assert (gap.marked, gap.what) == (True, "more 'a' (+30%)")


@pytest.mark.parametrize("budget", [None, (1.0, 0.0), (1.0, 1e-6)])
def test_what_would_be_marked_is_about_what_is(budget):
    """1.3 times the share that is stated is marked, half of it is not."""
    rng = np.random.default_rng(12)
    for factor, is_marked in ((1.3, True), (0.5, False)):
        levels = (800, 800, 400)
        pair = [site((LEVEL,), [part(np.repeat(np.arange(3), levels))]) for _ in range(2)]
        if budget is not None:
            pair = [s.privatize(*budget, rng=rng) for s in pair]
        moved = int(factor * visible_shares(pair)[0] * 2000)
        pair[0].marginals.counts[0, 1:3] += (moved, -moved)
        (gap,) = column_gaps(pair)[0]
        assert gap.marked == is_marked
    few = [site(WIDE, [part(rng.normal(size=300))] * 64).privatize(1.0, rng=rng) for _ in range(2)]
    assert visible_shares(few).tolist() == [1, 1]  # "No column differs" was all that was said


def test_chances_are_bounds_of_the_true_ones():
    """One bin under much Laplace noise, whose tail is known: both sides have exp(-t / b).

    Chernoff's bound must lie above it and, for one of 16 bins, within a factor of 32 * 100.
    """
    scale = 1000
    release = noise_for(1, 1 / scale, 0.0, "add-remove")
    for t in (3, 6, 10, 15, 20):
        counts = np.eye(1, BINS, 4, dtype=int)[0] * t * scale
        pair = counted(Column("x"), counts, 0 * counts)
        pair[0].marginals.release = release
        pair[0].marginals.n = pair[1].marginals.n = 1e6
        bound = column_gaps(pair)[0][0].chance
        assert np.exp(-t) <= bound
        assert t < 10 or bound <= 32 * 100 * np.exp(-t)


@pytest.mark.parametrize("a", [(0, 270, 330), (30, 270), (0, 5, 0, 1), (0, 40, 2, 0, 7)])
def test_without_noise_a_column_has_the_power_of_its_exact_test(a):
    """Against Fisher's exact test of SciPy; a column of two values is one test, not six.

    Of 600 records 45 % instead of 55 % in 5,000 were not found: their chance was 30 times too high.
    """
    b = {2: (90, 4000), 3: (0, 2750, 2250), 4: (0, 1, 0, 9), 5: (0, 300, 200, 9, 40)}[len(a)]
    gap = column_gaps(counted(LEVEL, a, b))[0][0]
    least = min(
        fisher_exact([[x, sum(a) - x], [y, sum(b) - y]]).pvalue for x, y in zip(a, b, strict=True)
    )
    values = sum(x + y > 0 for x, y in zip(a, b, strict=True))
    tests = 1 if values == 2 else values
    assert values > 2 or gap.chance >= least * (1 - 1e-9)
    assert gap.chance <= 4 * least * tests * (1 + 1e-9)
    assert a != (0, 270, 330) or gap.marked


def test_a_shifted_mean_has_nearly_the_power_of_a_z_test():
    """By 0.2 of 3,000 records each: z = 7.6; the bound may cost a factor of 300."""
    rng = np.random.default_rng(8)
    pair = of_numbers(rng.normal(size=3000), rng.normal(size=3000) + 0.2)
    place = np.concatenate([[0], np.clip(MIDDLES, -1.5, 1.5)])
    share = [sketch.marginals.counts[0] / 3000 for sketch in pair]
    pooled = (share[0] + share[1]) / 2
    deviation = np.sqrt((pooled @ place**2 - (pooled @ place) ** 2) * 2 / 3000)
    z = abs(place @ (share[1] - share[0])) / deviation
    assert 2 * norm.sf(z) <= column_gaps(pair)[0][0].chance <= 300 * 2 * norm.sf(z)


@pytest.mark.parametrize("value", [13.5, 88.0])
def test_most_values_in_an_end_bin_are_no_all_clear(value):
    """Without constants 0 and 1, all lie beyond 3: "no column differs" and "about 2.9" were said.

    A site of which the values are 13.5, or 88, more than another one's is not told apart.
    """
    rng = np.random.default_rng(2)
    (gap,) = column_gaps(of_numbers(rng.normal(40, 5, 300), rng.normal(40 + value, 5, 300)))[0]
    assert (gap.marked, gap.answer) == (False, "cannot tell")
    assert "center and scale" in gap.unknown
    (gap,) = column_gaps(of_numbers(rng.normal(0, 2, 300), rng.normal(value, 5, 300)))[0]
    assert gap.marked
    assert "at least" in gap.what


NAMES = {"height": (169, 10), "radius": (14, 3), "creatinine": (1, 0.3), "lambda": (9, 1)}


@pytest.mark.parametrize(
    ("changed", "hints"),
    [
        ({"radius": lambda x: x["radius"] / 2.54}, {"radius": "divided by 2.54: inches and cm?"}),
        ({"height": lambda x: x["height"] / 2.54}, {"height": "another unit?"}),
        (
            {"creatinine": lambda x: x["creatinine"] * 88.4},
            {"creatinine": "times 88.4: creatinine in mg/dL and µmol/L?"},
        ),
        (
            {"radius": lambda x: x["lambda"], "lambda": lambda x: x["radius"]},
            {"radius": "exchanged with lambda?", "lambda": "exchanged with radius?"},
        ),
        ({"height": lambda x: x["height"] + 5}, {"height": ""}),
    ],
)
@pytest.mark.parametrize("epsilon", [None, 4.0])
def test_a_cause_that_would_explain_a_marked_column_is_named(changed, hints, epsilon):
    rng = np.random.default_rng(9)
    columns = tuple(Column(name, center=c, scale=s) for name, (c, s) in NAMES.items())
    pair = []
    for change in (changed, {}):
        x = {name: rng.normal(center, scale, 2000) for name, (center, scale) in NAMES.items()}
        values = x | {name: make(x) for name, make in change.items()}
        made = site(columns, [part((values[c.name] - c.center) / c.scale) for c in columns])
        pair.append(made if epsilon is None else made.privatize(epsilon, rng=rng))
    gaps = {gap.column: gap for gap in column_gaps(pair)[0]}
    assert {name: gap.hint for name, gap in gaps.items() if gap.marked} == hints
    assert not any(gap.hint for gap in gaps.values() if not gap.marked)


def test_files_and_sums_keep_the_columns():
    rng = np.random.default_rng(6)
    a, b = usual(rng, 50), usual(rng, 70)
    assert RaceSketch.from_bytes(a.to_bytes()) == a
    assert ((a + b).marginals.counts == a.marginals.counts + b.marginals.counts).all()
    with pytest.raises(ValueError, match="share between 0 and 1"):
        a.privatize(1.0, explain=1.0)
    private = a.privatize(1.0, n="private", rng=rng)
    assert RaceSketch.from_bytes(private.to_bytes()) == private
    a.marginals.n = 51
    with pytest.raises(InvalidSketch, match="must each hold n=51"):
        RaceSketch.from_bytes(a.to_bytes())
    b.marginals = None
    with pytest.raises(ValueError, match="explain"):
        column_gaps([b, b])
