"""Every parser of fedcohort, with examples of what it reads and the ways to damage them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import shutil
import sqlite3
import tempfile
import warnings
import zlib
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from fedcohort.exceptions import FedcohortError

from .mutate import (
    damaged_bytes,
    damaged_document,
    damaged_lines,
    damaged_npy,
    damaged_sketch,
    damaged_text,
    damaged_zip,
    json_bytes,
    odd,
    odd_shape,
)


@cache
def example_sketch(n=50, seed=0):
    """Return a sketch that nobody changes."""
    from fedcohort.sketch.race import RaceSketch

    sketch = RaceSketch.srp(dim=4, rows=6, bits=3)
    sketch.add(np.random.default_rng(seed).normal(size=(n, 4)))
    return sketch


def saved(save, name="file"):
    """Return what a function writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save(path)
        return path.read_bytes()


class Parser:
    """A parser: examples of what it reads, how they are damaged, and the parser itself."""

    name = ""
    file = "file"
    needs: ClassVar[tuple[str, ...]] = ()  # packages; without them the parser is left out
    imports: ClassVar[tuple[str, ...]] = ()  # slow modules of fedcohort, imported before the fork
    damaged = staticmethod(damaged_bytes)

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / self.file
        self.path.parent.mkdir(exist_ok=True)

    @classmethod
    def missing(cls):
        return [name for name in cls.needs if importlib.util.find_spec(name) is None]

    def examples(self):
        raise NotImplementedError

    def write(self, data):
        """Write the file in less time than `Path.write_bytes` takes."""
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, data)
        finally:
            os.close(handle)

    def parse(self):
        raise NotImplementedError


class Sketch(Parser):
    name = "sketch"
    imports = ("fedcohort.files.sketching",)
    damaged = staticmethod(damaged_sketch)

    def examples(self):
        plain = example_sketch()
        private = plain.privatize(1.0, rng=np.random.default_rng(0))
        return [plain.to_bytes(), private.to_bytes()]

    def parse(self):
        from fedcohort.files.sketching import load_sketch
        from fedcohort.sketch.race import distance

        sketch = load_sketch(self.path)
        if sketch.spec == (known := example_sketch()).spec and sketch.n >= 2:
            distance(sketch, known, "mmd")


class Checkpoint(Parser):
    """Also gives what can be read to a session of the policy that it names, by default uniform."""

    name = "checkpoint"
    policies = ("uniform", "oort", "fedacs", "active-fl")
    damaged = staticmethod(damaged_zip)

    def examples(self):
        from fedcohort import storage
        from fedcohort.testing import drive

        states = []
        for policy in self.policies:
            session = self.session_of(policy)
            for _ in range(3):
                drive(session, [f"c{i}" for i in range(6)])
            states.append(session.state_dict())
        self.policy_of = {s["policy"]: p for s, p in zip(states, self.policies, strict=True)}
        return [saved(lambda path, s=state: storage.save(path, s)) for state in states]

    @staticmethod
    def session_of(policy):
        from fedcohort import POLICIES, Session

        return Session(POLICIES[policy](), cohort_size=2, seed=0)

    def parse(self):
        from fedcohort import storage

        state = storage.load(self.path)
        stated = state.get("policy")
        policy = self.policy_of.get(stated, "uniform") if isinstance(stated, str) else "uniform"
        storage.restore(self.path, self.session_of(policy).load_state_dict, state)


class Budget(Parser):
    name = "budget"
    damaged = staticmethod(damaged_document)

    def ledger(self, path):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        return BudgetLedger(path, 10.0, 1e-6), noise_for(10, 0.5, 0.0, "add-remove")

    def examples(self):
        def save(path):
            ledger, noise = self.ledger(path)
            ledger.charge_and_store([noise], lambda: b"noise", request="r1")

        return [saved(save)]

    def parse(self):
        ledger, noise = self.ledger(self.path)
        ledger.charge(noise)
        ledger.remaining()


@cache
def empty_sketch(dim):
    """Return an empty sketch that nobody changes."""
    from fedcohort.sketch.race import RaceSketch

    return RaceSketch.srp(dim=dim, rows=4, bits=3)


class Source(Parser):
    """A data file that is sketched, by client where it has clients."""

    imports = ("fedcohort.files.sketching",)
    options: ClassVar = {}

    def parse(self):
        from fedcohort.files.sketching import sketch_clients, sketch_source
        from fedcohort.files.source import Want, open_source

        want = Want(**self.options)
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
    damaged = staticmethod(damaged_npy)

    def examples(self):
        return [saved(lambda path: np.save(path, np.eye(5)), "x.npy")]


