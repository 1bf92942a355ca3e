"""Feed damaged files to every parser: only fedcohort's own errors may come out.

    python tests/soak/fuzz.py --seconds 60
    python tests/soak/fuzz.py --targets sketch npz --count 1000 --seed 3

Each parser runs in a child process with bounded memory, so that a crash in a library is seen and
costs nothing else. The input of every trial is written before it is parsed; after a crash it is
kept as ``crash-PARSER-SEED`` in the current folder.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
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


def example_sketch(n=50, seed=0):
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

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / self.file

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
    options: ClassVar = {"columns": ("x0", "x1", "x2"), "by": "who", "nulls": "drop"}

    def examples(self):
        import pyarrow as pa

        def save(path):
            table = example_table()
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=16)

        return [saved(save)]


class Parquet(Source):
    name, file = "parquet", "x.parquet"
    options = Arrow.options

    def examples(self):
        import pyarrow.parquet as pq

        return [
            saved(lambda path, c=c: pq.write_table(example_table(), path, compression=c))
            for c in ("none", "snappy")
        ]


class Csv(Source):
    name, file = "csv", "x.csv"
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
    files = ("config.json", "rounds.jsonl", "summary.json", "federation.json")

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
        for key, good in self.good.items():
            (run / key).write_bytes(content if key.encode() == name else good)
        found = results.read(run)
        for result in found:
            result.members()
        if hasattr(found, "to_arrow"):
            found.to_arrow()


class RegistryRows(Target):
    """A registry: a value in its database, or bytes of its database or index."""

    name = "registry"
    TABLES: ClassVar = {
        "clients": ("id", "n", "epsilon", "model", "reference", "metadata", "registered"),
        "facts": ("name", "value"),
        "sketches": ("content",),
        "sqlite_sequence": ("seq",),
    }

    def examples(self):
        from fedcohort.personalize import Registry, Search

        self.made = self.folder / "good"
        with Registry.create(self.made) as registry:
            registry.set_global({"w": np.zeros(3)})
            for i in range(12):
                registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i))})
            Search(registry, exact=10)
        with contextlib.closing(sqlite3.connect(self.made / "registry.sqlite")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("PRAGMA journal_mode = DELETE")
        return [b"x"]

    def damaged(self, data, rng):
        return str(int(rng.integers(2**31))).encode()

    def parse(self):
        from fedcohort.personalize import ColdStart, Registry, Search, check

        rng = np.random.default_rng(int(self.path.read_bytes()))
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.made, copy)
        self.harm(copy, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with Registry(copy) as registry:
                check(registry)
                acts = (
                    lambda: [registry.model(entry.client) for entry in registry.entries()],
                    lambda: ColdStart(registry, search=Search(registry, exact=10)).advise(
                        example_sketch(seed=99)
                    ),
                    lambda: registry.global_model(),
                    lambda: registry.add("new", example_sketch(seed=50), {"w": np.ones(3)}),
                    lambda: Search(registry, exact=10).rebuild(),
                )
                for act in acts:
                    with contextlib.suppress(FedcohortError):
                        act()

    def harm(self, folder, rng):
        draw = rng.random()
        if draw < 0.5:
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
            with contextlib.closing(sqlite3.connect(folder / "registry.sqlite")) as db:
                with contextlib.suppress(sqlite3.Error):
                    db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid % 5 = 0", (value,))
                    db.commit()
                with contextlib.suppress(sqlite3.Error):
                    db.execute(
                        "UPDATE facts SET value = ? WHERE name = (SELECT name FROM facts "
                        "ORDER BY name LIMIT 1 OFFSET ?)",
                        (value, int(rng.integers(5))),
                    ) if table == "facts" else None
                    db.commit()
            return
        files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
        path = files[rng.integers(len(files))]
        change = {".json": damaged_document, ".npy": damaged_npy}.get(path.suffix, damaged_bytes)
        path.write_bytes(change(path.read_bytes(), rng))


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
        Parquet,
        Csv,
        Cifar,
        Femnist,
        Toml,
        Trace,
        TraceCsv,
        FlowerReading,
        FlowerRequest,
        FlowerUpdate,
        Policy,
        Folder,
        RegistryRows,
    )
}


def child(name, seed, count, seconds, folder):
    """Run trials until `count` or `seconds` are over, and return what came out."""
    target = TARGETS[name](folder)
    examples = target.examples()
    for data in examples:  # everything is imported, and good files are accepted
        target.write(target.damaged(data, np.random.default_rng(0)) if name == "registry" else data)
        with contextlib.suppress(FedcohortError):
            target.parse()
    status = Path("/proc/self/status").read_text()
    held = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    result = {"target": name, "trials": 0, "refused": 0, "accepted": 0, "errors": {}}
    started = time.monotonic()
    while result["trials"] < count and time.monotonic() < started + seconds:
        rng = np.random.default_rng([seed, result["trials"]])
        data = examples[rng.integers(len(examples))]
        target.write(target.damaged(data, rng))
        result["trials"] += 1
        signal.alarm(SECONDS)
        try:
            target.parse()
            result["accepted"] += 1
        except FedcohortError:
            result["refused"] += 1
        except BaseException as error:
            _note(result, target, error, [seed, result["trials"] - 1])
        finally:
            signal.alarm(0)
    result["seconds"] = time.monotonic() - started
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def _too_slow(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def _note(result, target, error, seed):
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "fedcohort" in f.filename and "soak" not in f.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    known = result["errors"].setdefault(
        f"{type(error).__name__} at {place}",
        {"count": 0, "message": str(error)[:200], "seed": seed},
    )
    known["count"] += 1


def run(name, *, seed, count=10**9, seconds=10.0, keep=None):
    """Fork a child for one parser, and return its result; a crash is an error like others."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        result = Path(folder) / "result.json"
        process = os.fork()
        if process == 0:
            status = 70
            try:
                result.write_text(json.dumps(child(name, seed, count, seconds, folder)))
                status = 0
            except BaseException as error:
                result.write_text(repr(error)[:500])
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status == 0:
            return json.loads(result.read_text())
        file = Path(folder) / TARGETS[name].file
        if keep is not None and file.exists():
            shutil.copyfile(file, Path(keep) / f"crash-{name}-{seed}")
        message = result.read_text() if result.exists() else ""
        crash = {f"exit status {status}": {"count": 1, "message": message}}
        return {"target": name, "trials": 0, "errors": crash}


def warm_up():
    """Import what the parsers need, once for all children."""
    import fedcohort.cli.common
    import fedcohort.experiments.results
    import fedcohort.flower.messages
    import fedcohort.personalize

    return fedcohort


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9, help="trials per parser, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together")
    parser.add_argument("--out", help="append results as JSON lines")
    args = parser.parse_args()
    logging.disable()
    warm_up()
    failed = False
    for name in args.targets:
        share = args.seconds / len(args.targets)
        result = run(name, seed=args.seed, count=args.count, seconds=share, keep=".")
        line = json.dumps(result)
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")
        failed |= bool(result["errors"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
