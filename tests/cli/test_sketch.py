"""``fedcohort sketch``, ``distance``, ``inspect`` and ``merge``: what they do and what they say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv_writer
import pyarrow.parquet as pq
import pytest

from fedcohort.files.columns import Column, columns_of
from fedcohort.privacy.release import sketch_size
from fedcohort.sketch.distances import distance_matrix
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform
from fedcohort.sketch.uncertainty import distance_with_error, total_variation

X = np.random.default_rng(0).normal(size=(120, 3)) + 1
WHO = np.array(["north", "south", "../../x", "North"])[np.arange(120) % 4]


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = {name: X[:, i] for i, name in enumerate(("u", "v", "w"))}
    more = {"who": WHO, "y": np.arange(120) % 3, "note": ["to be or not"] * 120}
    pq.write_table(pa.table({**columns, **more}), "data.parquet")
    return "data.parquet"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Three sketches, in files a, b and c."""
    monkeypatch.chdir(tmp_path)
    made = [RaceSketch.srp(3, rows=20, bits=4) for _ in range(3)]
    for name, sketch, shift in zip("abc", made, (0.0, 2.0, 0.1), strict=True):
        sketch.add(X + shift)
        sketch.save(f"{name}.sketch")
    return made


def test_a_sketch_of_columns_equals_the_library_s(table, told):
    options = ["--columns", "w,u", "--set=rows=30", "--set=bits=4"]
    assert "none: exact counts" in told("sketch", table, "-o", "a.sketch", *options)
    own = RaceSketch.srp(2, rows=30, bits=4)
    own.columns = Column("w").spec(), Column("u").spec()
    own.add(X[:, [2, 0]])
    assert RaceSketch.load("a.sketch") == own


def test_labels_constants_and_pstable(table, told):
    options = ["--columns", "u,v", "--set=center=1", "--set=scale=2", "--set=rows=10"]
    told("sketch", table, "-o", "a.sketch", *options, "--label", "y", "--classes", 3)
    loaded = RaceSketch.load("a.sketch")
    assert columns_of(loaded) == (Column("u", center=1, scale=2), Column("v", center=1, scale=2))
    made = loaded.transform
    assert made == Transform(unit=True, classes=3, label_weight=1.0)
    same = RaceSketch.srp(2, rows=10, bits=6, transform=replace(made, center=1, scale=2))
    same.add(X[:, :2], np.arange(120) % 3)
    assert np.array_equal(loaded.counts, same.counts)
    pstable = ["--set=hash=pstable", "--set=width=3", "--set=buckets=32", "--set=seed=7"]
    told("sketch", table, "-o", "b.sketch", "--columns", "u", *pstable)
    stated = RaceSketch.load("b.sketch").spec["hash"]
    assert stated | {"name": "pstable", "width": 3.0, "seed": 7, "buckets": 32} == stated


def test_texts(table, tmp_path, told):
    (tmp_path / "lines.txt").write_text("to be\nor not\n")
    options = ["--set=analyzer=char", "--set=ngrams=[2,3]"]
    told("sketch", "lines.txt", "-o", "a.sketch", *options)
    own = RaceSketch.minhash(rows=200, buckets=64, transform=Tokenizer("char", (2, 3)))
    own.add(["to be", "or not"])
    assert RaceSketch.load("a.sketch") == own
    told("sketch", table, "-o", "b.sketch", "--text", "note")
    assert RaceSketch.load("b.sketch").transform == Tokenizer()


def test_one_sketch_a_client_and_hostile_names_stay_in_the_folder(table, tmp_path, told):
    options = ["--columns", "u,v,w", "--set=rows=10", "--format", "json"]
    result = told("sketch", table, "-o", "out/sites", "--by", "who", *options)
    assert {s["client"] for s in result["sketches"]} == set(WHO)
    files = {p.name.lower() for p in (tmp_path / "out" / "sites").iterdir()}
    assert len(files) == 5  # four sketches and the index, even where case is ignored
    assert not list(tmp_path.parent.glob("x*.sketch"))
    for made in result["sketches"]:
        sketch = RaceSketch.load(made["file"])
        own = sketch.empty_like()
        own.add(X[made["client"] == WHO])
        assert sketch == own
    distances = told("distance", "out/sites", "--format", "json")
    assert sorted(distances["clients"]) == sorted(set(WHO))


@pytest.mark.parametrize("client", ["", "a\ud800"])
def test_ids_that_are_not_names_are_refused_before_anything_is_written(tmp_path, fails, client):
    np.savez(tmp_path / "x.npz", x=np.eye(4), who=np.array(["b", client, "b", client]))
    command = ["sketch", tmp_path / "x.npz", "--columns", "x", "--by", "who", "-o", tmp_path / "o"]
    assert "client id" in fails(*command)
    assert list(tmp_path.rglob("*.sketch")) == []


