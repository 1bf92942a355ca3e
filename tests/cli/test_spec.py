"""``fedcohort spec``, ``sketch --spec`` and ``explain``, as data stewards use them."""

from __future__ import annotations

import io
import json
import re
import tomllib

import numpy as np
import pytest

from fedcohort.cli import invoke
from fedcohort.sketch.race import RaceSketch

SPEC = """
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

[columns.sex]
kind = "category"
levels = ["f", "m"]

[columns.visit]
kind = "date"
parts = ["yearday"]
"""


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
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SPEC)
    for seed, name in enumerate(("a", "b", "c", "d")):
        site(tmp_path / f"{name}.csv", seed, older=12.0 * (name == "d"))
    return tmp_path


def run(*arguments):
    return invoke([str(a) for a in arguments])


def fails(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 2
    return capsys.readouterr().err


def test_a_proposal_holds_types_and_roles_and_none_of_the_values(folder, capsys):
    assert run("spec", "init", "a.csv", "-o", "new.toml") == 0
    text = (folder / "new.toml").read_text()
    assert '"patient_id" looks like an identifier' in text
    roles = dict(re.findall(r'\[columns\."(\w+)"\]\nkind = "(\w+)"', text))
    assert roles == {"age": "number", "sex": "category", "visit": "date", "comment": "text"}
    cells = {c for line in (folder / "a.csv").read_text().splitlines()[1:] for c in line.split(",")}
    body = text[text.index("[columns") :]
    assert not [cell for cell in cells if len(cell) > 2 and cell in body]
    assert "give center and scale, public constants, to the numbers age" in fails(
        capsys, "spec", "check", "a.csv", "--spec", "new.toml"
    )
    assert "add --force" in fails(capsys, "spec", "init", "a.csv", "-o", "new.toml")
    assert "this is an input" in fails(capsys, "spec", "init", "a.csv", "-o", "a.csv", "--force")


def test_a_site_is_told_what_does_not_fit(folder, capsys):
    assert run("spec", "check", "a.csv", "--spec", "s.toml") == 0
    assert "patient_id, comment" in capsys.readouterr().out
    (folder / "bad.csv").write_text("age,sex\n" + "old,f\n" * 3 + "50,x\n")
    line = fails(capsys, "spec", "check", "bad.csv", "--spec", "s.toml")
    assert "column 'visit' is missing" in line
    assert "'old'" in line
    (folder / "few.csv").write_text(
        "age,sex,visit\n" + "50,X,2020-01-01\n" * 20 + "51,f,2020-01-01\n"
    )
    assert run("spec", "check", "few.csv", "--spec", "s.toml") == 0
    shown = capsys.readouterr().out
    assert "most values of 'sex' are none of its levels" in shown
    assert "constant in all rows" in shown


def test_sketches_by_one_spec_are_alike_and_say_so(folder, capsys):
    for name in "ab":
        made = ["--spec", "s.toml", "-o", f"{name}.sketch"]
        assert run("sketch", f"{name}.csv", *made) == 0
    a, b = RaceSketch.load("a.sketch"), RaceSketch.load("b.sketch")
    a.check_alike(b)
    assert a.origin == b.origin != {}
    assert [c["name"] for c in a.columns] == ["age", "sex", "visit"]
    assert "missing values" in capsys.readouterr().out
    line = fails(capsys, "sketch", "a.csv", "--spec", "s.toml", "--set=rows=9", "-o", "x.sketch")
    assert "--set and --spec" in line
    (folder / "t.toml").write_text(SPEC.replace("center = 50", "center = 40"))
    assert run("sketch", "b.csv", "--spec", "t.toml", "-o", "t.sketch") == 0
    assert "column 'age' center: 50.0 is not 40.0" in fails(
        capsys, "distance", "a.sketch", "t.sketch"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[colums.age]", "unknown section 'colums'"),
        ("[columns.z]\nkin = 1", "unknown option 'kin'"),
        ("[columns.z]\nkind = 'color'", "kind='color'"),
        ("[privacy]\nepsilon = 'much'", "epsilon"),
        ("[privacy]\nepsilons = 1", "unknown option 'epsilons' of [privacy]"),
        ("[label]\ncolumn = 'y'", "--label and --classes go together"),
        ("[missing", "not TOML"),
        ("a." * 40 + "b = 1", "a key of more than"),
    ],
)
def test_mistakes_in_a_spec_are_named(folder, capsys, change, message):
    (folder / "w.toml").write_text(SPEC.replace('[missing]\nnull_values = ["-9"]\n', "") + change)
    line = fails(capsys, "sketch", "a.csv", "--spec", "w.toml", "-o", "x.sketch")
    assert message in line
    assert line.count("\n") == 1


