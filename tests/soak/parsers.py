"""Every parser of fedcohort, with examples of what it reads and the ways to damage them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import sqlite3
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import scipy.optimize  # noqa: F401
from flwr.app import Array, ArrayRecord
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

from fedcohort import POLICIES, Session, storage
from fedcohort.datasets import load as load_data
from fedcohort.exceptions import FedcohortError
from fedcohort.experiments import compare, config, results, run
from fedcohort.files.sketching import load_sketch, sketch_clients
from fedcohort.files.source import Want, open_source
from fedcohort.files.spec import load_spec
from fedcohort.flower.wire import Request, checked, from_bytes, to_bytes
from fedcohort.personalize import ColdStart, Registry, check, nearest
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for
from fedcohort.registry import make
from fedcohort.signals.table import Signals
from fedcohort.simulate.clock import Trace
from fedcohort.sketch.distances import distance
from fedcohort.sketch.race import RaceSketch
from fedcohort.testing import drive


@dataclass(frozen=True)
class Parser:
    """A parser of the file of this name in a folder of its own."""

    examples: Callable[[Path], list[bytes]]  # from the folder
    parse: Callable[[Path], object]  # from the file
    damaged: Callable[[bytes, Random], bytes] = damaged_bytes
    file: str = "file"


@cache
def example_sketch(n=50, seed=0):
    """Return a sketch that nobody changes."""
    sketch = RaceSketch.srp(dim=4, rows=6, bits=3)
    sketch.add(np.random.default_rng(seed).normal(size=(n, 4)))
    return sketch


def saved(save, name="file"):
    """Return what a function writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save(path)
        return path.read_bytes()


def sketches(folder):
    private = example_sketch().privatize(1.0, rng=np.random.default_rng(0))
    return [example_sketch().to_bytes(), private.to_bytes()]


def parse_sketch(path):
    sketch = load_sketch(path)
    if sketch.spec == example_sketch().spec and sketch.n >= 2:
        distance(sketch, example_sketch(), "mmd")


def session_of(policy):
    return Session(make("policy", policy, POLICIES), cohort_size=2, seed=0)


CHECKPOINTED = {repr(POLICIES[p]()): p for p in ("uniform", "oort", "fedacs", "active-fl")}


def checkpoints(folder):
    states = []
    for policy in CHECKPOINTED.values():
        session = session_of(policy)
        for _ in range(3):
            drive(session, [f"c{i}" for i in range(6)])
        states.append(session.state_dict())
    assert {s["policy"] for s in states} == set(CHECKPOINTED)
    return [saved(lambda path, s=state: storage.save(path, s)) for state in states]


def parse_checkpoint(path):
    """Give what can be read to a session of the policy that it names, by default uniform."""
    state = storage.load(path)
    stated = state.get("policy")
    policy = CHECKPOINTED.get(stated, "uniform") if isinstance(stated, str) else "uniform"
    storage.restore(path, session_of(policy).load_state_dict, state)


HALF = noise_for(10, 0.5, 0.0, "add-remove")


def budgets(folder):
    def save(path):
        ledger = BudgetLedger(path, 10.0, 1e-6)
        ledger.charge_and_store([HALF], lambda: b"noise", request="r1")

    return [saved(save)]


def parse_budget(path):
    ledger = BudgetLedger(path, 10.0, 1e-6)
    ledger.charge(HALF)
    ledger.spent()


@cache
def empty_sketch(dim):
    return RaceSketch.srp(dim=dim, rows=4, bits=3)


def parse_source(path, **options):
    """Sketch a data file, by client where it has clients."""
    want = Want(**options)
    source = open_source(path, want)
    if source.dim is not None and source.dim < 10_000:
        for _ in sketch_clients(source, empty_sketch(source.dim)):
            pass


IDX = b"\x00\x00\x08\x03" + np.array([5, 3, 3], ">u4").tobytes() + bytes(range(45))


def npz(folder):
    arrays = {"x": np.eye(5), "who": np.array(["ann", "bob", "ann", "eve", "bob"])}
    saves = (np.savez, np.savez_compressed)
    return [saved(lambda path, save=save: save(path, **arrays), "x.npz") for save in saves]


def save_arrow(table, path):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=12)


def save_feather(table, path, compression):
    pa.feather.write_feather(table, str(path), compression)


def table_parser(file, *saves):
    """Return the parser of a format of tables, which are written in each of some ways."""
    rng = np.random.default_rng(0)
    columns = {f"x{i}": rng.normal(size=16) for i in range(3)}
    columns["who"] = [f"client {i % 2}" for i in range(16)]
    columns["x2"] = pa.array([None if i % 9 == 0 else float(i) for i in range(16)])
    examples = [saved(partial(save, pa.table(columns)), file) for save in saves]
    parse = partial(parse_source, columns=("x0", "x1", "x2"), by="who", nulls="drop")
    return Parser(lambda folder: examples, parse, file=file)


