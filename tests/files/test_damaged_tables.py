"""Tables that were made to harm: an error of ours, and little memory."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source
from fedcohort.files.bombs import parquet_plan
from fedcohort.files.source import reading

WRITE = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from pyarrow import ipc

def parquet(values, path, **options):
    options = {"compression": "zstd", "store_schema": False, **options}
    pq.write_table(pa.table({"v": values}), path, **options)

def arrow(values, path):
    table = pa.table({"v": values})
    options = ipc.IpcWriteOptions(compression="zstd", allow_64bit=True)
    with ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)

path = sys.argv[1]
"""
BOMBS = {
    # 0.9 kB: one text of 100 kB in all of 30,000 rows, 3 GB when it is unpacked
    "dictionary.parquet": "parquet(pa.DictionaryArray.from_arrays("
    "np.zeros(30_000, np.int32), ['x' * 100_000]), path)",
    # 50 kB: 3.2 GB of zeros in one batch
    "zeros.arrow": "arrow(np.zeros(400_000_000), path)",
    # 3 kB: 30,000 texts of 100 kB that lie at the same place, 3 GB when each has its own
    "views.arrow": "arrow(pa.StringViewArray.from_buffers(pa.string_view(), 30_000, [None, "
    "pa.py_buffer(np.tile(np.array([100_000, 0x78787878, 0, 0], np.int32), 30_000)), "
    "pa.py_buffer(b'x' * 100_000)]), path)",
    # 0.5 kB: a million million rows of nothing
    "nulls.arrow": "arrow(pa.Array.from_buffers(pa.null(), 10**12, [None]), path)",
}
REFUSED = {"zeros.arrow", "nulls.arrow"}
READ = """
import resource, sys
from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source
from fedcohort.files.columns import Column

numbers = sys.argv[1].rpartition("/")[2].split(".")[0] in ("zeros", "nulls")
category = Column("v", "category", levels=("a", "b"))
want = Want(columns=("v" if numbers else category,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(sum(len(block.x) for block in open_source(sys.argv[1], want).blocks()))
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_never_takes_gigabytes(name, tmp_path):
    """Before, they took 3 GB, or as much as there was."""
    path = tmp_path / name
    write = ["import sys", WRITE, BOMBS[name]]
    subprocess.run([sys.executable, "-c", "\n".join(write), path], check=True, timeout=120)
    assert path.stat().st_size < 200_000
    command = [sys.executable, "-c", READ, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    answer, megabytes = done.stdout.strip().rsplit("\n", 1)
    assert answer.isdigit() == (name not in REFUSED)
    assert answer.isdigit() or name in answer
    assert int(megabytes) < 1500


def varint(number, size=0):
    """Encode a number as Thrift does, in `size` bytes or more."""
    number *= 2
    while number > 127 or size > 1:
        yield number & 127 | 128
        number, size = number >> 7, size - 1
    yield number


def test_a_footer_that_understates_a_column_is_not_believed(tmp_path):
    """1,000 texts of 200 kB, each stored as what differs from the one before it, in 1 kB.

    Rows are read at a time of which 256 MB could be made, and all of them, by a footer that says
    that they take 9 bytes.
    """
    path, texts = tmp_path / "t.parquet", pa.array(["x" * 200_000] * 1_000)
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    pq.write_table(
        pa.table({"v": texts}), path, column_encoding={"v": "DELTA_BYTE_ARRAY"}, **options
    )
    honest = parquet_plan(path, ["v"], 65_536)
    size = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    assert honest == (2**28 // size, [])
    content = path.read_bytes()
    was = bytes(varint(size))
    path.write_bytes(content.replace(was, bytes(varint(9, len(was)))))
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 9
    rows, _ = parquet_plan(path, ["v"], 65_536)
    assert 2**28 // size <= rows <= 1.01 * 2**28 / size


def test_damaged_footers_and_page_headers_are_our_errors(tmp_path):
    """One byte in each of 500 files; where a name became a number, an AttributeError came out."""
    path, rng = tmp_path / "t.parquet", np.random.default_rng(6)
    pq.write_table(pa.table({"v": np.arange(50.0), "s": ["ab"] * 50}), path, row_group_size=20)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for _ in range(500):
        content = bytearray(whole)
        content[rng.integers(footer, len(whole) - 8)] = rng.integers(256)
        path.write_bytes(content)
        with suppress(DataError), reading(path):
            parquet_plan(path, ["v", "s"], 100)


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
