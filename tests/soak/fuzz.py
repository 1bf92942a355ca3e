"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --only sketch,npz --count 1000 --jobs 4 --out result.json

Each parser runs in child processes with bounded memory, so that a crash in a library is seen and
costs nothing else: the next child goes on behind it. With an ``--out`` that exists, trials go on
where it ends; ``--merge`` adds the trials of other result files, which had other seeds, and with
``--seconds 0`` does nothing else. The input of every trial is a function of the seed and the number
of the trial, and is written to a file before it is parsed; ``--keep`` keeps those that crash a
process. Parsers whose packages are not installed are left out, and named in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import hashlib
import importlib
import importlib.util
import io
import json
import logging
import mmap
import os
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from mutate import (
    damaged_bytes,
    damaged_document,
    damaged_lines,
    damaged_npy,
    damaged_sketch,
    damaged_text,
    damaged_zip,
    odd,
)

from fedcohort.exceptions import FedcohortError

MEMORY = 2 << 30  # bytes that a parser may take beyond what it had before the first trial
SECONDS = 20  # for one trial


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


class Target:
    """A parser: examples of what it reads, how they are damaged, and the parser itself."""

    name = ""
    file = "file"
    needs: ClassVar[tuple[str, ...]] = ()
    made = None  # the examples, where they are made before the fork

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / self.file

    def elsewhere(self):
        """Return this parser with the same examples and a folder of its own."""
        other = copy.copy(self)
        other.folder = Path(tempfile.mkdtemp(dir=self.folder))
        other.path = other.folder / self.file
        return other

    @classmethod
    def missing(cls):
        return [name for name in cls.needs if importlib.util.find_spec(name) is None]

    def examples(self):
        raise NotImplementedError

    def damaged(self, data, rng):
        return damaged_bytes(data, rng)

    def write(self, data):
        self.path.write_bytes(data)

    def parse(self):
        raise NotImplementedError


class Sketch(Target):
    name = "sketch"

    def examples(self):
        plain = example_sketch()
        private = plain.privatize(1.0, rng=np.random.default_rng(0))
        return [plain.to_bytes(), private.to_bytes()]

    def damaged(self, data, rng):
        return damaged_sketch(data, rng)

    def parse(self):
        from fedcohort.files.sketching import load_sketch
        from fedcohort.sketch.race import distance

        sketch = load_sketch(self.path)
        if sketch.spec == (known := example_sketch()).spec and sketch.n >= 2:
            distance(sketch, known, "mmd")


class Checkpoint(Target):
    """Also gives what can be read to a session of every policy that remembers something."""

    name = "checkpoint"

    def examples(self):
        from fedcohort import checkpoint

        return [
            saved(lambda path, session=session: checkpoint.save(path, session.state_dict()))
            for session in self.sessions(rounds=3)
        ]

    def sessions(self, rounds=0):
        from fedcohort import POLICIES, Session

        for name in ("uniform", "oort", "fedacs", "active-fl"):
            session = Session(POLICIES[name](), cohort_size=2, seed=0)
            clients = [f"c{i}" for i in range(6)]
            for _ in range(rounds):
                cohort = session.begin(clients, lambda signal, asked: dict.fromkeys(asked, 1.0))
                replies = {
                    signal: dict.fromkeys(cohort.clients, 0.5)
                    for signal in session.policy.needs.reply
                }
                session.finish(replies, cohort.clients)
            yield session

    def damaged(self, data, rng):
        return damaged_zip(data, rng)

    def parse(self):
        from fedcohort import checkpoint

        state = checkpoint.load(self.path)
        for session in self.sessions():
            with contextlib.suppress(FedcohortError):
                checkpoint.restore(self.path, session.load_state_dict, state)


