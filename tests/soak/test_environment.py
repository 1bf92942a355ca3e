"""Full disks, folders that cannot be written, missing extras, and other surroundings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from fedcohort.personalize import Registry
from fedcohort.sketch.race import RaceSketch

SOURCE = str(Path(__file__).parents[2] / "src")


def without_override():
    """Drop root's right to write everywhere, so that permissions hold (no-op for others)."""
    import ctypes

    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def python(code, *arguments, ok=True, drop=False, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        preexec_fn=without_override if drop else None,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment},
    )
    assert not ok or done.returncode == 0, done.stderr
    return done.stdout


SKETCHED = """
import sys
import numpy as np
from fedcohort.sketch.race import RaceSketch
sketch = RaceSketch.srp(dim=2, rows=4, bits=2)
sketch.add(np.tile(np.eye(2), (5, 1)))
"""
FULL = """
import resource, signal
from fedcohort import storage
from fedcohort.exceptions import FedcohortError
from fedcohort.personalize import Registry
storage.save("state", {"i": 1})
with Registry.create("warm") as registry:
    registry.add("ann", sketch, {"w": np.zeros(10)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for write in (
        lambda: storage.save("state", {"i": 2, "a": np.zeros(100_000)}),
        lambda: registry.add("bob", sketch, metadata={"x": "y" * 400_000}),
    ):
        try:
            write()
        except (OSError, FedcohortError) as error:
            print("refused")
    print(storage.load("state")["i"], len(registry), registry.sketch("ann") == sketch)
"""


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert python(SKETCHED + FULL) == "refused\nrefused\n1 1 True\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "warm"]


def test_a_registry_that_cannot_be_written_is_read(tmp_path):
    sketch = RaceSketch.srp(dim=2, rows=4, bits=2)
    sketch.add(np.tile(np.eye(2), (5, 1)))
    folder = tmp_path / "warm"
    with Registry.create(folder) as registry:
        registry.add("ann", sketch, {"w": np.zeros(2)})
    for path in (folder / "registry.sqlite", folder):
        path.chmod(0o444 if path.is_file() else 0o555)
    code = """
from fedcohort.exceptions import DataError
from fedcohort.personalize import Registry, check, nearest
with Registry(sys.argv[1]) as registry:
    print(registry.db.read_only, nearest(registry, sketch)[0].client, check(registry))
    try:
        registry.add("bob", sketch)
    except DataError as error:
        print("readonly" in str(error))
"""
    out = python(SKETCHED + code, folder, drop=True)
    folder.chmod(0o755)
    if out.startswith("False"):
        pytest.skip("this user can write everywhere")
    assert out == "True ann []\nTrue\n"


def test_locked_packages_install_on_the_first_release_of_every_supported_python():
    """Some packages want a later bug-fix release than Linux distributions have."""
    lock = (Path(SOURCE).parent / "requirements.lock").read_text()
    names = re.findall(r"^([\w.-]+)(?:\[.*?\])?==", lock, re.M)
    assert len(names) > 50
    for name in names:
        wanted = SpecifierSet(metadata(name)["Requires-Python"] or "")
        late = [v for v in ("3.11.0", "3.12.0", "3.13.0") if v not in wanted]
        assert not late, f"{name} needs Python {wanted}: lock an earlier version"


def test_a_read_only_installation_without_a_home_sketches(tmp_path):
    """Numba raises "cannot cache function" there unless told not to cache."""
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(SOURCE) / "fedcohort", tmp_path / "fedcohort", ignore=no_cache)
    folders = [p for p in tmp_path.rglob("*") if p.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    code = """
import fedcohort
assert fedcohort.__file__.startswith(sys.argv[1])
print(int(sketch.n))
"""
    nowhere = "/proc/none"  # which not even root can make
    home = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": ""}
    out = python(SKETCHED + code, tmp_path, drop=True, PYTHONPATH=str(tmp_path), **home)
    for folder in folders:
        folder.chmod(0o755)
    assert out == "10\n"


NO_EXTRAS = """
import sys
blocked = {"torch", "flwr", "ray", "pyarrow", "matplotlib", "altair", "safetensors",
           "pandas", "mlflow", "tensorboard"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
CORE = """
import hashlib, tempfile
from fedcohort import POLICIES, Session, storage
from fedcohort.sketch.distances import distance
from fedcohort.testing import drive
sketch = RaceSketch.srp(dim=30, rows=20, bits=5)
sketch.add(np.random.default_rng(0).normal(size=(500, 30)))
assert distance(sketch, sketch) == 0
found = hashlib.sha256(sketch.to_bytes())
with tempfile.TemporaryDirectory() as folder:
    for name in sorted(POLICIES):
        session = Session(POLICIES[name](), cohort_size=3, seed=0)
        for _ in range(4):
            found.update(repr(drive(session, [f"c{i}" for i in range(12)]).clients).encode())
        storage.save(folder + "/x", session.state_dict())
        storage.load(folder + "/x")
print(found.hexdigest())
"""


def test_surroundings_do_not_change_results():
    """Hash seed, threads, time zone and language, and every optional package missing."""
    calm = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "TZ": "UTC"}
    other = {"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
    wanted = python(SKETCHED + CORE, **calm)
    assert len(wanted.strip()) == 64
    assert python(NO_EXTRAS + SKETCHED + CORE, **other) == wanted
