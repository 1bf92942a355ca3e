"""Data files: arrays, tables, image data sets."""

from __future__ import annotations

import os
from functools import cache
from typing import ClassVar

import numpy as np

from .mutate import damaged_npy, damaged_zip
from .target import Target, saved


@cache
def empty_sketch(dim):
    """Return an empty sketch that nobody changes."""
    from fedcohort.sketch.race import RaceSketch

    return RaceSketch.srp(dim=dim, rows=4, bits=3)


class Source(Target):
    """A data file that is sketched, by client where it has clients."""

    imports = ("fedcohort.files.sketching",)
    options: ClassVar = {}

    def parse(self):
        from fedcohort.files import Want, open_source
        from fedcohort.files.sketching import sketch_clients, sketch_source

        want = Want(form="vectors", **self.options)
        source = open_source(self.path, want)
        if source.dim is not None and source.dim < 10_000:
            empty = empty_sketch(source.dim)
            if want.by is None:
                sketch_source(source, empty)
            else:
                for _ in sketch_clients(source, empty):
                    pass


class Idx(Source):
    name, file = "idx", "x-idx3-ubyte"

    def examples(self):
        pixels = np.arange(5 * 3 * 3, dtype=np.uint8).tobytes()
        return [b"\x00\x00\x08\x03" + np.array([5, 3, 3], ">u4").tobytes() + pixels]


class Npy(Source):
    name, file = "npy", "x.npy"

    def examples(self):
        return [saved(lambda path: np.save(path, np.eye(5)), "x.npy")]

    def damaged(self, data, rng):
        return damaged_npy(data, rng)


class Npz(Source):
    name, file = "npz", "x.npz"
    options: ClassVar = {"columns": ("x",), "by": "who"}

    def examples(self):
        who = np.array(["ann", "bob", "ann", "eve", "bob"])
        return [
            saved(lambda path, save=save: save(path, x=np.eye(5), who=who), "x.npz")
            for save in (np.savez, np.savez_compressed)
        ]

    def damaged(self, data, rng):
        return damaged_zip(data, rng)


def example_table():
    import pyarrow as pa

    rng = np.random.default_rng(0)
    columns = {f"x{i}": rng.normal(size=16) for i in range(3)}
    columns["who"] = [f"client {i % 2}" for i in range(16)]
    columns["x2"] = pa.array([None if i % 9 == 0 else float(i) for i in range(16)])
    return pa.table(columns)


class Arrow(Source):
    name, file = "arrow", "x.arrow"
    needs = ("pyarrow",)
    options: ClassVar = {"columns": ("x0", "x1", "x2"), "by": "who", "nulls": "drop"}

    def examples(self):
        import pyarrow as pa

        def save(path):
            table = example_table()
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=12)

        return [saved(save)]


class Feather(Source):
    name, file = "feather", "x.feather"
    needs = ("pyarrow",)
    options = Arrow.options

    def examples(self):
        import pyarrow.feather as feather

        return [
            saved(lambda path, c=c: feather.write_feather(example_table(), str(path), c))
            for c in ("uncompressed", "lz4")
        ]


class Parquet(Source):
    name, file = "parquet", "x.parquet"
    needs = ("pyarrow",)
    options = Arrow.options

    def examples(self):
        import pyarrow.parquet as pq

        return [
            saved(lambda path, c=c: pq.write_table(example_table(), path, compression=c))
            for c in ("none", "snappy")
        ]


class Csv(Source):
    name, file = "csv", "x.csv"
    needs = ("pyarrow",)
    options = Arrow.options

    def examples(self):
        import pyarrow.csv as pc

        return [saved(lambda path: pc.write_csv(example_table(), path))]


class Cifar(Target):
    """All batches are the same file."""

    imports = ("fedcohort.datasets",)
    name, file = "cifar", "cifar10/test_batch.bin"

    def examples(self):
        return [bytes([i % 10]) + bytes(3072) for i in range(3)]

    def prepare(self):
        self.path.touch()
        for i in range(1, 6):
            os.link(self.path, self.path.with_name(f"data_batch_{i}.bin"))

    def parse(self):
        from fedcohort.datasets import load

        load("cifar10", self.folder)


class Femnist(Target):
    imports = ("fedcohort.datasets",)
    name, file = "femnist", "femnist/femnist.npz"

    def examples(self):
        def save(path):
            n = 6
            np.savez(
                path,
                images=np.zeros((n, 28, 28), np.uint8),
                labels=np.arange(n, dtype=np.uint8),
                writers=(np.arange(n) % 2).astype(np.uint16),
                writer_ids=np.array(["a", "b"]),
                is_test=np.arange(n) % 3 == 0,
            )

        return [saved(save, "femnist.npz")]

    def damaged(self, data, rng):
        return damaged_zip(data, rng)

    def parse(self):
        from fedcohort.datasets import load

        load("femnist", self.folder)
