"""What every parser under test has in common."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from .mutate import damaged_bytes


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


def write(path, data):
    """Write a file in less time than `Path.write_bytes` takes."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


class Target:
    """A parser: examples of what it reads, how they are damaged, and the parser itself."""

    name = ""
    file = "file"
    needs: ClassVar[tuple[str, ...]] = ()  # packages; without them the parser is left out
    imports: ClassVar[tuple[str, ...]] = ()  # slow modules of fedcohort, imported before the fork
    made = None  # the examples, where they are made before the fork
    handle = None  # the open file, once it is written

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / self.file

    def elsewhere(self):
        """Return this parser with the same examples and a folder of its own."""
        other = copy.copy(self)
        other.folder = Path(tempfile.mkdtemp(dir=self.folder))
        other.path = other.folder / self.file
        other.path.parent.mkdir(exist_ok=True)
        other.prepare()
        return other

    def prepare(self):
        """Make what lies beside the file."""

    @classmethod
    def missing(cls):
        return [name for name in cls.needs if importlib.util.find_spec(name) is None]

    def examples(self):
        raise NotImplementedError

    def damaged(self, data, rng):
        return damaged_bytes(data, rng)

    def write(self, data):
        """Write the file in place; a parser that replaces its file needs another way."""
        if self.handle is None:
            self.handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(self.handle, data, 0)
        os.ftruncate(self.handle, len(data))

    def parse(self):
        raise NotImplementedError
