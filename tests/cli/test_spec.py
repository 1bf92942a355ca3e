"""``fedcohort spec``, ``sketch --spec`` and ``explain``, as data stewards use them."""

from __future__ import annotations

import io
import json
import re
import tomllib

import numpy as np
import pytest

from fedcohort.sketch.race import RaceSketch

SEX = '[columns.sex]\nkind = "category"\nlevels = ["f", "m"]\n'
SPEC = f"""
[sketch]
hash = "srp"
rows = 60
bits = 4
[missing]
null_values = ["-9"]
[columns.age]
kind = "number"
center = 50
scale = 10
{SEX}
[columns.visit]
kind = "date"
parts = ["yearday"]
"""
EXPLAIN = SPEC + "[privacy]\nexplain = 0.5\n"


def site(path, seed, older=0.0, n=300):
    rng = np.random.default_rng(seed)
    lines = ["patient_id,age,sex,visit,comment"]
    for i in range(n):
        age = "-9" if rng.random() < 0.05 else f"{rng.normal(50 + older, 10):.1f}"
        day = f"2020-{rng.integers(1, 13):02}-{rng.integers(1, 28):02}"
        lines.append(f"{1000 + i},{age},{'fm'[rng.integers(2)]},{day},free text number {i}")
    path.write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Four sites, of which d has older patients, and specs s and e."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SPEC)
    (tmp_path / "e.toml").write_text(EXPLAIN)
    for seed, name in enumerate(("a", "b", "c", "d")):
        site(tmp_path / f"{name}.csv", seed, older=12.0 * (name == "d"))
    return tmp_path


@pytest.fixture
def sketched(told):
    """Sketch sites by a spec; return the files, and what was printed."""

    def make(spec, *names, more=()):
        out = [f"{name}.sketch" for name in names]
        pairs = zip(names, out, strict=True)
        return out, "".join(
            told("sketch", f"{name}.csv", "--spec", spec, "-o", file, *more) for name, file in pairs
        )

    return make


def unwrapped(shown):
    """Facts, without what lays them out in cells."""
    return " ".join(shown.replace("│", " ").split())


def kinds(text):
    return dict(re.findall(r'\[columns\."(\w+)"\]\nkind = "(\w+)"', text))


def test_a_proposal_holds_types_and_roles_and_none_of_the_values(folder, told, fails):
    shown = told("spec", "init", "a.csv", "-o", "new.toml")
    assert "Fill in the public constants of age. " in shown
    text = (folder / "new.toml").read_text()
    assert '"patient_id" looks like an identifier' in text
    assert kinds(text) == {"age": "number", "sex": "category", "visit": "date", "comment": "text"}
    cells = {c for line in (folder / "a.csv").read_text().splitlines()[1:] for c in line.split(",")}
    body = text[text.index("[columns") :]
    assert not [cell for cell in cells if len(cell) > 2 and cell in body]
    line = fails("spec", "check", "a.csv", "--spec", "new.toml")
    assert "give center and scale, public constants, to the numbers age" in line
    assert "add --force" in fails("spec", "init", "a.csv", "-o", "new.toml")
    assert "this is an input" in fails("spec", "init", "a.csv", "-o", "a.csv", "--force")
    line = fails("spec", "init", "a.csv", "--label", "sex", "-o", "new.toml", "--force")
    assert "labels are whole numbers" in line


def test_a_proposal_knows_dates_that_excel_writes_and_categories_as_fractions(folder, told):
    rows = (f"{i},5;{1 + i % 28:02}.03.2021;{1 + i % 12}/7/2021;{i % 3}.0" for i in range(40))
    lines = "\r\n".join(["Alter;Tag;Day;kind", *rows])
    (folder / "e.csv").write_bytes(lines.encode("utf-8-sig"))
    told("spec", "init", "e.csv", "-o", "new.toml", "--csv=decimal=,")
    text = (folder / "new.toml").read_text()
    assert kinds(text) == {"Alter": "number", "Tag": "date", "Day": "date", "kind": "category"}
    assert 'format = "%d.%m.%Y"\n' in text
    assert 'format = "%d/%m/%Y"   # TODO: or %m/%d/%Y\n' in text


