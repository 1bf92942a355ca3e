"""A folder of sketches and models with its database and its search index."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import warnings
import zlib
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from fedcohort.exceptions import FedcohortError

from .mutate import damaged_bytes, damaged_document, damaged_npy, odd
from .target import Target, example_sketch, write


class RegistryFolder(Target):
    """A registry: one of its files is damaged, or a value in its database.

    A damaged index.json gets the folder name that its content asks for, so that what it states is
    read. The database comes whole, and with its newest rows in a write-ahead log.
    """

    name = "registry"
    needs = ("safetensors", "faiss")
    imports = ("fedcohort.personalize", "scipy.optimize")
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
        self.files = {name: with_inode(self.made_at / name) for name in self.good}
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
        table = rng.choice(list(self.TABLES))
        column = rng.choice(self.TABLES[table])
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
        return changed_database(content, change, value, rng.randrange(5))

    def parse(self):
        data = self.path.read_bytes()
        name, _, content = data.partition(b"\n")
        place = self.folder / "registry"
        self.lay_out(place, name.decode("utf-8", "replace"), content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.act(place, Random(zlib.crc32(data)))

    def lay_out(self, place, name, content):
        """Write the registry with the damaged file; files that are never changed are linked."""
        index = name.split("/")[1] if name.endswith("index.json") else self.index
        database = self.logged[self.DATABASE] if name == self.LOG else self.good[self.DATABASE]
        if index != self.index:
            sql = "UPDATE facts SET value = ? WHERE name = 'index'"
            database = changed_database(database, sql, json.dumps(index))
        unchanged = self.files.keys() - {self.DATABASE}
        link_exactly(
            {path.replace(self.index, index): self.files[path] for path in unchanged}, place
        )
        write(place / self.DATABASE, database)
        (place / name).unlink(missing_ok=True)
        write(place / name, content)

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
                rng.choices(acts, [0.2, 0.2, 0.1, 0.3, 0.16, 0.02, 0.02])[0]()


def link_exactly(linked, place):
    """Make a folder that holds links to the given files and nothing else.

    What the last trial left as it was is kept: most of the folder.

    Parameters
    ----------
    linked : dict of path to (file, its inode)
    place : path
    """
    held = tidied(place, "", {path: inode for path, (_, inode) in linked.items()})
    for path in linked.keys() - held:
        os.makedirs(os.path.dirname(f"{place}/{path}"), exist_ok=True)
        os.link(linked[path][0], f"{place}/{path}")


def with_inode(file):
    return str(file), os.stat(file).st_ino


def tidied(place, inside, inodes):
    """Remove all files but those of these inodes from a folder, and return the paths that stay."""
    held = set()
    for entry in os.scandir(f"{place}/{inside}") if os.path.isdir(f"{place}/{inside}") else ():
        path = inside + entry.name
        if entry.is_dir(follow_symlinks=False):
            kept = tidied(place, f"{path}/", inodes)
            held |= kept
            if not kept:
                os.rmdir(entry)
        elif inodes.get(path) == entry.inode():
            held.add(path)
        else:
            os.unlink(entry)
    return held


def changed_database(content, sql, *values):
    """Return the bytes of a database after a statement, if it can be carried out."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(content)
        with contextlib.suppress(sqlite3.Error):
            db.execute(sql, values)
            db.commit()
        return db.serialize()
