"""Read mutated table files: only fedcohort's own errors may come out, and no crash.

Run as a process of its own by `test_damaged_tables.py`: python mutate_tables.py FOLDER KIND SEED N
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from fedcohort.exceptions import FedcohortError
from fedcohort.files import Want, open_source

WANTS = (
    Want(columns=("x", "y", "l"), by="who", nulls="drop"),
    Want(form="sets", columns=("category", "y"), by="who", nulls="drop"),
    Want(form="sets", text="who"),
)


def write(path: Path, rows: int = 60) -> None:
    table = pa.table(
        {
            "who": [f"site-{i % 3}" for i in range(rows)],
            "category": pa.array(
                [("a", "b", None)[i % 3] for i in range(rows)]
            ).dictionary_encode(),
            "x": np.linspace(0, 1, rows),
            "y": np.arange(rows) % 3,
            "l": [[1.0, 2.0]] * rows,
        }
    )
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path, compression="lz4")
    else:
        new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table)


def mutate(whole: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(whole)
    for at in rng.integers(len(data), size=rng.integers(1, 6)):
        data[at] = rng.integers(256) if rng.random() < 0.5 else data[at] ^ (1 << rng.integers(8))
    return bytes(data[: rng.integers(len(data))] if rng.random() < 0.1 else data)


def read(path: Path, want: Want) -> bool:
    try:
        for block in open_source(path, want).blocks():
            assert len(block.x) <= 60
    except FedcohortError:
        return False
    return True


def main(folder: str, kind: str, seed: str, count: str) -> None:
    path = Path(folder) / f"table.{kind}"
    write(path)
    whole, rng = path.read_bytes(), np.random.default_rng(int(seed))
    assert all(read(path, want) for want in WANTS)
    refused = 0
    for _ in range(int(count)):
        path.write_bytes(mutate(whole, rng))
        refused += sum(not read(path, want) for want in WANTS)
    print(refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