def test_a_site_is_told_what_does_not_fit(folder, told, fails):
    assert "patient_id, comment" in told("spec", "check", "a.csv", "--spec", "s.toml")
    (folder / "bad.csv").write_text("age,sex\n" + "old,f\n" * 3 + "50,x\n")
    line = fails("spec", "check", "bad.csv", "--spec", "s.toml")
    assert "no column 'visit'; there are age, sex" in line and "'old'" in line
    few = "age,sex,visit\n" + "20,X,2020-01-01\n" * 20 + "20,f,2020-01-01\n"
    (folder / "few.csv").write_text(few)
    shown = unwrapped(told("spec", "check", "few.csv", "--spec", "s.toml"))
    for fact in (
        "most values of 'sex' are none of its levels",
        "constant in all rows",
        "'age': the values lie 3 scales off",
        "Times 2.54 (inches and cm)",
    ):
        assert fact in shown


FULL = SPEC.replace("scale = 10\n", 'scale = 10\nmin = -3\nmax = 120\nunit = "years"\n')
LABEL = '[label]\ncolumn = "sex"\nclasses = 2\n'


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("", "no rows"),
        ("50,x,2020-01-01\n" * 9, "'sex'"),
        (",f,2020-01-01\n" * 9, "'age'"),
        ("50,f,2020-01-01\n" * 9 + "150,f,2020-01-01\n", "1 of 10 values of 'age' are above max"),
        ("-3,f,2020-01-01\n-4,f,2020-01-01\n" + "50,f,2020-01-01\n" * 9, "1 of 11 values"),
        ("18000,f,2020-01-01\n" * 9, "Times 0.002738 (years and days)"),
        ("50,f,2020-01-01\n51,?,2020-01-01\n", "--label takes whole numbers"),
        ("50,2,2020-01-01\n", "label 2: with 2 classes the last is 1"),
    ],
)
def test_what_cannot_be_right_does_not_fit(folder, fails, rows, problem):
    """A column 290 scales off, unknown codes only and a file with only a header fitted: yes."""
    (folder / "f.toml").write_text(FULL.replace(SEX, LABEL) if "label" in problem else FULL)
    (folder / "x.csv").write_text("age,sex,visit\n" + rows)
    assert problem in fails("spec", "check", "x.csv", "--spec", "f.toml")


def test_a_site_with_another_unit_and_another_name_joins(folder, told, fails, sketched):
    lines = (folder / "a.csv").read_text().replace("patient_id,age", "patient_id,Alter")
    (folder / "theirs.csv").write_text(lines.replace("-9", "unbekannt"))
    mapping = '[missing]\nnull_values = ["unbekannt"]\n[columns.age]\ncolumn = "Alter"\n'
    (folder / "site.toml").write_text(mapping)
    by_site = ["--spec", "s.toml", "--site", "site.toml"]
    told("spec", "check", "theirs.csv", *by_site)
    sketched("s.toml", "a")
    sketched("s.toml", "theirs", more=["--site", "site.toml"])
    assert RaceSketch.load("a.sketch") == RaceSketch.load("theirs.sketch")
    (folder / "site.toml").write_text(mapping.replace("age", "gender"))
    assert "'gender'" in fails("sketch", "theirs.csv", *by_site, "-o", "x.sketch")
    alone = ["--site", "site.toml", "--columns", "age", "-o", "x.sketch"]
    assert "--spec" in fails("sketch", "a.csv", *alone)


def test_sketches_by_one_spec_are_alike_and_say_so(folder, told, fails, sketched, monkeypatch):
    assert "missing values" in sketched("s.toml", "a", "b")[1]
    a, b = RaceSketch.load("a.sketch"), RaceSketch.load("b.sketch")
    a.check_alike(b)
    assert a.origin == b.origin != {}
    assert [c["name"] for c in a.columns] == ["age", "sex", "visit"]
    line = fails("sketch", "a.csv", "--spec", "s.toml", "--set=rows=9", "-o", "x.sketch")
    assert "--set and --spec" in line
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((folder / "a.csv").read_bytes())))
    told("sketch", "-", "--spec", "s.toml", "-o", "in.sketch")
    assert RaceSketch.load("in.sketch") == a
    (folder / "t.toml").write_text(SPEC.replace("center = 50", "center = 40"))
    sketched("t.toml", "c")
    line = fails("distance", "a.sketch", "c.sketch")
    assert "column 'age' center: 50.0 is not 40.0" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[colums.age]", "unknown section 'colums'"),
        ("[columns.z]\nkin = 1", "unknown option 'kin'"),
        ("[columns.z]\nkind = 'color'", "kind='color'"),
        ("[privacy]\nepsilon = 'much'", "epsilon"),
        ("[label]\ncolumn = 'y'", "--label and --classes go together"),
        ("[missing", "not TOML"),
        ("a." * 40 + "b = 1", "a key of more than"),
    ],
)
def test_mistakes_in_a_spec_are_named(folder, fails, change, message):
    (folder / "w.toml").write_text(SPEC + change)
    assert message in fails("sketch", "a.csv", "--spec", "w.toml", "-o", "x.sketch")


