"""What every parser under test has in common."""

from __future__ import annotations

import copy
import importlib.util
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
