"""Tables that were made to harm: an error of ours, and little memory."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source

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

def varint(number, size=0):
    number *= 2
    while number > 127 or size > 1:
        yield number & 127 | 128
        number, size = number >> 7, size - 1
    yield number

def lie(path, truth):
    content = open(path, "rb").read()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    was = bytes(varint(truth))
    assert was in content[start:]
    footer = content[start:].replace(was, bytes(varint(9, len(was))))
    open(path, "wb").write(content[:start] + footer)

path = sys.argv[1]
"""
BOMBS = {
    # 0.9 kB: one text of 100 kB in all of 30,000 rows, 3 GB when it is unpacked
    "dictionary.parquet": "parquet(pa.DictionaryArray.from_arrays("
    "np.zeros(30_000, np.int32), ['x' * 100_000]), path)",
    # 400 kB: one page of 150 million zeros, 1.2 GB; the footer says that they take 9 bytes
    "page.parquet": "parquet(np.zeros(150_000_000), path, use_dictionary=False, "
    "data_page_size=2**31 - 1, row_group_size=2**28, write_statistics=False); "
    "lie(path, pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size)",
    # 0.5 kB: 8,000 texts of 200 kB, each stored as what differs from the one before it
    "delta.parquet": "parquet(pa.array(['x' * 200_000] * 8_000), path, use_dictionary=False, "
    "column_encoding={'v': 'DELTA_BYTE_ARRAY'})",
    # 50 kB: 3.2 GB of zeros in one batch
    "zeros.arrow": "arrow(np.zeros(400_000_000), path)",
    # 3 kB: 30,000 texts of 100 kB that lie at the same place, 3 GB when each has its own
    "views.arrow": "arrow(pa.StringViewArray.from_buffers(pa.string_view(), 30_000, [None, "
    "pa.py_buffer(np.tile(np.array([100_000, 0x78787878, 0, 0], np.int32), 30_000)), "
    "pa.py_buffer(b'x' * 100_000)]), path)",
    # 0.5 kB: a million million rows of nothing
    "nulls.arrow": "arrow(pa.Array.from_buffers(pa.null(), 10**12, [None]), path)",
}
REFUSED = {"page.parquet", "zeros.arrow", "nulls.arrow"}
READ = """
import resource, sys
from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source
from fedcohort.files.columns import Column

numbers = sys.argv[1].rpartition("/")[2].split(".")[0] in ("page", "zeros", "nulls")
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
    assert path.stat().st_size < 500_000
    command = [sys.executable, "-c", READ, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    answer, megabytes = done.stdout.strip().rsplit("\n", 1)
    assert answer.isdigit() == (name not in REFUSED)
    assert answer.isdigit() or name in answer
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