class Npz(Source):
    name, file = "npz", "x.npz"
    options: ClassVar = {"columns": ("x",), "by": "who"}
    damaged = staticmethod(damaged_zip)

    def examples(self):
        who = np.array(["ann", "bob", "ann", "eve", "bob"])
        return [
            saved(lambda path, save=save: save(path, x=np.eye(5), who=who), "x.npz")
            for save in (np.savez, np.savez_compressed)
        ]


class Table(Source):
    """A table that is saved with each of some options."""

    needs = ("pyarrow",)
    options: ClassVar = {"columns": ("x0", "x1", "x2"), "by": "who", "nulls": "drop"}
    variants: ClassVar[tuple[str, ...]] = ("",)

    def examples(self):
        import pyarrow as pa

        rng = np.random.default_rng(0)
        columns = {f"x{i}": rng.normal(size=16) for i in range(3)}
        columns["who"] = [f"client {i % 2}" for i in range(16)]
        columns["x2"] = pa.array([None if i % 9 == 0 else float(i) for i in range(16)])
        table = pa.table(columns)
        return [saved(lambda path, v=v: self.save(table, path, v)) for v in self.variants]


class Arrow(Table):
    name, file = "arrow", "x.arrow"

    def save(self, table, path, _):
        import pyarrow as pa

        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=12)


class Feather(Table):
    name, file, variants = "feather", "x.feather", ("uncompressed", "lz4")

    def save(self, table, path, compression):
        from pyarrow import feather

        feather.write_feather(table, str(path), compression)


class Parquet(Table):
    name, file, variants = "parquet", "x.parquet", ("none", "snappy")

    def save(self, table, path, compression):
        import pyarrow.parquet as pq

        pq.write_table(table, path, compression=compression)


class Csv(Table):
    name, file = "csv", "x.csv"

    def save(self, table, path, _):
        import pyarrow.csv as pc

        pc.write_csv(table, path)


class Cifar(Parser):
    """All batches are the same file."""

    imports = ("fedcohort.datasets",)
    name, file = "cifar", "cifar10/test_batch.bin"

    def examples(self):
        self.path.touch()
        for i in range(1, 6):
            if not (batch := self.path.with_name(f"data_batch_{i}.bin")).exists():
                os.link(self.path, batch)
        return [bytes([i % 10]) + bytes(3072) for i in range(3)]

    def parse(self):
        from fedcohort.datasets import load

        load("cifar10", self.folder)


class Femnist(Parser):
    imports = ("fedcohort.datasets",)
    name, file = "femnist", "femnist/femnist.npz"
    damaged = staticmethod(damaged_zip)

    def examples(self):
        arrays = {
            "images": np.zeros((6, 28, 28), np.uint8),
            "labels": np.arange(6, dtype=np.uint8),
            "writers": (np.arange(6) % 2).astype(np.uint16),
            "writer_ids": np.array(["a", "b"]),
            "is_test": np.arange(6) % 3 == 0,
        }
        return [saved(lambda path: np.savez(path, **arrays), "femnist.npz")]

    def parse(self):
        from fedcohort.datasets import load

        load("femnist", self.folder)


class Toml(Parser):
    name, file = "toml", "x.toml"
    imports = ("fedcohort.experiments.compare",)
    damaged = staticmethod(damaged_text)

    def examples(self):
        return [
            b"rounds = 3 \ncohort_size = 2 \nseeds = [ 0 , 1 ] \ntarget = 0.5 \n"
            b'[policy] \nname = "power-of-choice" \n[policy.options] \nd = 4 \n'
            b'[data] \ndataset = "digits" \npartition = "shards" \nclients = 6 \n'
            b"[data.options] \nper_client = 2 \n[local] \nlr = 0.1 \nepochs = 1 \n"
            b'[sweep] \n"local.lr" = [ 0.1 , 0.2 ] \n'
        ]

    def parse(self):
        from fedcohort.experiments import compare

        compare.read(self.path)


class SketchSpec(Parser):
    name, file = "sketch-spec", "spec.toml"
    imports = ("fedcohort.files.spec",)
    damaged = staticmethod(damaged_text)

    def examples(self):
        return [
            b'[sketch] \nhash = "srp" \nrows = 20 \nbits = 4 \nseed = 0 \n'
            b'[privacy] \nepsilon = 1.0 \ndelta = 0.0 \nneighbors = "replace" \n'
            b'[missing] \nnull_values = [ "?" , "NA" ] \n'
            b'[columns.age] \nkind = "number" \ncenter = 50.0 \nscale = 10.0 \n'
            b'[columns.sex] \nkind = "category" \nlevels = [ "f" , "m" ] \n'
        ]

    def parse(self):
        from fedcohort.files.spec import load_spec

        load_spec(self.path)