def test_the_column_that_differs_is_named(folder, capsys):
    privacy = "[privacy]\nexplain = 0.5\nepsilon = 4\n"
    (folder / "e.toml").write_text(SPEC.replace("rows = 60\nbits = 4\n", "") + privacy)
    for name in "abcd":
        made = ["--spec", "e.toml", "-o", f"{name}.sketch"]
        assert (
            run("sketch", f"{name}.csv", *made, "--budget", f"{name}.json", "--budget-epsilon", 4)
            == 0
        )
    assert "noise on 3 single columns" in capsys.readouterr().out
    assert json.loads((folder / "a.json").read_text())["spent"]["epsilon"] == 4
    files = [f"{name}.sketch" for name in "abcd"]
    assert run("explain", *files, "--format", "json") == 0
    gaps = json.loads(capsys.readouterr().out)
    marked = {k: [g["column"] for g in of_site if g["marked"]] for k, of_site in gaps.items()}
    assert marked == {f"{name} and the rest": ["age"] * (name == "d") for name in "abcd"}
    assert run("explain", "a.sketch", "d.sketch") == 0
    assert "higher" in (shown := capsys.readouterr().out) or "lower" in shown
    assert run("explain", "b.sketch", "c.sketch") == 0
    assert "No column differs" in capsys.readouterr().out


def test_sketches_that_cannot_tell_anything_apart_warn(folder, capsys):
    ages = "\n".join(str(30 + i % 40) for i in range(50))
    (folder / "one.csv").write_text(f"age\n{ages}\n")
    assert run("sketch", "one.csv", "-o", "one.sketch") == 0
    said = capsys.readouterr().err
    assert "one bucket" in said
    assert "pstable" in said
    pairs = "\n".join(f"{1000 + i % 7},{1000 + i % 5}" for i in range(50))
    (folder / "two.csv").write_text(f"a,b\n{pairs}\n")
    assert run("sketch", "two.csv", "-o", "two.sketch") == 0
    assert "center=" in capsys.readouterr().err
    assert run("sketch", "two.csv", "-o", "ok.sketch", "--set=center=1003") == 0
    assert "one bucket" not in capsys.readouterr().err
    assert run("sketch", "two.csv", "-o", "by", "--columns", "b", "--by", "a") == 0
    assert "one bucket" not in capsys.readouterr().err  # 7 records each are too few to say
    assert run("sketch", "two.csv", "-o", "by", "--columns", "a", "--by", "b", "--force") == 0
    assert "1000, 1001, 1002, 1003, 1004: most records fall into one" in capsys.readouterr().err
    (folder / "milli.csv").write_text(
        "a,b\n" + "".join(f"{i % 9 / 1e3},{i % 7}\n" for i in range(63))
    )
    assert run("sketch", "milli.csv", "-o", "milli.sketch") == 0
    assert "vary by less than 0.2 scales, so what differs there hardly" in capsys.readouterr().err


