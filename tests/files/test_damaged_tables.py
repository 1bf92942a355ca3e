"""Damaged Arrow, Feather and Parquet files get an error of ours and never end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source

DRIVER = Path(__file__).with_name("mutate_tables.py")


@pytest.mark.parametrize("kind", ["arrow", "arrows", "feather", "parquet"])
def test_mutated_tables_never_crash_the_process(kind, tmp_path):
    """300 mutations each; unchecked offsets ended the process (SIGSEGV) in most such runs."""
    command = [sys.executable, str(DRIVER), str(tmp_path), kind, "7", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 300 < int(done.stdout) < 900  # most are refused, and not all


@pytest.mark.parametrize("kind", ["csv", "arrow"])
def test_names_that_are_not_utf8_are_named_as_such(kind, tmp_path):
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        path.write_bytes(b"g\xf6\xdfe,b\n1,2\n")
    else:
        table = pa.table({"name-of-column": [1.0]})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        path.write_bytes(path.read_bytes().replace(b"name-of", b"n\xf6me-of"))
    with pytest.raises(DataError, match=rf"t\.{kind}.*UTF-?8"):
        open_source(path, Want())