def test_the_column_that_differs_is_named(folder, told, sketched):
    privacy = "epsilon = 4\ndelta = 1e-6\n"
    (folder / "p.toml").write_text(EXPLAIN.replace("rows = 60\nbits = 4\n", "") + privacy)
    for name in "abcd":
        budget = ["--budget", f"{name}.json", "--budget-epsilon", 4, "--budget-delta", 1e-6]
        sketched("p.toml", name, more=budget)
    assert json.loads((folder / "a.json").read_text())["spent"]["epsilon"] == 4
    profile = ["profile", "a.sketch", "b.sketch", "-o", "p.html"]
    claim = "epsilon=4, delta=.*joint counts .*(laplace|gaussian) noise on 3 single"
    for command in (["inspect", "a.sketch"], profile):  # before: epsilon and Laplace only
        assert re.search(claim, unwrapped(told(*command)))
    gaps = told("explain", *(f"{name}.sketch" for name in "abcd"), "--format", "json")
    marked = {k: [g["column"] for g in of_site if g["marked"]] for k, of_site in gaps.items()}
    assert marked == {f"{name} against the rest": ["age"] * (name == "d") for name in "abcd"}
    assert re.search("d against a .*higher", told("explain", "d.sketch", "a.sketch"))
    shown = told("explain", "b.sketch", "c.sketch")
    assert "No column differs" in shown
    assert re.search(r"about [1-9]\d% of the records or more are marked", shown)
    (folder / "n.toml").write_text(EXPLAIN.replace("0.5", "0.01") + "epsilon = 0.8\n")
    sketched("n.toml", "b", "c", more=["--force"])
    shown = told("explain", "b.sketch", "c.sketch")
    assert "No column differs" not in shown
    assert "Cannot tell: of so few records, or under so much noise" in shown


def test_without_constants_the_answer_is_cannot_tell(folder, told):
    for name in "ad":
        options = ["--columns", "age", "--null-values=-9", "--set=explain=0.5", "--nulls", "drop"]
        assert "one bucket" in told("sketch", f"{name}.csv", "-o", f"{name}.sketch", *options)
    assert "Cannot tell whether age differs" in told("explain", "a.sketch", "d.sketch")


def test_sketches_that_cannot_tell_anything_apart_warn(folder, told):
    def said(*options):
        return told("sketch", "two.csv", "-o", "two", "--force", *options)

    lines = "".join(f"{1000 + i % 7},{1000 + i % 5},{i % 9 / 1e3}\n" for i in range(50))
    (folder / "two.csv").write_text("a,b,c\n" + lines)
    assert re.search("one bucket.*center=.*pstable", said("--columns", "a,b"))
    assert "one bucket" not in said("--columns", "a,b", "--set=center=1003")
    shown = said()
    assert "vary by less than 0.2 scales, so what differs there hardly counts" in shown
    assert "a varies more than 100 times as much, so these columns hardly count" in shown
    (folder / "two").unlink()
    assert "1000, 1001, 1002, 1003, 1004: most records" in said("--columns", "a,c", "--by", "b")
    profile = unwrapped(told("profile", "two", "-o", "p.html", "--cohort-size", 0))
    assert "Nearly all records fall into one bucket" in profile
    assert "The columns have neither center nor scale" in profile


