"""Sketches made by many workers equal those of one process."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedcohort.cli import invoke
from fedcohort.sketch.race import RaceSketch

RNG = np.random.default_rng(0)


def test_clients_labels_and_warnings_are_those_of_one_process(connected, tmp_path, capsys):
    """Without the workers' reports nothing was said about constants, identifiers, lost rows."""
    (tmp_path / "data").mkdir()
    for number in range(4):
        first = 50 * number
        columns = {
            "patient_id": np.arange(first, first + 50),
            "same": np.full(50, 3.0),
            "age": pa.array([None, *RNG.normal(50, 10, 49)], pa.float64()),
            "y": np.arange(50) % 2,
            "who": [f"c{i // 25}" for i in range(50)],
        }
        pq.write_table(pa.table(columns), tmp_path / "data" / f"{number}.parquet")
    size = ["--label", "y", "--classes", "2", "--set=explain=0.5", "--nulls", "drop", "--by", "who"]
    said, told = [], []
    for out, more in (("here", []), ("there", ["--ray", connected.address])):
        names = [str(tmp_path / "data"), "-o", str(tmp_path / out)]
        assert invoke(["sketch", *names, *size, *more, "--format", "json"]) == 0
        shown = capsys.readouterr()
        told.append(json.loads(shown.out)["read"])
        said.append([line for line in shown.err.splitlines() if line.startswith("warning")])
    assert said[0] == said[1]
    assert any("constant in all rows" in line and "same" in line for line in said[1])
    assert any("identifiers" in line and "patient_id" in line for line in said[1])
    assert told[0] == told[1]
    assert told[1]["rows left out"].startswith("4 of 200")
    files = sorted((tmp_path / "here").glob("*.sketch"))
    assert len(files) == 2
    for file in files:
        other = tmp_path / "there" / file.name
        assert file.read_bytes() == other.read_bytes()
        assert RaceSketch.load(other).marginals.n > 0


def test_noise_is_added_once_and_errors_are_the_users(connected, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for number, rows in enumerate((5, 40, 0, 17)):  # one is empty
        x = RNG.normal(size=(rows, 2)) + 1
        pq.write_table(pa.table({"u": x[:, 0], "v": x[:, 1]}), folder / f"{number}.parquet")
    options = ["--columns", "u,v", "--set=rows=20", "--set=bits=4", "--epsilon", "2"]
    more = ["--ray", connected.address]
    for name, ray in (("there", more), ("here", [])):
        assert invoke(["sketch", str(folder), "-o", str(tmp_path / name), *options, *ray]) == 0
    assert RaceSketch.load(tmp_path / "there").noise == RaceSketch.load(tmp_path / "here").noise > 0
    table = pa.table({"u": [1.0, None], "v": [1.0, 2.0]})
    pq.write_table(table, folder / "4.parquet")
    capsys.readouterr()
    assert invoke(["sketch", str(folder), "-o", str(tmp_path / "a.sketch"), *more]) == 2
    assert "4.parquet: column 'u', row 1" in capsys.readouterr().err
    one = [str(folder / "1.parquet"), "-o", str(tmp_path / "a.sketch")]
    assert invoke(["sketch", *one, *more]) == 2
    assert "one file" in capsys.readouterr().err
