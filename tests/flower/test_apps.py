"""The patches of docs/flower.md, applied to apps of the shape of Flower's.

The patches are made for Flower's own example apps, on which `benchmarks/flower_apps.py` runs all of
them. The apps in `shapes` have the same files and handlers, and digits that need no download.
"""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedcohort.flower import CohortStrategy

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "examples" / "patches"
SHAPES = Path(__file__).parent / "shapes"
CLIENTS = 10
#: By app, its package and a policy to run it with.
APPS = {
    "quickstart-pytorch": ("pytorchexample", "sketch-match:epsilon=1"),
    "quickstart-sklearn": ("sklearnexample", "divfl"),
}


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Return an app of Flower's shape with its patch: its config, server and client modules."""

    def make(name):
        package = APPS[name][0]
        folder = tmp_path / name
        shutil.copytree(SHAPES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["git", "apply", PATCHES / f"{name}.patch"], cwd=folder, check=True)
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        config = project["tool"]["flwr"]["app"]["config"]
        monkeypatch.syspath_prepend(str(folder))
        for module in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        parts = [importlib.import_module(f"{package}.{n}") for n in ("server_app", "client_app")]
        return config, *parts

    return make


class Kept(CohortStrategy):
    """Remembers the strategies that an app makes."""

    made: list[CohortStrategy] = []  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, timeout=60, **options)
        self.made.append(self)


@pytest.mark.parametrize("name", APPS)
def test_a_patched_app_runs_with_the_policy_of_its_run_config(name, patched, digits, monkeypatch):
    config, server, client = patched(name)
    assert config["policy"] == "uniform"
    config |= {"policy": APPS[name][1], "num-server-rounds": 3}
    monkeypatch.setattr(server, "CohortStrategy", Kept)
    Kept.made.clear()
    grid = digits.empty_grid()
    for i in range(CLIENTS):
        grid.add(1000 - 7 * i, client.app, **{"partition-id": i, "num-partitions": CLIENTS})
        grid.contexts[1000 - 7 * i].run_config = dict(config)
    server.app(grid, Context(0, 1, {}, RecordDict(), config))
    (strategy,) = Kept.made
    assert strategy.session.policy.name == config["policy"].partition(":")[0]
    assert [len(r.finished) for r in strategy.history] == [4, 4, 4]
    assert not strategy.refused and not sum(strategy.unanswered.values())


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_a_patch_adds_five_lines_and_changes_none(path):
    """Flower's NumPy app has no data, so nothing to attach."""
    lines = path.read_text().splitlines()
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len([line for line in added if line]) == (3 if "numpy" in path.stem else 5)
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]


def test_the_docs_show_a_patch_as_it_is():
    text = (ROOT / "docs" / "flower.md").read_text()
    assert (PATCHES / "quickstart-pytorch.patch").read_text() in text
    assert "These five lines" in text


def test_the_example_can_be_built_and_says_how_to_run_it():
    """What Flower Hub asks for: an archive, metadata, and a README with these sections."""
    from flwr.cli.build import build_fab_from_disk

    folder = ROOT / "examples" / "flower-deployment"
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))) as archive:
        files = archive.namelist()
        project = tomllib.loads(archive.read("pyproject.toml").decode())
    assert {"README.md", "LICENSE"} <= set(files) and any(
        f.endswith("client_app.py") for f in files
    )
    assert len(project["project"]["description"]) < 200
    requirements = project["project"]["dependencies"]
    assert not any("@" in r or "/" in r for r in requirements)  # all from the index
    assert project["tool"]["flwr"]["app"]["fab-format-version"] == 1  # the strict rules
    readme = (folder / "README.md").read_text()
    sections = [line[3:] for line in readme.splitlines() if line.startswith("## ")]
    runs = ["Run with the Simulation Runtime", "Run with the Deployment Runtime"]
    assert sections[:3] == ["Install dependencies and project", *runs]