def cifar(folder):
    """All batches are the same file."""
    path = folder / "cifar10" / "test_batch.bin"
    path.touch()
    for i in range(1, 6):
        with contextlib.suppress(FileExistsError):
            os.link(path, path.with_name(f"data_batch_{i}.bin"))
    return [bytes([i % 10]) + bytes(3072) for i in range(3)]


def femnist(folder):
    arrays = {
        "images": np.zeros((6, 28, 28), np.uint8),
        "labels": np.arange(6, dtype=np.uint8),
        "writers": (np.arange(6) % 2).astype(np.uint16),
        "writer_ids": np.array(["a", "b"]),
        "is_test": np.arange(6) % 3 == 0,
    }
    return [saved(lambda path: np.savez(path, **arrays), "femnist.npz")]


EXPERIMENT = b"""rounds = 3
cohort_size = 2
seeds = [ 0 , 1 ]
target = 0.5
[policy]
name = "power-of-choice"
[policy.options]
d = 4
[data]
dataset = "digits"
partition = "shards"
clients = 6
[data.options]
per_client = 2
[local]
lr = 0.1
epochs = 1
[sweep]
"local.lr" = [ 0.1 , 0.2 ]
"""
SPEC = b"""[sketch]
hash = "srp"
rows = 20
bits = 4
seed = 0
[privacy]
epsilon = 1.0
delta = 0.0
neighbors = "replace"
[missing]
null_values = [ "?" , "NA" ]
[columns.age]
kind = "number"
center = 50.0
scale = 10.0
[columns.sex]
kind = "category"
levels = [ "f" , "m" ]
"""


def parse_trace(path):
    trace, rng = Trace.read(path), np.random.default_rng(0)
    for number in range(6):
        trace.available(number, ("a", "b"), rng)


def policies(folder):
    """Policies as on the command line: ``name:option=value``."""
    return [
        f"{name}:{option}= {parameter.default}".encode()
        for name, policy in POLICIES.items()
        for option, parameter in inspect.signature(policy).parameters.items()
        if parameter.default is not None
    ]


def damaged_policy(data, rng):
    new = odd(rng)
    head, _, value = data.partition(b" ")
    if rng.random() >= 0.8:
        return head + damaged_bytes(value, rng)
    with contextlib.suppress(ValueError):
        text = new if isinstance(new, str) else json.dumps(new)
        value = text.encode("utf-8", "surrogatepass")
    return head + value


def parse_policy(path):
    session = session_of(path.read_bytes().decode("utf-8", "surrogateescape"))
    with contextlib.suppress(FedcohortError):
        session.begin(["a", "b", "c"], lambda signal, clients: {})


def readings(folder):
    """Readings from a client."""
    return list(map(to_bytes, (np.float64(0.5), np.arange(5.0), example_sketch().reading())))


def parse_reading(path):
    reading = from_bytes(path.read_bytes(), 1 << 20)
    Signals().record("insight", {"client": reading}, 0)


def requests(folder):
    options = {"race_sketch": {"rows": 10, "bits": 4, "seed": 0}, "model_sketch": {"k": 8}}
    request = Request(0, 0, "v", signals=("loss", "race_sketch"), options=options)
    return [request.to_json().encode()]


def parse_request(path):
    Request.from_json(path.read_bytes().decode("utf-8", "replace")).to_json()


def parse_update(path):
    """Read a model from a client: an .npy file in an Array that states its form."""
    stated = Array(np.ones((3, 2), np.float32))
    bad = Array(stated.dtype, stated.shape, stated.stype, path.read_bytes())
    checked(ArrayRecord({"w": bad}), ArrayRecord({"w": stated}))


# A run and a registry: an example is the name of one file, a newline and its content. The others
# are written as they were, then all are read.
RUN_FILES = ("config.json", "rounds.jsonl", "federation.json")


@cache
def good_run():
    data = {"dataset": "digits", "clients": 6, "options": {"per_client": 2}}
    small = {"rounds": 3, "cohort_size": 2, "device": "cpu", "data": data}
    with tempfile.TemporaryDirectory() as place:
        run.run(config.parse(small), place)
        return {name: (Path(place) / name).read_bytes() for name in RUN_FILES}


def runs(folder):
    return [name.encode() + b"\n" + content for name, content in good_run().items()]


def damaged_run(data, rng):
    name, _, content = data.partition(b"\n")
    change = damaged_lines if name.endswith(b"jsonl") else damaged_document
    return name + b"\n" + change(content, rng)


def parse_run(path):
    name, _, content = path.read_bytes().partition(b"\n")
    folder = path.with_name("run")
    folder.mkdir(exist_ok=True)
    for key, good in good_run().items():
        (folder / key).write_bytes(content if key.encode() == name else good)
    results.read(folder).to_arrow()


