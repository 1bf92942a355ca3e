"""Every parser of fedcohort, with examples of what it reads."""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.optimize  # noqa: F401
from flwr.app import Array, ArrayRecord

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
    """A parser; each file or folder that `write` puts into a folder is an example for `read`."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


def content(**files):
    """Return what writes files of the given content."""

    def write(folder):
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write


@cache
def example_sketch(n=50, seed=0):
    """Return a sketch that nobody changes."""
    sketch = RaceSketch.srp(dim=4, rows=6, bits=3)
    sketch.add(np.random.default_rng(seed).normal(size=(n, 4)))
    return sketch


def write_sketches(folder):
    example_sketch().save(folder / "exact")
    example_sketch().privatize(1.0, rng=np.random.default_rng(0)).save(folder / "private")


def read_sketch(path):
    sketch = load_sketch(path)
    if sketch.spec == example_sketch().spec and sketch.n >= 2:
        distance(sketch, example_sketch(), "mmd")


def session_of(policy):
    return Session(make("policy", policy, POLICIES), cohort_size=2, seed=0)


def write_checkpoints(folder):
    for policy in ("uniform", "oort", "fedacs", "active-fl"):
        session = session_of(policy)
        for _ in range(3):
            drive(session, [f"c{i}" for i in range(6)])
        storage.save(folder / policy, session.state_dict())


def read_checkpoint(path):
    storage.restore(path, session_of(path.name).load_state_dict, storage.load(path))


HALF = noise_for(10, 0.5, 0.0, "add-remove")


def ledger(path):
    return BudgetLedger(path / "budget.json", 10.0, 1e-6)


def write_budget(folder):
    (folder / "owner").mkdir()
    ledger(folder / "owner").charge_and_store([HALF], lambda: b"noise", request="r1")


def read_budget(path):
    ledger(path).charge(HALF)
    ledger(path).spent()


@cache
def empty_sketch(dim):
    return RaceSketch.srp(dim=dim, rows=4, bits=3)


def read_source(path, **options):
    """Sketch a data file, by client where it has clients."""
    source = open_source(path, Want(**options))
    if source.dim is not None and source.dim < 10_000:
        for _ in sketch_clients(source, empty_sketch(source.dim)):
            pass


IDX = struct.pack(">4I", 0x0803, 5, 3, 3) + bytes(range(45))


def write_npz(folder):
    arrays = {"x": np.eye(5), "who": np.array(["ann", "bob", "ann", "eve", "bob"])}
    np.savez(folder / "x.npz", **arrays)
    np.savez_compressed(folder / "y.npz", **arrays)


def write_npy(array):
    return lambda folder: np.save(folder / "x.npy", array)


FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(16, 3)), columns=["x0", "x1", "x2"])
FRAME.loc[::9, "x2"] = np.nan
FRAME["who"] = [f"client {i % 2}" for i in range(16)]


def write_arrow(folder):
    table = pa.Table.from_pandas(FRAME)
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=12)


def write_feather(folder):
    for compression in ("uncompressed", "lz4"):
        FRAME.to_feather(folder / f"{compression}.feather", compression=compression)


def write_parquet(folder):
    for compression in (None, "snappy"):
        FRAME.to_parquet(folder / f"{compression}.parquet", compression=compression)


def write_sqlite(folder):
    with contextlib.closing(sqlite3.connect(folder / "x.sqlite")) as base:
        FRAME.to_sql("t", base, index=False)


TABLES = {
    "arrow": write_arrow,
    "feather": write_feather,
    "parquet": write_parquet,
    "csv": lambda folder: FRAME.to_csv(folder / "x.csv", index=False),
    "jsonl": lambda folder: FRAME.to_json(folder / "x.jsonl", orient="records", lines=True),
    "xlsx": lambda folder: FRAME.to_excel(folder / "x.xlsx", index=False),
    "sqlite": write_sqlite,
}
read_table = partial(read_source, columns=("x0", "x1", "x2"), by="who", nulls="drop")


def write_femnist(folder):
    (folder / "femnist").mkdir()
    bytes_ = {"images": np.zeros((6, 28, 28), "u1"), "labels": np.arange(6, dtype="u1")}
    writers = {"writers": np.array([0, 1] * 3, "u2"), "writer_ids": np.array(["a", "b"])}
    np.savez(folder / "femnist/femnist.npz", **bytes_, **writers, is_test=np.arange(6) > 4)


PAPERS = Path(compare.__file__).with_name("papers").glob("*.toml")
SPEC = b"""sketch = { hash = "srp" , rows = 20 , bits = 4 , seed = 0 }
privacy = { epsilon = 1.0 , delta = 0.0 , neighbors = "replace" }
missing = { null_values = [ "?" , "NA" ] }
[columns]
age = { kind = "number" , center = 50.0 , scale = 10.0 }
sex = { kind = "category" , levels = [ "f" , "m" ] }
"""


def read_trace(path):
    trace, rng = Trace.read(path), np.random.default_rng(0)
    for number in range(6):
        trace.available(number, ("a", "b"), rng)


def write_policies(folder):
    """Write policies as on the command line: ``name:option=value``."""
    for name, policy in POLICIES.items():
        for option, parameter in inspect.signature(policy).parameters.items():
            if parameter.default is not None:
                (folder / f"{name} {option}").write_text(f"{name}:{option}={parameter.default}")


def read_policy(path):
    session = session_of(path.read_bytes().decode("utf-8", "surrogateescape"))
    with contextlib.suppress(FedcohortError):
        session.begin(["a", "b", "c"], lambda signal, clients: {})


READINGS = {
    "number": to_bytes(np.float64(0.5)),
    "vector": to_bytes(np.arange(5.0)),
    "sketch": to_bytes(example_sketch().reading()),
}
OPTIONS = {"race_sketch": {"rows": 10, "bits": 4, "seed": 0}, "model_sketch": {"k": 8}}
REQUEST = Request(0, 0, "v", signals=("loss", "race_sketch"), options=OPTIONS)


def read_reading(path):
    reading = from_bytes(path.read_bytes(), 1 << 20)
    Signals().record("insight", {"client": reading}, 0)


def read_request(path):
    Request.from_json(path.read_bytes().decode("utf-8", "replace")).to_json()


def read_update(path):
    """Read a model from a client: an .npy file in an Array that states its form."""
    stated = Array(np.ones((3, 2), np.float32))
    bad = Array(stated.dtype, stated.shape, stated.stype, path.read_bytes())
    checked(ArrayRecord({"w": bad}), ArrayRecord({"w": stated}))


def write_run(folder):
    data = {"dataset": "digits", "clients": 6, "options": {"per_client": 2}}
    small = {"rounds": 3, "cohort_size": 2, "device": "cpu", "data": data}
    run.run(config.parse(small), folder / "run")


def write_registries(folder):
    """Write a registry, and one whose newest rows are in a log."""
    logged = folder / "logged"
    logged.mkdir()
    with Registry.create(folder / "warm") as registry:
        registry.set_global({"w": np.zeros(3)})
        for i in range(3):
            registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i % 2))})
        for path in (folder / "warm").glob("*.sqlite*"):
            (logged / path.name).write_bytes(path.read_bytes())
    with contextlib.closing(sqlite3.connect(folder / "warm" / "registry.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")


def read_registry(path):
    """Open the registry and do everything with it, whatever of it is refused."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning), Registry(path) as held:
        for act in (
            lambda: check(held),
            lambda: [held.model(entry.client) for entry in held.entries()],
            lambda: held.global_model(),
            lambda: nearest(held, example_sketch(seed=99), 2),
            lambda: ColdStart(held).advise(example_sketch(seed=99)),
            lambda: held.add("new", example_sketch(seed=50), {"w": np.ones(3)}),
        ):
            with contextlib.suppress(FedcohortError):
                act()