def test_centers_and_scales_can_be_estimated_privately(folder, capsys, monkeypatch):
    site(folder / "big.csv", 5, n=4000)
    asked = ["spec", "init", "big.csv", "-o", "new.toml", "--null-values", "-9"]
    paid = [*asked, "--bounds", "age=0:120", "--epsilon", 0.5]
    paid += ["--budget", "b.json", "--budget-epsilon", 0.8]
    with monkeypatch.context() as patch:  # the spec cannot be written: what was paid for is kept
        patch.setattr("fedcohort.storage.write_atomically", _disk_full)
        assert "No space left" in fails(capsys, *paid)
    assert run(*paid) == 0
    assert "epsilon=0.5 for adding or removing one record" in capsys.readouterr().out
    spec = tomllib.loads((folder / "new.toml").read_text())
    assert spec["missing"]["null_values"] == ["-9"]
    age = spec["columns"]["age"]
    assert age["center"] == pytest.approx(50, abs=2)  # 30 records of 4,000 are 0.25 years
    assert age["scale"] == pytest.approx(10, rel=0.2)
    account = json.loads((folder / "b.json").read_text())["spent"]
    assert (account["epsilon"], account["releases"]) == (0.5, 1)
    assert "epsilon=0.5 of 0.8 is spent" in fails(capsys, *paid, "--force")


def _disk_full(*_):
    raise OSError(28, "No space left on device")


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
        (["--bounds", "age=0:120", "--epsilon", 1, "--budget", "b.json"], "--budget-epsilon"),
        (["--budget", "b.json", "--budget-epsilon", 1], "need --epsilon"),
    ],
)
def test_mistakes_in_an_estimation_are_named(folder, capsys, options, message):
    line = fails(capsys, "spec", "init", "a.csv", "-o", "new.toml", *options)
    assert message in line
    assert not (folder / "new.toml").exists()


LABEL = '[label]\ncolumn = "sex"\nclasses = 2\n'
FULL = SPEC.replace("scale = 10\n", 'scale = 10\nmin = -3\nmax = 120\nunit = "years"\n')


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
def test_what_cannot_be_right_does_not_fit(folder, capsys, rows, problem):
    """A column 290 scales off, unknown codes only and a file with only a header fitted: yes."""
    label = FULL.replace('[columns.sex]\nkind = "category"\nlevels = ["f", "m"]\n', LABEL)
    (folder / "f.toml").write_text(label if "label" in problem else FULL)
    (folder / "x.csv").write_text("age,sex,visit\n" + rows)
    assert problem in fails(capsys, "spec", "check", "x.csv", "--spec", "f.toml")


def test_a_site_with_another_unit_and_another_name_joins(folder, capsys):
    lines = (folder / "a.csv").read_text().replace("patient_id,age", "patient_id,Alter")
    (folder / "theirs.csv").write_text(lines.replace("-9", "unbekannt"))
    site = '[missing]\nnull_values = ["unbekannt"]\n[columns.age]\ncolumn = "Alter"\n'
    (folder / "site.toml").write_text(site)
    by_site = ["--spec", "s.toml", "--site", "site.toml"]
    assert run("spec", "check", "theirs.csv", *by_site) == 0
    assert run("sketch", "theirs.csv", *by_site, "-o", "theirs.sketch") == 0
    assert run("sketch", "a.csv", "--spec", "s.toml", "-o", "a.sketch") == 0
    assert RaceSketch.load("a.sketch") == RaceSketch.load("theirs.sketch")
    (folder / "site.toml").write_text(site.replace("age", "gender"))
    assert "'gender'" in fails(capsys, "sketch", "theirs.csv", *by_site, "-o", "x.sketch")
    alone = ["--site", "site.toml", "--columns", "age", "-o", "x.sketch"]
    assert "--spec" in fails(capsys, "sketch", "a.csv", *alone)


def test_dates_that_excel_writes_are_proposed_with_their_format(folder):
    lines = "\r\n".join(
        f"{40 + i},5;{1 + i % 28:02}.03.2021;{1 + i % 12}/7/2021" for i in range(40)
    )
    (folder / "e.csv").write_bytes(f"Alter;Tag;Day\r\n{lines}\r\n".encode("utf-8-sig"))
    assert run("spec", "init", "e.csv", "-o", "e.toml") == 0
    text = (folder / "e.toml").read_text()
    assert 'format = "%d.%m.%Y"\n' in text
    assert 'format = "%d/%m/%Y"   # TODO: or %m/%d/%Y\n' in text