class Trace(Parser):
    name, file = "trace", "x.csv"
    imports = ("fedcohort.simulate.clock",)

    def examples(self):
        return [b"round,client\r\n0,a\r\n0,b\r\n1,a\r\n"]

    def parse(self):
        from fedcohort.simulate.clock import Trace as Availability

        trace, rng = Availability.read(self.path), np.random.default_rng(0)
        for number in range(6):
            trace.available(number, ("a", "b"), rng)


class Policy(Parser):
    """Policies as on the command line: ``name:option=value,option=value``."""

    name = "policy"
    imports = ("fedcohort.policies",)

    def examples(self):
        from fedcohort import POLICIES

        return [
            f"{name}:{option}= {parameter.default}".encode()
            for name, policy in POLICIES.items()
            for option, parameter in inspect.signature(policy).parameters.items()
            if parameter.default is not None
        ]

    @staticmethod
    def damaged(data, rng):
        new = odd(rng)
        head, _, value = data.partition(b" ")
        if rng.random() >= 0.8:
            return head + damaged_bytes(value, rng)
        with contextlib.suppress(ValueError):
            text = new if isinstance(new, str) else json.dumps(new)
            value = text.encode("utf-8", "surrogatepass")
        return head + value

    def parse(self):
        from fedcohort import POLICIES, Session
        from fedcohort.registry import make

        text = self.path.read_bytes().decode("utf-8", "surrogateescape")
        session = Session(make("policy", text, POLICIES), cohort_size=2, seed=0)
        with contextlib.suppress(FedcohortError):
            session.begin(["a", "b", "c"], lambda signal, clients: {})


class RunFolder(Parser):
    """The files of a run: one of them is damaged, then all are read."""

    name = "run-folder"
    needs = ("torch",)
    imports = ("fedcohort.experiments.results", "fedcohort.experiments.run")
    files = ("config.json", "rounds.jsonl", "federation.json")

    def examples(self):
        from fedcohort.experiments import config, run

        data = {"dataset": "digits", "clients": 6, "options": {"per_client": 2}}
        small = {"rounds": 3, "cohort_size": 2, "device": "cpu", "data": data}
        with tempfile.TemporaryDirectory() as place:
            run.run(config.parse(small), place)
            self.good = {name: (Path(place) / name).read_bytes() for name in self.files}
        (self.folder / "run").mkdir(exist_ok=True)
        return [name.encode() + b"\n" + self.good[name] for name in self.files]

    @staticmethod
    def damaged(data, rng):
        name, _, content = data.partition(b"\n")
        change = damaged_lines if name.endswith(b"jsonl") else damaged_document
        return name + b"\n" + change(content, rng)

    def parse(self):
        from fedcohort.experiments import results

        name, _, content = self.path.read_bytes().partition(b"\n")
        for key, good in self.good.items():
            (self.folder / "run" / key).write_bytes(content if key.encode() == name else good)
        found = results.read(self.folder / "run")
        for result in found:
            result.members()
        if hasattr(found, "to_arrow"):
            found.to_arrow()


class FlowerReading(Parser):
    """A reading from a client: its form as JSON text, a newline, its bytes."""

    name = "flower-reading"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)

    def examples(self):
        from fedcohort.flower.wire import pack

        readings = (np.float64(0.5), np.arange(5.0), example_sketch().reading())
        return [form.encode() + b"\n" + data for data, form in map(pack, readings)]

    @staticmethod
    def damaged(data, rng):
        form, _, content = data.partition(b"\n")
        if rng.random() < 0.2:  # a shape of zeros and extremes, which may need no bytes
            form = json_bytes([json.loads(form)[0], odd_shape(rng)])
            return form + b"\n" + rng.choice([b"", content])
        if rng.random() < 0.7:
            return damaged_document(form, rng).replace(b"\n", b"") + b"\n" + content
        return form + b"\n" + damaged_bytes(content, rng)

    def parse(self):
        from fedcohort.flower.wire import unpack
        from fedcohort.signals.table import Signals

        form, _, content = self.path.read_bytes().partition(b"\n")
        reading = unpack(content, form.decode("utf-8", "replace"), 1 << 20)
        Signals().record("reading", {"client": reading}, 0)


class FlowerRequest(Parser):
    name = "flower-request"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)
    damaged = staticmethod(damaged_document)

    def examples(self):
        from fedcohort.flower.wire import Request

        options = {"race_sketch": {"rows": 10, "bits": 4, "seed": 0}, "model_sketch": {"k": 8}}
        request = Request(0, 0, "v", signals=("loss", "race_sketch"), options=options)
        return [request.to_json().encode()]

    def parse(self):
        from fedcohort.flower.wire import Request

        Request.from_json(self.path.read_bytes().decode("utf-8", "replace")).to_json()


