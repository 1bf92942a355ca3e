"""Tables that were made to harm: an error of ours, and little memory."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source

BOMBS = {
    # 0.9 kB: one text of 200 kB in all of 65,536 rows, 13 GB when it is unpacked
    "dictionary": "pa.DictionaryArray.from_arrays(np.zeros(65_536, np.int32), ['x' * 200_000])",
    # 0.5 kB: one row with a list of 150 million zeros
    "list": "pa.LargeListArray.from_arrays([0, 150_000_000], np.zeros(150_000_000, np.float32))",
    # 0.5 kB: 8,000 texts of 200 kB, each stored as what differs from the one before it
    "delta": "pa.array(['x' * 200_000] * 8_000)",
}
READ = """
import resource, sys
from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source

want = Want(columns=("v",)) if sys.argv[2] == "list" else Want(form="sets", columns=("v",))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(sum(len(block.x) for block in open_source(sys.argv[1], want).blocks()))
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_parquet_file_never_takes_gigabytes(bomb, tmp_path):
    """Before, they took 5.5, 3.3 and 3.4 GB, or as much as there was."""
    path = tmp_path / "t.parquet"
    write = f"""
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
values = {BOMBS[bomb]}
options = {{"compression": "zstd", "store_schema": False}}
if {bomb == "delta"}:
    options |= {{"use_dictionary": False, "column_encoding": {{"v": "DELTA_BYTE_ARRAY"}}}}
pq.write_table(pa.table({{"v": values}}), r"{path}", **options)
"""
    subprocess.run([sys.executable, "-c", write], check=True, timeout=120)
    assert path.stat().st_size < 2000
    command = [sys.executable, "-c", READ, str(path), bomb]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    answer, megabytes = done.stdout.strip().rsplit("\n", 1)
    assert answer.isdigit() == (bomb != "list")
    assert bomb != "list" or "column 'v' unpacks" in answer
    assert int(megabytes) < 1500


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
