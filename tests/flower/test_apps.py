"""The patches of docs/flower.md, applied to apps of the shape of Flower's; what works with what.

The patches are made for Flower's own example apps. The apps in `shapes` have the same files, the
same handlers and strategies, and digits that need no download.
"""

from __future__ import annotations

import importlib
import io
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from tests.flower.conftest import Digits

from fedcohort.exceptions import ConfigError
from fedcohort.flower import CohortStrategy, attach
from fedcohort.policies import POLICIES

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "examples" / "patches"
SHAPES = Path(__file__).parent / "shapes"
CLIENTS = 10
#: By app, its package and a policy to run it with.
APPS = {
    "quickstart-pytorch": ("pytorchexample", "power-of-choice:d=6"),
    "quickstart-sklearn": ("sklearnexample", "divfl"),
    "advanced-pytorch": ("pytorch_example", "sketch-match"),
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
def test_a_patched_app_runs_with_the_policy_of_its_run_config(
    name, patched, digits, monkeypatch, tmp_path
):
    config, server, client = patched(name)
    assert config["policy"] == "uniform"
    config |= {"policy": APPS[name][1], "num-server-rounds": 3}
    if name == "advanced-pytorch":
        config["results"] = str(tmp_path)
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
    if name == "advanced-pytorch":
        lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3]
        assert lines[-1]["best"] == max(line["accuracy"] for line in lines) > 0.15


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


# --- what works with what -----------------------------------------------------------------------


def torch_app(digits, client):
    return digits.app(client, classes=10)


def own_app(digits, client):
    """Training and evaluation in plain NumPy: softmax regression, as any framework may do it."""
    x, y = digits.examples(client)
    flat = x.reshape(len(x), -1)
    app = ClientApp()

    def outputs(message):
        weights, bias = message.content["arrays"].to_numpy_ndarrays()
        scores = flat @ weights + bias
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        return weights, bias, chances, -np.log(chances[np.arange(len(y)), y] + 1e-9).mean()

    @app.train()
    def train(message, context):
        weights, bias, chances, loss = outputs(message)
        error = (chances - np.eye(10)[y]) / len(y)
        arrays = ArrayRecord([weights - 0.1 * flat.T @ error, bias - 0.1 * error.sum(0)])
        metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(y)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"eval_loss": float(outputs(message)[3]), "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    attach(app, digits.examples(client), classes=10)
    return app


OFF = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
KINDS = {
    "PyTorch, `model=`": (torch_app, flower.FedAvg, lambda digits: digits.arrays()),
    "own handlers": (
        own_app,
        flower.FedAvg,
        lambda digits: ArrayRecord([np.zeros((64, 10)), np.zeros(10)]),
    ),
    "trees": (
        Digits.trees_app,
        flower.FedXgbBagging,
        lambda digits: ArrayRecord([np.frombuffer(b"", np.uint8)]),
    ),
}


def works(digits, policy, kind):
    make, inner, arrays = KINDS[kind]
    grid = digits.empty_grid()
    for client in digits.clients:
        grid.add(digits.node(client), make(digits, client), **{"client-id": client})
    strategy = CohortStrategy(
        inner(**OFF), POLICIES[policy](), cohort_size=3, timeout=5, center=np.zeros(64)
    )
    try:
        strategy.start(grid, arrays(digits), 3)
    except ConfigError:
        return False
    assert [len(r.finished) for r in strategy.history] == [3, 3, 3]
    return True


def table(digits):
    lines = [f"| policy | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    own = [p for p in sorted(POLICIES) if POLICIES[p].__module__.startswith("fedcohort.")]
    for policy in own:  # examples of the docs may have registered others
        cells = ["yes" if works(digits, policy, kind) else "no" for kind in KINDS]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_docs_say_which_policy_works_with_what(digits):
    text = (ROOT / "docs" / "flower.md").read_text()
    stated = text.split("<!-- policies and clients -->\n")[1].split("\n<!-- end -->")[0]
    assert stated == table(digits), "tests/flower/test_apps.py: the table in docs/flower.md is old"