class FlowerUpdate(Parser):
    """A model from a client, as bytes of an .npy file in an Array that states its form."""

    name = "flower-update"
    needs = ("flwr",)
    imports = ("fedcohort.flower.wire",)
    damaged = staticmethod(damaged_npy)

    def examples(self):
        from flwr.app import Array, ArrayRecord

        self.good = ArrayRecord({"w": Array(np.ones((3, 2), np.float32))})
        return [saved(lambda path: np.save(path, np.ones((3, 2), np.float32)), "x.npy")]

    def parse(self):
        from flwr.app import Array, ArrayRecord

        from fedcohort.flower.wire import checked

        good = self.good["w"]
        bad = Array(good.dtype, good.shape, good.stype, self.path.read_bytes())
        checked(ArrayRecord({"w": bad}), self.good)


class RegistryFolder(Parser):
    """A registry: one of its files is damaged, or a value in its database.

    The database comes whole, and with its newest rows in a write-ahead log.
    """

    name = "registry"
    needs = ("safetensors",)
    imports = ("fedcohort.personalize", "scipy.optimize")
    DATABASE, LOG = "registry.sqlite", "registry.sqlite-wal"
    TABLES: ClassVar = {
        "clients": ("id", "n", "epsilon", "model", "reference", "metadata", "registered", "sketch"),
        "facts": ("name", "value"),
        "counts": ("n", "noise", "counts"),
    }

    def examples(self):
        from fedcohort.personalize import Registry

        place = Path(tempfile.mkdtemp(dir=self.folder)) / "warm"
        with Registry.create(place) as registry:
            registry.set_global({"w": np.zeros(3)})
            for i in range(3):
                registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i % 2))})
            self.logged = {name: (place / name).read_bytes() for name in (self.DATABASE, self.LOG)}
        with contextlib.closing(sqlite3.connect(place / self.DATABASE)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        files = [p for p in sorted(place.rglob("*")) if p.is_file() and p.name != ".lock"]
        self.good = {str(p.relative_to(place)): p.read_bytes() for p in files}
        content = {**self.good, self.LOG: self.logged[self.LOG]}
        names = [*content, *[self.DATABASE] * len(content)]
        return [name.encode() + b"\n" + content[name] for name in names]

    def damaged(self, data, rng):
        name, _, content = data.partition(b"\n")
        if name == self.DATABASE.encode() and rng.random() < 0.7:
            return name + b"\n" + self.with_odd_value(content, rng)
        return name + b"\n" + damaged_bytes(content, rng)

    def with_odd_value(self, content, rng):
        """Return the database with an odd value in some rows of a table, if SQLite takes it."""
        table = rng.choice(list(self.TABLES))
        column, value = rng.choice(self.TABLES[table]), odd(rng)
        if isinstance(value, (list, dict)):
            value = json.dumps(value)
        if isinstance(value, int) and abs(value) >= 2**63:
            value = "9" * 400
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")
            value = value if rng.random() < 0.3 else value.decode("latin-1")
        rows = "rowid % 5 = ?"
        if table == "facts":
            rows = "name = (SELECT name FROM facts ORDER BY name LIMIT 1 OFFSET ?)"
        with contextlib.closing(sqlite3.connect(":memory:")) as db:
            db.deserialize(content)
            with contextlib.suppress(sqlite3.Error):
                change = f"UPDATE {table} SET {column} = ? WHERE {rows}"
                db.execute(change, (value, rng.randrange(5)))
                db.commit()
            return db.serialize()

    def parse(self):
        data = self.path.read_bytes()
        name, _, content = data.partition(b"\n")
        name, place = name.decode("utf-8", "replace"), self.folder / "registry"
        shutil.rmtree(place, ignore_errors=True)
        log = {self.DATABASE: self.logged[self.DATABASE]} if name == self.LOG else {}
        for path, good in {**self.good, **log, name: content}.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(good)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.act(place, Random(zlib.crc32(data)))

    def act(self, place, rng):
        """Open the registry and do something with it; costly things less often."""
        from fedcohort.personalize import ColdStart, Registry, check, nearest

        with Registry(place) as registry:
            acts = (
                lambda: check(registry),
                lambda: [registry.model(entry.client) for entry in registry.entries()],
                lambda: registry.global_model(),
                lambda: nearest(registry, example_sketch(seed=99), 2),
                lambda: registry.add("new", example_sketch(seed=50), {"w": np.ones(3)}),
                lambda: ColdStart(registry).advise(example_sketch(seed=99)),
            )
            with contextlib.suppress(FedcohortError):
                rng.choices(acts, [0.2, 0.2, 0.1, 0.3, 0.16, 0.04])[0]()


PARSERS = {
    parser.name: parser
    for parser in (
        *(Sketch, Checkpoint, Budget, Idx, Npy, Npz, Arrow, Feather, Parquet, Csv, Cifar, Femnist),
        *(Toml, SketchSpec, Trace, FlowerReading, FlowerRequest, FlowerUpdate, Policy),
        *(RunFolder, RegistryFolder),
    )
}
