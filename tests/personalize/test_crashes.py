"""A writer that is killed leaves a registry that is whole: each write is there, or it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.personalize import Registry, check, remove_orphans

WRITER = """
import os, signal, stat, sys
import numpy as np
from fedcohort.personalize import Registry
from fedcohort.sketch.race import RaceSketch

path, point = sys.argv[1:]
sketch = RaceSketch.srp(dim=2, rows=30, bits=3)
sketch.add(np.random.default_rng(0).normal(size=(50, 2)))

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def after(name, where):
    real = getattr(where, name)
    def act(*arguments):
        real(*arguments)
        die()
    setattr(where, name, act)

registry = Registry(path)
if point == "while writing the model":
    sync = os.fsync  # folders are synced before
    os.fsync = lambda handle: die() if stat.S_ISREG(os.fstat(handle).st_mode) else sync(handle)
elif point == "before the rename":
    os.replace = die
elif point == "after the rename":
    after("replace", os)
elif point == "before the commit":
    # the row and the sketch are written, within the transaction
    import fedcohort.personalize.registry as module
    class Last(module.Registry):
        def _insert(self, db, record):
            super()._insert(db, record)
            die()
    registry = Last(path)
i = 0
while True:
    registry.add(f"new {i}", sketch, {"w": np.full(20_000, float(i))}, metadata={"i": i})
    print(i, flush=True)
    i += 1
    if point == "after the commit":
        die()
"""


def start(path, point):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), point],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def confirm_whole(registry, confirmed):
    """Every client has all its parts, and nothing confirmed is missing."""
    assert {p.kind for p in check(registry)} <= {"orphan"}
    there = [e.client for e in registry.entries() if e.client.startswith("new")]
    assert there[: len(confirmed)] == [f"new {i}" for i in confirmed]
    assert len(there) <= len(confirmed) + 1
    for i, client in enumerate(there):
        assert registry.get(client).metadata == {"i": i}
        np.testing.assert_array_equal(registry.model(client)["w"], np.full(20_000, float(i)))
        assert registry.sketch(client).n == 50
    remove_orphans(registry)
    assert check(registry) == []


@pytest.mark.parametrize(
    ("point", "there"),
    [
        ("while writing the model", 0),
        ("before the rename", 0),
        ("after the rename", 0),
        ("before the commit", 0),
        ("after the commit", 1),
    ],
)
def test_killed_at_a_known_point(registry, point, there):
    with start(registry.path, point) as writer:
        confirmed = writer.stdout.read().split()
    assert writer.returncode == -signal.SIGKILL
    assert len(confirmed) == there
    leftovers = [p for p in check(registry) if p.kind == "orphan"]
    assert len(leftovers) == (0 if point == "after the commit" else 1)
    confirm_whole(registry, confirmed)
    assert len(registry) == there


@pytest.mark.parametrize("point", ["os.mkdir", "os.replace", "os.fsync"])
def test_a_registry_whose_making_was_killed_is_made_again(tmp_path, point):
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from fedcohort.personalize import Registry\n"
        f"real = {point}\n"
        "def die(*arguments, **options):\n"
        "    if not str(arguments[0]).endswith('warm'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(*arguments, **options)\n"
        f"{point} = die\nRegistry.create(sys.argv[1])"
    )
    folder = tmp_path / "warm"
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == -signal.SIGKILL
    with Registry.create(folder) as registry:
        assert len(registry) == 0
    with pytest.raises(ConfigError):
        Registry.create(folder)