def test_copied_data_are_named_and_copies_are_no_evidence(folder, told, sketched):
    """Rows that were there three times made chance three times surer: two columns were marked."""
    header, *rows = (folder / "a.csv").read_text().splitlines()
    (folder / "twin.csv").write_text("\n".join([header, *sorted(rows)]))
    site(folder / "few.csv", 9, n=40)
    few = (folder / "few.csv").read_text().splitlines()
    (folder / "often.csv").write_text("\n".join([header, *few[1:] * 30]))
    files, shown = sketched("e.toml", "a", "twin", "b", "c")
    assert "times" not in shown
    often, shown = sketched("e.toml", "often")
    assert "30 times" in shown
    for command in (["explain"], ["distance"], ["profile", "-o", "p.html"]):
        shown = unwrapped(told(*command, *files, *often))
        assert "The sketches of a, twin are equal" in shown
        assert "record of often seems to be there 30 times" in shown
        assert command != ["explain"] or "No column differs" in shown
    shown = told("spec", "check", "often.csv", "--spec", "e.toml")
    assert "1,160 of 1,200 equal an earlier one" in shown
    (folder / "flag.csv").write_text("flag\n" + "0\n" * 200 + "1\n" * 100)
    shown = told("sketch", "flag.csv", "-o", "flag.sketch", "--set=center=0.5")
    assert "times" not in shown  # two values: all counts are 100 or 200


def test_a_tiny_site_is_left_out_by_name_and_the_others_are_explained(folder, told, sketched):
    (folder / "tiny.csv").write_text("age,sex,visit\n50,f,2020-01-01\n51,m,2020-01-02\n")
    files, _ = sketched("e.toml", "a", "b", "c", "d", "tiny")
    assert "left out: tiny" in told("explain", *files)
    gaps = told("explain", *files, "--format", "json")
    assert list(gaps) == [f"{name} against the rest" for name in "abcd"]
    distance = ["distance", "a.sketch", "tiny.sketch"]
    assert "have no distance: tiny" in told(*distance)  # "0.0000" was an all-clear
    assert told(*distance, "--format", "json")["distances"][0] == [0.0, None]


def test_centers_and_scales_can_be_estimated_privately(folder, told, fails, monkeypatch):
    site(folder / "big.csv", 5, n=4000)
    paid = ["spec", "init", "big.csv", "-o", "new.toml", "--null-values", "-9"]
    paid += ["--bounds", "age=0:120", "--epsilon", 0.5, "--budget", "b.json"]
    paid += ["--budget-epsilon", 0.8]
    with monkeypatch.context() as patch:  # the spec cannot be written: what was paid for is kept
        patch.setattr("fedcohort.storage.write_atomically", _disk_full)
        assert "No space left" in fails(*paid)
    assert "epsilon=0.5 for adding or removing one record" in told(*paid)
    spec = tomllib.loads((folder / "new.toml").read_text())
    assert spec["missing"]["null_values"] == ["-9"]
    age = spec["columns"]["age"]
    assert age["center"] == pytest.approx(50, abs=2)  # 30 records of 4,000 are 0.25 years
    assert age["scale"] == pytest.approx(10, rel=0.2)
    account = json.loads((folder / "b.json").read_text())["spent"]
    assert (account["epsilon"], account["releases"]) == (0.5, 1)
    assert "epsilon=0.5 of 0.8 is spent" in fails(*paid, "--force")


def _disk_full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("values", [12, 13])
def test_with_epsilon_a_proposal_does_not_depend_on_other_columns(folder, told, values):
    """12 or 13 different values made a column a category or a number."""
    (folder / "x.csv").write_text("u,v\n" + "".join(f"{i},{i % values}\n" for i in range(99)))
    options = ["--bounds", "u=0:100", "--epsilon", 1, "-o", "new.toml"]
    told("spec", "init", "x.csv", *options)
    text = (folder / "new.toml").read_text()
    assert kinds(text) == {"u": "number"}
    assert '# [columns."v"]   # TODO: its kind' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", 1], "--epsilon needs --bounds"),
        (["--bounds", "age=0:120"], "need --epsilon"),
        (["--bounds", "age=0-120", "--epsilon", 1], "write NAME=LOW:HIGH"),
        (["--bounds", "age=120:0", "--epsilon", 1], "low must be below high"),
        (["--bounds", "weight=0:200", "--epsilon", 1], "no column 'weight'"),
        (["--bounds", "sex=0:1", "--epsilon", 1], "sex"),
        (["--bounds", "age=0:120", "--epsilon", 99], "must be from 0.00001 to 8"),
    ],
)
def test_mistakes_in_an_estimation_are_named(folder, fails, options, message):
    assert message in fails("spec", "init", "a.csv", "-o", "new.toml", *options)
    assert not (folder / "new.toml").exists()