@pytest.mark.parametrize(("expect", "epsilon", "noisy"), [(100, 8.0, False), (50, 0.1, True)])
def test_a_private_sketch_is_planned_for_a_public_number(table, told, expect, epsilon, noisy):
    options = ["--columns", "u,v,w", "--set=n=private", "--set=neighbors=replace"]
    options += ["--epsilon", epsilon, f"--set=expect={expect}"]
    shown = told("sketch", table, "-o", "a.sketch", *options)
    assert ("noise exceeds the signal" in shown) == noisy
    made = RaceSketch.load("a.sketch")
    wanted = sketch_size(expect, epsilon, dim=3, neighbors="replace")
    assert (made.rows, made.buckets) == (wanted.rows, 2**wanted.bits)
    release = made.release
    assert (release.epsilon, release.neighbors, release.n) == (epsilon, "replace", "private")
    header = told("inspect", "a.sketch", "--format", "json")
    assert header["release"]["mechanism"] == "laplace"
    assert (header["signal_to_noise"] < 1) == noisy


def test_one_ledger_pays_for_the_same_records_again_in_every_disguise(table, tmp_path, told, fails):
    """By client and as a whole, cut, shuffled, in another format, with other columns or seeds."""
    spend = ["sketch", "--epsilon", "1", "--budget", "ledger.json", "--columns", "u,v"]
    told(*spend, table, "--by", "who", "-o", "sites", "--budget-epsilon", 1.5)
    held = json.loads((tmp_path / "ledger.json").read_text())
    assert held["spent"]["epsilon"] == 1  # every record is with one client: paid for once
    shuffled = pq.read_table(table).take(np.random.default_rng(0).permutation(120))
    csv_writer.write_csv(shuffled, "copy.csv")
    pq.write_table(pq.read_table(table).slice(0, 60), "half.parquet")
    for again in ([table], [table, "--set=seed=5"], ["copy.csv"], ["half.parquet"]):
        assert "is spent" in fails(*spend, *again, "-o", "again.sketch")