class Budget(Target):
    name = "budget"

    def examples(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        def save(path):
            ledger = BudgetLedger(path, 10.0, 1e-6)
            for client in ("ann", "bob"):
                ledger.spend(client, noise_for(10, 0.5, 0.0, "add-remove"))

        return [saved(save)]

    def damaged(self, data, rng):
        return damaged_document(data, rng)

    def parse(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        ledger = BudgetLedger(self.path, 10.0, 1e-6)
        ledger.spend("ann", noise_for(10, 0.5, 0.0, "add-remove"))
        ledger.remaining("bob")


class Source(Target):
    """A data file that is sketched, by client where it has clients."""

    options: ClassVar = {}

    def parse(self):
        from fedcohort.files import Want, open_source
        from fedcohort.files.sketching import sketch_clients, sketch_source
        from fedcohort.sketch.race import RaceSketch

        want = Want(form="vectors", **self.options)
        source = open_source(self.path, want)
        if source.dim is not None and source.dim < 10_000:
            empty = RaceSketch.srp(dim=source.dim, rows=4, bits=3)
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
    columns = {f"x{i}": rng.normal(size=40) for i in range(3)}
    columns["who"] = [f"client {i % 4}" for i in range(40)]
    columns["x2"] = pa.array([None if i % 9 == 0 else float(i) for i in range(40)])
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
                writer.write_table(table, max_chunksize=16)

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
    name = "cifar"

    def examples(self):
        return [bytes([i % 10]) + bytes(3072) for i in range(3)]

    def parse(self):
        from fedcohort.datasets import load

        folder = self.folder / "cifar10"
        folder.mkdir(exist_ok=True)
        for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
            shutil.copyfile(self.path, folder / name)
        load("cifar10", self.folder)


class Femnist(Target):
    name = "femnist"

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

        (self.folder / "femnist").mkdir(exist_ok=True)
        shutil.copyfile(self.path, self.folder / "femnist" / "femnist.npz")
        load("femnist", self.folder)


class Toml(Target):
    name, file = "toml", "x.toml"

    def examples(self):
        return [
            b"rounds = 3 \ncohort_size = 2 \nseeds = [ 0 , 1 ] \ntarget = 0.5 \n"
            b'[policy] \nname = "oort" \n[policy.options] \npreferred = 10.0 \n'
            b'[data] \ndataset = "digits" \npartition = "shards" \nclients = 6 \n'
            b"[data.options] \nper_client = 2 \n[local] \nlr = 0.1 \nepochs = 1 \n"
            b'[sweep] \n"local.lr" = [ 0.1 , 0.2 ] \n'
        ]

    def damaged(self, data, rng):
        return damaged_text(data, rng)

    def parse(self):
        from fedcohort.experiments import config, several

        if several.read(self.path) is None:
            config.read(self.path)


class SketchSpec(Target):
    name, file = "sketch-spec", "spec.toml"

    def examples(self):
        return [
            b'[sketch] \nhash = "srp" \nrows = 20 \nbits = 4 \nseed = 0 \n'
            b'[privacy] \nepsilon = 1.0 \ndelta = 0.0 \nneighbors = "replace" \n'
            b'[missing] \nnull_values = [ "?" , "NA" ] \n'
            b'[columns.age] \nkind = "number" \ncenter = 50.0 \nscale = 10.0 \n'
            b'[columns.sex] \nkind = "category" \nlevels = [ "f" , "m" ] \n'
        ]

    def damaged(self, data, rng):
        return damaged_text(data, rng)

    def parse(self):
        from fedcohort.files.spec import load_spec

        load_spec(self.path)


class Trace(Target):
    name, file = "trace", "x.jsonl"

    def examples(self):
        lines = [json.dumps({"round": i, "clients": ["a", "b"][: 1 + i % 2]}) for i in range(4)]
        return ["\n".join(lines).encode() + b"\n"]

    def damaged(self, data, rng):
        return damaged_lines(data, rng)

    def parse(self):
        from fedcohort.simulate import Trace as Availability

        trace = Availability.read(self.path, cycle=True)
        for number in range(6):
            trace.available(number, ("a", "b"), np.random.default_rng(0))


class TraceCsv(Trace):
    name, file = "trace-csv", "x.csv"

    def examples(self):
        out = io.StringIO()
        csv.writer(out).writerows([("round", "client"), (0, "a"), (0, "b"), (1, "a")])
        return [out.getvalue().encode()]

    def damaged(self, data, rng):
        return damaged_bytes(data, rng)


class FlowerReading(Target):
    """A reading from a client: its form as JSON text, a newline, its bytes."""

    name = "flower-reading"
    needs = ("flwr",)

    def examples(self):
        from fedcohort.flower.messages import pack

        out = []
        for reading in (np.float64(0.5), np.arange(5.0), example_sketch().reading()):
            data, form = pack(reading)
            out.append(form.encode() + b"\n" + data)
        return out

    def damaged(self, data, rng):
        form, _, content = data.partition(b"\n")
        if rng.random() < 0.7:
            return damaged_document(form, rng).replace(b"\n", b"") + b"\n" + content
        return form + b"\n" + damaged_bytes(content, rng)

    def parse(self):
        from fedcohort.flower.messages import unpack

        form, _, content = self.path.read_bytes().partition(b"\n")
        reading = unpack(content, form.decode("utf-8", "replace"), 1 << 20)
        from fedcohort.signals.table import is_finite

        is_finite(reading)


class FlowerRequest(Target):
    name = "flower-request"
    needs = ("flwr",)

    def examples(self):
        from fedcohort.flower.messages import Request

        options = {"race_sketch": {"rows": 10, "bits": 4, "seed": 0}, "model_sketch": {"k": 8}}
        request = Request(0, 0, "v", signals=("loss", "race_sketch"), options=options)
        return [request.to_json().encode()]

    def damaged(self, data, rng):
        return damaged_document(data, rng)

    def parse(self):
        from fedcohort.flower.messages import Request

        request = Request.from_json(self.path.read_bytes().decode("utf-8", "replace"))
        request.to_json()


class FlowerUpdate(Target):
    """A model from a client, as bytes of an .npy file in an Array that states its form."""

    name = "flower-update"
    needs = ("flwr",)

    def examples(self):
        return [saved(lambda path: np.save(path, np.ones((3, 2), np.float32)), "x.npy")]

    def damaged(self, data, rng):
        return damaged_npy(data, rng)

    def parse(self):
        from flwr.app import Array, ArrayRecord

        from fedcohort.flower.arrays import checked

        good = Array(np.ones((3, 2), np.float32))
        bad = Array(good.dtype, good.shape, good.stype, self.path.read_bytes())
        checked(ArrayRecord({"w": bad}), ArrayRecord({"w": good}))


class Policy(Target):
    """Policies as on the command line: ``name:option=value,option=value``."""

    name = "policy"

    def examples(self):
        import inspect

        from fedcohort import POLICIES

        out = []
        for name, policy in POLICIES.items():
            for option, parameter in inspect.signature(policy).parameters.items():
                out.append(f"{name}:{option}= {parameter.default}".encode())
        return out

    def damaged(self, data, rng):
        new = odd(rng)
        head, _, value = data.partition(b" ")
        if rng.random() < 0.8:
            with contextlib.suppress(ValueError):
                text = new if isinstance(new, str) else json.dumps(new)
                value = text.encode("utf-8", "surrogatepass")
        else:
            value = damaged_bytes(value, rng)
        return head + value

    def parse(self):
        from fedcohort import Session
        from fedcohort.experiments.config import NamedConfig
        from fedcohort.experiments.folder import policy_of
        from fedcohort.registry import parse_named

        text = self.path.read_bytes().decode("utf-8", "surrogateescape")
        name, options = parse_named(text)
        policy = policy_of(NamedConfig(name, options))
        session = Session(policy, cohort_size=2, seed=0)
        with contextlib.suppress(FedcohortError):
            session.begin(["a", "b", "c"], lambda signal, clients: {})


class Folder(Target):
    """The files of a run: one of them is damaged, then all are read."""

    name = "run-folder"
    needs = ("torch",)
    files = ("config.json", "rounds.jsonl", "summary.json", "federation.json")
    last = None  # the file that was damaged before; None while there are no files

    def examples(self):
        from fedcohort.experiments import config, folder

        experiment = config.parse(
            {
                "rounds": 3,
                "cohort_size": 2,
                "device": "cpu",
                "data": {"dataset": "digits", "clients": 6, "options": {"per_client": 2}},
            }
        )
        with tempfile.TemporaryDirectory() as made:
            folder.run(experiment, made)
            self.good = {name: (Path(made) / name).read_bytes() for name in self.files}
        return [name.encode() + b"\n" + self.good[name] for name in self.files]

    def damaged(self, data, rng):
        name, _, content = data.partition(b"\n")
        change = damaged_lines if name.endswith(b"jsonl") else damaged_document
        return name + b"\n" + change(content, rng)

    def parse(self):
        from fedcohort.experiments import results

        name, _, content = self.path.read_bytes().partition(b"\n")
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        for key in {name.decode(), *(self.good if self.last is None else [self.last])}:
            (run / key).write_bytes(content if key.encode() == name else self.good[key])
        self.last = name.decode()
        found = results.read(run)
        for result in found:
            result.members()
        if hasattr(found, "to_arrow"):
            found.to_arrow()


class RegistryFolder(Target):
    """A registry: one of its files is damaged, or a value in its database.

    A damaged index.json gets the folder name that its content asks for, so that what it states is
    read. The database comes whole, and with its newest rows in a write-ahead log.
    """

    name = "registry"
    needs = ("safetensors", "faiss")
    DATABASE, LOG = "registry.sqlite", "registry.sqlite-wal"
    TABLES: ClassVar = {
        "clients": ("id", "n", "epsilon", "model", "reference", "metadata", "registered"),
        "facts": ("name", "value"),
        "sketches": ("content",),
        "sqlite_sequence": ("seq",),
    }
    EXACT = 2  # clients that are compared without an index

    def examples(self):
        from fedcohort.personalize import Registry, Search

        self.made_at = self.folder / "made"
        with Registry.create(self.made_at) as registry:
            registry.set_global({"w": np.zeros(3)})
            for i in range(3):
                registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i % 2))})
            Search(registry, exact=self.EXACT)
            both = (self.DATABASE, self.LOG)
            self.logged = {name: (self.made_at / name).read_bytes() for name in both}
        with contextlib.closing(sqlite3.connect(self.made_at / self.DATABASE)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        files = [p for p in sorted(self.made_at.rglob("*")) if p.is_file() and p.name != ".lock"]
        self.good = {str(p.relative_to(self.made_at)): p.read_bytes() for p in files}
        (self.index,) = {Path(name).parent.name for name in self.good if "index" in name}
        more = [self.DATABASE] * len(self.good)
        found = {**self.good, self.LOG: self.logged[self.LOG]}
        return [name.encode() + b"\n" + found[name] for name in (*found, *more)]

    def damaged(self, data, rng):
        name, _, content = data.partition(b"\n")
        if name == self.DATABASE.encode() and rng.random() < 0.7:
            content = self.with_odd_value(content, rng)
        elif name.endswith(b".json"):
            content = damaged_document(content, rng)
            if rng.random() < 0.8:
                name = b"index/%s/index.json" % hashlib.sha256(content).hexdigest()[:16].encode()
        else:
            content = (damaged_npy if name.endswith(b".npy") else damaged_bytes)(content, rng)
        return name + b"\n" + content

    def with_odd_value(self, content, rng):
        """Return the database with an odd value in some rows of a table."""
        table = list(self.TABLES)[rng.integers(4)]
        column = self.TABLES[table][rng.integers(len(self.TABLES[table]))]
        value = odd(rng)
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
        change = f"UPDATE {table} SET {column} = ? WHERE {rows}"
        return changed_database(content, change, value, int(rng.integers(5)))

    def parse(self):
        data = self.path.read_bytes()
        name, _, content = data.partition(b"\n")
        place = self.folder / "registry"
        self.lay_out(place, name.decode("utf-8", "replace"), content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.act(place, np.random.default_rng(zlib.crc32(data)))

    def lay_out(self, place, name, content):
        """Write the registry with the damaged file; files that are never changed are linked."""
        index = name.split("/")[1] if name.endswith("index.json") else self.index
        database = self.logged[self.DATABASE] if name == self.LOG else self.good[self.DATABASE]
        if index != self.index:
            sql = "UPDATE facts SET value = ? WHERE name = 'index'"
            database = changed_database(database, sql, json.dumps(index))
        shutil.rmtree(place, ignore_errors=True)
        names = {path: path.replace(self.index, index) for path in self.good}
        for folder in sorted({os.path.dirname(path) for path in names.values()}):
            os.makedirs(f"{place}/{folder}")
        for path in names.keys() - {self.DATABASE}:
            os.link(f"{self.made_at}/{path}", f"{place}/{names[path]}")
        (place / self.DATABASE).write_bytes(database)
        (place / name).unlink(missing_ok=True)
        (place / name).write_bytes(content)

    def act(self, place, rng):
        """Open the registry and do something with it; costly things less often."""
        from fedcohort.personalize import ColdStart, Registry, Search, check

        with Registry(place) as registry:
            acts = (
                lambda: check(registry),
                lambda: [registry.model(entry.client) for entry in registry.entries()],
                lambda: registry.global_model(),
                lambda: Search(registry, exact=self.EXACT).nearest(example_sketch(seed=99), 2),
                lambda: registry.add("new", example_sketch(seed=50), {"w": np.ones(3)}),
                lambda: ColdStart(registry, search=Search(registry, exact=self.EXACT)).advise(
                    example_sketch(seed=99)
                ),
                lambda: Search(registry, exact=self.EXACT).rebuild(),
            )
            with contextlib.suppress(FedcohortError):
                acts[rng.choice(len(acts), p=[0.2, 0.2, 0.1, 0.3, 0.16, 0.02, 0.02])]()


def changed_database(content, sql, *values):
    """Return the bytes of a database after a statement, if it can be carried out."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(content)
        with contextlib.suppress(sqlite3.Error):
            db.execute(sql, values)
            db.commit()
        return db.serialize()


TARGETS = {
    target.name: target
    for target in (
        Sketch,
        Checkpoint,
        Budget,
        Idx,
        Npy,
        Npz,
        Arrow,
        Feather,
        Parquet,
        Csv,
        Cifar,
        Femnist,
        Toml,
        SketchSpec,
        Trace,
        TraceCsv,
        FlowerReading,
        FlowerRequest,
        FlowerUpdate,
        Policy,
        Folder,
        RegistryFolder,
    )
}


class Progress:
    """Three counters in memory that a child shares with its parent, and its errors in a file.

    They outlive a crash of the child: the parent sees in which trial it happened.
    """

    def __init__(self, folder):
        self.counters = mmap.mmap(-1, 24)
        self.errors = Path(folder) / "errors.jsonl"

    def __getitem__(self, at):
        return struct.unpack_from("<q", self.counters, 8 * at)[0]

    def __setitem__(self, at, value):
        struct.pack_into("<q", self.counters, 8 * at, value)

    def note(self, error, trial):
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        what = {"error": f"{type(error).__name__} at {place}", "trial": trial}
        with self.errors.open("a") as file:
            file.write(json.dumps({**what, "message": str(error)[:200]}) + "\n")


TRIAL, REFUSED, ACCEPTED = range(3)
COUNTS = ("trials", "refused", "accepted", "crashes", "seconds", "cpu_seconds")


def limit_memory():
    status = Path("/proc/self/status").read_text()
    held = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def child(target, seed, trials, until, progress):
    """Run trials, each with its own random numbers, until they or the time are over."""
    examples = target.examples() if target.made is None else target.made
    for data in examples:  # everything is imported
        target.write(data)
        with contextlib.suppress(FedcohortError):
            target.parse()
    limit_memory()
    signal.signal(signal.SIGALRM, _too_slow)
    for trial in trials:
        if time.monotonic() > until:
            return
        progress[TRIAL] = trial
        rng = np.random.default_rng([seed, trial])
        target.write(target.damaged(examples[rng.integers(len(examples))], rng))
        signal.alarm(SECONDS)
        try:
            target.parse()
            progress[ACCEPTED] += 1
        except FedcohortError:
            progress[REFUSED] += 1
        except BaseException as error:
            progress.note(error, trial)
        finally:
            signal.alarm(0)


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def fork(target, seed, trials, until, progress):
    process = os.fork()
    if process == 0:
        status = 70
        try:
            child(target, seed, trials, until, progress)
            status = 0
        except BaseException as error:
            progress.note(error, progress[TRIAL])
        finally:
            os._exit(status)
    return process


class Worker:
    """A child that runs every `step`-th trial, and is started again behind a crash."""

    def __init__(self, target, seed, trials, until, keep):
        self.target, self.seed, self.trials, self.until = target, seed, trials, until
        self.keep, self.progress = keep, Progress(target.folder)
        self.peak = self.crashes = self.cpu = 0
        self.start(trials)

    def start(self, trials):
        self.progress[TRIAL] = trials.start
        self.process = fork(self.target, self.seed, trials, self.until, self.progress)

    def ended(self, status, usage):
        """Take note of the end of the child; return whether it is over."""
        self.peak = max(self.peak, usage.ru_maxrss / 1024)
        self.cpu += usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return True
        trial = self.progress[TRIAL]
        if code != 70:
            self.crashes += 1
            with self.progress.errors.open("a") as file:
                file.write(json.dumps({"error": f"exit status {code}", "trial": trial}) + "\n")
            self.keep_input(trial)
        rest = range(trial + self.trials.step, self.trials.stop, self.trials.step)
        if code == 70 or not rest or time.monotonic() > self.until:
            return True
        self.start(rest)
        return False

    def keep_input(self, trial):
        file, name = self.target.path, f"crash-{self.target.name}-{self.seed}-{trial}"
        if self.keep is not None and file.exists():
            Path(self.keep).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, Path(self.keep) / name)


def run(name, *, seed=0, count=10**9, seconds=10.0, jobs=1, first=0, keep=None):
    """Run `count` trials of one parser in `jobs` children, and return what came out."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory) as root:
        target = TARGETS[name](root)
        if "pyarrow" not in target.needs:  # its threads do not survive a fork
            target.made = target.examples()
        parts = [range(first + j, first + count, jobs) for j in range(min(jobs, count))]
        until = began + seconds
        workers = [Worker(target.elsewhere(), seed, part, until, keep) for part in parts]
        running = {worker.process: worker for worker in workers}
        while running:
            process, status, usage = os.wait4(-1, 0)
            worker = running.pop(process, None)
            if worker is not None and not worker.ended(status, usage):
                running[worker.process] = worker
        result = gathered(name, seed, workers)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def gathered(name, seed, workers):
    errors, noted = {}, 0
    for worker in workers:
        if worker.progress.errors.exists():
            for line in worker.progress.errors.read_text().splitlines():
                found, noted = json.loads(line), noted + 1
                known = errors.setdefault(found.pop("error"), {"count": 0, "seed": seed, **found})
                known["count"] += 1
    refused, accepted = (sum(w.progress[at] for w in workers) for at in (REFUSED, ACCEPTED))
    return {
        "target": name,
        "trials": refused + accepted + noted,
        "refused": refused,
        "accepted": accepted,
        "crashes": sum(worker.crashes for worker in workers),
        "errors": errors,
        "next": max(worker.progress[TRIAL] for worker in workers) + 1,
        "peak_mb": round(max(worker.peak for worker in workers)),
        "cpu_seconds": round(sum(worker.cpu for worker in workers), 1),
    }


def joined(before, now):
    """Add the trials of an earlier result file to those of now."""
    if before is None:
        return now
    errors = dict(before["errors"])
    for name, found in now["errors"].items():
        count = errors.get(name, {"count": 0})["count"] + found["count"]
        errors[name] = {**found, "count": count}
    added = {k: before[k] + now[k] for k in COUNTS}
    return {**now, **added, "errors": errors, "peak_mb": max(before["peak_mb"], now["peak_mb"])}


class Result:
    """Counts by parser; written after each parser, so that an interruption leaves what there is."""

    def __init__(self, out, wanted):
        self.out, self.rows, self.made = out, {}, []
        if out and Path(out).exists():
            self.merge(out)
        self.left_out = {n: missing for n in wanted if (missing := TARGETS[n].missing())}
        for name, missing in self.left_out.items():
            print(f"left out: {name} needs {', '.join(missing)}", file=sys.stderr)

    def merge(self, path):
        """Add the trials of a result file."""
        held = json.loads(Path(path).read_text())
        made = held["provenance"]
        self.made += made if isinstance(made, list) else [made]
        for row in held["result"]["parsers"]:
            known = self.rows.get(row["target"])
            then = row["next"] if known is None else known["next"]
            self.rows[row["target"]] = {**joined(known, row), "next": then}

    def add(self, row):
        """Add what a run of this process counted."""
        from provenance import write

        self.rows[row["target"]] = joined(self.rows.get(row["target"]), row)
        if self.out:
            write(self.out, self.content(), earlier=self.made)

    def content(self):
        parsers = [self.rows[name] for name in TARGETS if name in self.rows]
        return {"parsers": parsers, "left out": self.left_out}

    def save_merged(self):
        """Write what was merged, without a run of this process."""
        merged = {"provenance": self.made, "result": self.content()}
        Path(self.out).write_text(json.dumps(merged, indent=1) + "\n")


def warm_up():
    """Import what the parsers need, once for all children."""
    for name in ("cli.common", "experiments.results", "flower.messages", "personalize"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"fedcohort.{name}")
    from fedcohort.sketch.race import distance

    distance(example_sketch(), example_sketch(seed=1), "mmd")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated parsers of {', '.join(TARGETS)} [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--count", type=int, default=10**6, help="trials per parser [10**6]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together [60]")
    parser.add_argument("--keep", help="folder for inputs that crash a process")
    parser.add_argument("--out", help="JSON file; if it exists, its trials go on from there")
    parser.add_argument("--merge", nargs="*", default=[], help="result files of other seeds")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(TARGETS)
    if unknown := set(wanted) - set(TARGETS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    logging.disable()
    result = Result(args.out, wanted)
    for path in args.merge:
        result.merge(path)
    if args.merge and args.seconds <= 0:
        result.save_merged()
        return
    left = {n: args.count - result.rows.get(n, {"trials": 0})["trials"] for n in wanted}
    names = [n for n in wanted if n not in result.left_out and left[n] > 0]
    warm_up()
    began = time.monotonic()
    for at, name in enumerate(names):
        share = (args.seconds - (time.monotonic() - began)) / (len(names) - at)
        first = result.rows.get(name, {"next": 0})["next"]
        limits = {"count": left[name], "seconds": share, "jobs": args.jobs, "first": first}
        result.add(run(name, seed=args.seed, **limits, keep=args.keep))
        print(json.dumps(result.rows[name]), flush=True)
    sys.exit(any(row["errors"] for row in result.rows.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