def test_categories_written_as_fractions_are_proposed_as_such(folder, capsys):
    rows = "".join(f"{i % 3}.0,{'' if i % 5 else 1.0},{i / 7}\n" for i in range(40))
    (folder / "f.csv").write_text("kind,flag,size\n" + rows)
    assert run("spec", "init", "f.csv", "-o", "f.toml") == 0
    text = (folder / "f.toml").read_text()
    assert dict(re.findall(r'\[columns\."(\w+)"\]\nkind = "(\w+)"', text)) == {
        "kind": "category",
        "flag": "category",
        "size": "number",
    }
    assert "constants of size" in capsys.readouterr().out


def test_standard_input_is_a_csv(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((folder / "a.csv").read_bytes())))
    assert run("sketch", "-", "--spec", "s.toml", "-o", "in.sketch") == 0
    assert run("sketch", "a.csv", "--spec", "s.toml", "-o", "a.sketch") == 0
    assert RaceSketch.load("in.sketch") == RaceSketch.load("a.sketch")


def test_copied_data_are_named_and_copies_are_no_evidence(folder, capsys):
    """Rows that were there three times made chance three times surer: two columns were marked."""
    (folder / "e.toml").write_text(SPEC + "[privacy]\nexplain = 0.5\n")
    header, *rows = (folder / "a.csv").read_text().splitlines()
    (folder / "twin.csv").write_text("\n".join([header, *sorted(rows)]))
    site(folder / "few.csv", 9, n=40)
    few = (folder / "few.csv").read_text().splitlines()
    (folder / "often.csv").write_text("\n".join([header, *few[1:] * 30]))
    names = ["a", "twin", "b", "c", "often"]
    for name in names:
        assert run("sketch", f"{name}.csv", "--spec", "e.toml", "-o", f"{name}.sketch") == 0
        assert ("30 times" in capsys.readouterr().err) == (name == "often")
    for command in (["explain"], ["distance"], ["profile", "-o", "p.html"]):
        assert run(*command, *(f"{name}.sketch" for name in names)) == 0
        shown = capsys.readouterr()
        told = shown.out if command[0] == "profile" else shown.err
        assert "The sketches of a, twin are equal" in told
        assert "record of often seems to be there 30 times" in told
        assert command != ["explain"] or "No column differs" in shown.out
    assert run("spec", "check", "often.csv", "--spec", "e.toml") == 0
    assert "1,160 of 1,200 equal an earlier one" in capsys.readouterr().out
    (folder / "flag.csv").write_text("flag\n" + "0\n" * 200 + "1\n" * 100)
    assert run("sketch", "flag.csv", "-o", "flag.sketch", "--set=center=0.5") == 0
    assert "times" not in capsys.readouterr().err  # two values: all counts are 100 or 200


def test_a_tiny_site_is_left_out_by_name_and_the_others_are_explained(folder, capsys):
    (folder / "e.toml").write_text(SPEC + "[privacy]\nexplain = 0.5\n")
    (folder / "tiny.csv").write_text("age,sex,visit\n50,f,2020-01-01\n51,m,2020-01-02\n")
    names = ["a", "b", "c", "d", "tiny"]
    for name in names:
        assert run("sketch", f"{name}.csv", "--spec", "e.toml", "-o", f"{name}.sketch") == 0
    capsys.readouterr()
    assert run("explain", *(f"{name}.sketch" for name in names), "--format", "json") == 0
    shown = capsys.readouterr()
    assert "left out: tiny" in shown.err
    assert run("distance", "a.sketch", "tiny.sketch", "--format", "json") == 0
    shown_distance = capsys.readouterr()
    assert "have no distance: tiny" in shown_distance.err  # "0.0000" was an all-clear
    assert json.loads(shown_distance.out)["distances"][0] == [0.0, None]
    found = json.loads(shown.out)
    assert list(found) == [f"{name} and the rest" for name in "abcd"]
    assert [g["column"] for g in found["d and the rest"] if g["marked"]] == ["age"]