PARSERS = {
    "sketch": Parser(write_sketches, read_sketch),
    "checkpoint": Parser(write_checkpoints, read_checkpoint),
    "budget": Parser(write_budget, read_budget),
    "idx": Parser(content(**{"x-idx3-ubyte": IDX}), read_source),
    "npy": Parser(write_npy(np.eye(5)), read_source),
    "npz": Parser(write_npz, partial(read_source, columns=("x",), by="who")),
    **{suffix: Parser(write, read_table) for suffix, write in TABLES.items()},
    "femnist": Parser(write_femnist, lambda folder: load_data("femnist", folder.parent)),
    "toml": Parser(content(**{path.name: path.read_bytes() for path in PAPERS}), compare.read),
    "sketch-spec": Parser(content(**{"spec.toml": SPEC}), load_spec),
    "trace": Parser(content(trace=b"round,client\r\n1,a\r\n1,b\r\n2,a\r\n"), read_trace),
    "policy": Parser(write_policies, read_policy),
    "flower-reading": Parser(content(**READINGS), read_reading),
    "flower-request": Parser(content(request=REQUEST.to_json().encode()), read_request),
    "flower-update": Parser(write_npy(np.ones((3, 2), np.float32)), read_update),
    "run-folder": Parser(write_run, lambda folder: results.read(folder).to_arrow()),
    "registry": Parser(write_registries, read_registry),
}