DATABASE, LOG = "registry.sqlite", "registry.sqlite-wal"
TABLES = {
    "clients": ("id", "n", "privacy", "model", "reference", "metadata", "registered", "sketch"),
    "facts": ("name", "value"),
    "counts": ("n", "noise", "counts"),
    "models": ("digest", "content"),
}


@cache
def good_registry():
    """Return the files of a registry; and its database with the newest rows in a log."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "warm"
        with Registry.create(place) as registry:
            registry.set_global({"w": np.zeros(3)})
            for i in range(3):
                registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i % 2))})
            logged = {name: (place / name).read_bytes() for name in (DATABASE, LOG)}
        with contextlib.closing(sqlite3.connect(place / DATABASE)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        files = [p for p in sorted(place.rglob("*")) if p.is_file() and p.name != ".lock"]
        return {str(p.relative_to(place)): p.read_bytes() for p in files}, logged


def registries(folder):
    good, logged = good_registry()
    content = {**good, LOG: logged[LOG]}
    names = [*content, *[DATABASE] * len(content)]
    return [name.encode() + b"\n" + content[name] for name in names]


def damaged_registry(data, rng):
    name, _, content = data.partition(b"\n")
    if name == DATABASE.encode() and rng.random() < 0.7:
        return name + b"\n" + with_odd_value(content, rng)
    return name + b"\n" + damaged_bytes(content, rng)


def with_odd_value(content, rng):
    """Return the database with an odd value in some rows of a table, if SQLite takes it."""
    table = rng.choice(list(TABLES))
    column, value = rng.choice(TABLES[table]), odd(rng)
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
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {rows}", (value, rng.randrange(5)))
            db.commit()
        return db.serialize()


def parse_registry(path):
    """Open the registry and do something with it; costly things less often."""
    data = path.read_bytes()
    name, _, content = data.partition(b"\n")
    name, place = name.decode("utf-8", "replace"), path.with_name("registry")
    shutil.rmtree(place, ignore_errors=True)
    good, logged = good_registry()
    log = {DATABASE: logged[DATABASE]} if name == LOG else {}
    for file, kept in {**good, **log, name: content}.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(kept)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning), Registry(place) as held:
        acts = (
            lambda: check(held),
            lambda: [held.model(entry.client) for entry in held.entries()],
            lambda: held.global_model(),
            lambda: nearest(held, example_sketch(seed=99), 2),
            lambda: held.add("new", example_sketch(seed=50), {"w": np.ones(3)}),
            lambda: ColdStart(held).advise(example_sketch(seed=99)),
        )
        with contextlib.suppress(FedcohortError):
            Random(zlib.crc32(data)).choices(acts, [0.2, 0.2, 0.1, 0.3, 0.16, 0.04])[0]()


def npy(array):
    return lambda folder: [saved(lambda path: np.save(path, array), "x.npy")]


PARSERS = {
    "sketch": Parser(sketches, parse_sketch, damaged_sketch),
    "checkpoint": Parser(checkpoints, parse_checkpoint, damaged_zip),
    "budget": Parser(budgets, parse_budget, damaged_document),
    "idx": Parser(lambda folder: [IDX], parse_source, file="x-idx3-ubyte"),
    "npy": Parser(npy(np.eye(5)), parse_source, damaged_npy, "x.npy"),
    "npz": Parser(npz, partial(parse_source, columns=("x",), by="who"), damaged_zip, "x.npz"),
    "arrow": table_parser("x.arrow", save_arrow),
    "feather": table_parser(
        "x.feather", *(partial(save_feather, compression=c) for c in ("uncompressed", "lz4"))
    ),
    "parquet": table_parser(
        "x.parquet",
        *(partial(pa.parquet.write_table, compression=c) for c in ("none", "snappy")),
    ),
    "csv": table_parser("x.csv", pa.csv.write_csv),
    "cifar": Parser(
        cifar, lambda path: load_data("cifar10", path.parents[1]), file="cifar10/test_batch.bin"
    ),
    "femnist": Parser(
        femnist,
        lambda path: load_data("femnist", path.parents[1]),
        damaged_zip,
        "femnist/femnist.npz",
    ),
    "toml": Parser(lambda folder: [EXPERIMENT], compare.read, damaged_text, "x.toml"),
    "sketch-spec": Parser(lambda folder: [SPEC], load_spec, damaged_text, "spec.toml"),
    "trace": Parser(lambda folder: [b"round,client\r\n1,a\r\n1,b\r\n2,a\r\n"], parse_trace),
    "policy": Parser(policies, parse_policy, damaged_policy),
    "flower-reading": Parser(readings, parse_reading, damaged_npy),
    "flower-request": Parser(requests, parse_request, damaged_document),
    "flower-update": Parser(npy(np.ones((3, 2), np.float32)), parse_update, damaged_npy),
    "run-folder": Parser(runs, parse_run, damaged_run),
    "registry": Parser(registries, parse_registry, damaged_registry),
}