def test_with_epsilon_the_data_do_not_choose_the_columns(tmp_path, monkeypatch, told, fails):
    """A text in one record took its column away, so that the headers told two tables apart."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("u,v\n" + "1,2\n3,4\n" * 9)
    private = ["--epsilon", 1, "--set=n=private", "-o", "a.sketch"]
    assert "--columns" in fails("sketch", "a.csv", *private)
    told("sketch", "a.csv", "--columns", "u,v", *private)


def test_inputs_are_never_replaced_and_other_files_only_by_force(table, tmp_path, told, fails):
    before = (tmp_path / table).read_bytes()
    (tmp_path / "link.sketch").symlink_to(tmp_path / table)
    for out in (table, "./data.parquet", "link.sketch"):
        assert "this is an input" in fails("sketch", table, "-o", out, "--force")
    assert (tmp_path / table).read_bytes() == before
    told("sketch", table, "-o", "a.sketch", "--set=rows=3")
    assert "add --force" in fails("sketch", table, "-o", "a.sketch", "--set=rows=4")
    assert RaceSketch.load("a.sketch").rows == 3
    told("sketch", table, "-o", "a.sketch", "--set=rows=4", "--force")
    assert RaceSketch.load("a.sketch").rows == 4


def test_a_folder_of_sketches_is_replaced_as_a_whole_or_not_at_all(table, tmp_path, told, fails):
    many, options = tmp_path / "many", ["--columns", "u,v,w", "--set=rows=5", "--by"]
    told("sketch", table, "-o", "many", *options, "who")
    assert "holds 5 sketches" in fails("sketch", table, "-o", "many", *options, "note")
    assert len(list(many.glob("*.sketch"))) == 4
    (many / "notes.txt").write_text("mine")
    told("sketch", table, "-o", "many", *options, "note", "--force")
    assert len(list(many.glob("*.sketch"))) == 1
    assert (many / "notes.txt").exists()
    next(many.glob("*.sketch")).rename(many / "moved.sketch")
    assert "not complete" in fails("distance", "many")


def test_a_merged_sketch_is_not_counted_again(pair, tmp_path, told, fails):
    (tmp_path / "sites").mkdir()
    for name in "abc":
        (tmp_path / f"{name}.sketch").rename(tmp_path / "sites" / f"{name}.sketch")
    told("merge", "sites", "-o", "sites/all.sketch")
    told("merge", "sites", "-o", "sites/all.sketch", "--force")
    assert RaceSketch.load("sites/all.sketch") == pair[0] + pair[1] + pair[2]
    assert told("distance", "sites", "--format", "json")["clients"] == ["a", "b", "c"]
    assert "this is an input" in fails("merge", "sites", "-o", "sites/a.sketch", "--force")


def test_distances_and_their_errors_are_the_library_s(pair, told):
    def distances(*options):
        return told("distance", "a.sketch", "b.sketch", "c.sketch", *options)

    result = distances("--format", "json")
    assert np.allclose(result["distances"], distance_matrix(pair))
    result = distances("--errors", "--kind", "mmd", "--format", "json")
    value, error = distance_with_error(pair[0], pair[1], "mmd")
    assert result["distances"][0][1] == pytest.approx(value)
    assert result["errors"][1][0] == pytest.approx(error)
    value, low, high = total_variation(pair[0], pair[1])
    result = distances("--kind", "total-variation", "--format", "json")
    assert (result["distances"][1][0], result["intervals"][0][1]) == (value, [low, high])
    assert f"{value:.2f} ({low:.2f} to {high:.2f})" in distances("--kind", "total-variation")


def test_a_folder_is_as_much_work_as_its_files(pair, told, monkeypatch):
    """It counted as one file, of which 3 were read."""
    monkeypatch.setattr("fedcohort.progress.PATIENCE", 0)
    assert "reading sketches: 3 of 3" in told("distance", ".")


def test_a_wide_matrix_is_not_cut(pair, told):
    for i in range(30):
        pair[0].save(f"site-number-{i}.sketch")
    shown = told("distance", ".")
    assert "…" not in shown
    assert len(set(re.findall(r"site-number-\d+ +0\.", shown))) == 30


def test_inspect_and_merge(pair, told, fails):
    assert "srp, 20 rows of 16 buckets" in told("inspect", "a.sketch")
    header = told("inspect", "a.sketch", "--format", "json")
    assert (header["n"], header["release"]) == (120, None)
    for name, sketch in zip("pq", pair, strict=False):
        sketch.privatize(1.0).save(f"{name}.sketch")
    assert "2 sketches merged" in told("merge", "p.sketch", "q.sketch", "-o", "pq.sketch")
    line = fails("merge", "a.sketch", "p.sketch", "-o", "x.sketch")
    assert "p.sketch" in line and "private" in line


MISTAKES = {
    "data.parquet --set rows=0": ["rows=0 must be"],
    "data.parquet --label y": ["--label and --classes go together"],
    "data.parquet --columns u --label y --classes 2": ["labels must be whole numbers from 0 to 1"],
    "data.parquet --set buckets=4": ["buckets belongs to minhash"],
    "data.parquet --set hash=minhash --set center=1": ["for numbers"],
    "data.parquet --text note --set hash=srp": ["texts need hash=minhash"],
    "data.parquet --columns u --set center=1,2": ["center='1,2' must be a finite number"],
    "data.parquet --set delta=0.1": ["delta needs --epsilon"],
    "data.parquet --set n=private": ["n=private needs --epsilon"],
    "data.parquet --budget l.json --budget-epsilon 1": ["--budget needs --epsilon"],
    "data.parquet --budget-epsilon 1": ["--budget-epsilon needs --budget"],
    "data.parquet --columns u --epsilon 1 --budget l.json": ["a new ledger needs --budget-epsilon"],
    "data.parquet --columns u --epsilon 1 --budget part.json": ["part.json is not a budget ledger"],
    "data.parquet --nulls maybe": ["'maybe'"],
    "nan.csv": ["nan.csv: column 'a', row 1", "--nulls drop"],
    "nan.csv --csv encoding=klingon": ["klingon"],
    "nan.csv --csv encoding=base64": ["encoding=base64: unknown to Python"],
    "nan.csv --csv delimiter=;;": ["delimiter=;;: must be one ASCII character"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_answered_in_one_line(line, table, tmp_path, fails):
    (tmp_path / "nan.csv").write_text("a,b\n1,2\nnan,3\n")
    (tmp_path / "part.json").write_text('{"u": 1}')
    data, *options = line.split()
    shown = fails("sketch", data, "-o", "out.sketch", *options)
    for part in MISTAKES[line]:
        assert part in shown
    assert not (tmp_path / "out.sketch").exists()


@pytest.mark.parametrize("out", ["none/a.sketch", "file/a.sketch", "folder", "file --by who"])
def test_places_that_cannot_be_written(table, tmp_path, fails, out):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    place, *more = out.split()
    line = fails("sketch", table, "--columns", "u", "-o", place, *more)
    assert f"{place}: cannot be written" in line
