"""A folder of sketches and models with its database."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import warnings
import zlib
from random import Random
from typing import ClassVar

import numpy as np

from fedcohort.exceptions import FedcohortError

from .mutate import damaged_bytes, odd
from .target import Target, example_sketch


class RegistryFolder(Target):
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

        made = self.folder / "made"
        with Registry.create(made) as registry:
            registry.set_global({"w": np.zeros(3)})
            for i in range(3):
                registry.add(f"c{i}", example_sketch(seed=i), {"w": np.full(3, float(i % 2))})
            self.logged = {name: (made / name).read_bytes() for name in (self.DATABASE, self.LOG)}
        with contextlib.closing(sqlite3.connect(made / self.DATABASE)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        files = [p for p in sorted(made.rglob("*")) if p.is_file() and p.name != ".lock"]
        self.good = {str(p.relative_to(made)): p.read_bytes() for p in files}
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
        files = self.good | (
            {self.DATABASE: self.logged[self.DATABASE]} if name == self.LOG else {}
        )
        for path, good in {**files, name: content}.items():
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
