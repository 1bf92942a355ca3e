"""Apps in the shape of Flower's examples, with two lines added; and what works with what."""

from __future__ import annotations

import difflib
import importlib
import io
import json
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
APPS = ROOT / "examples" / "flower-apps"
NEEDS = {"keras": "keras", "jax": "jax", "xgboost": "xgboost"}
INSTALL = {"keras": "pip install keras tensorflow", "jax": "pip install jax"}
NAMES = ["pytorch", "advanced", "tabular", "sklearn", "keras", "jax", "xgboost"]
CLIENTS = 10


def settings(name, **changes):
    project = tomllib.loads((APPS / name / "pyproject.toml").read_text())
    return {**project["tool"]["flwr"]["app"]["config"], **changes}


def load(name, monkeypatch):
    """Import an app's server and clients as `flwr run` would."""
    if name in NEEDS:
        install = INSTALL.get(name, f"pip install {name}")
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed: {install}")
    monkeypatch.syspath_prepend(str(APPS / name))
    for module in [m for m in sys.modules if m.split(".")[0] == f"{name}_app"]:
        monkeypatch.delitem(sys.modules, module)
    return [importlib.import_module(f"{name}_app.{part}") for part in ("server_app", "client_app")]


def federation(digits, app, config):
    grid = digits.empty_grid()
    for i in range(CLIENTS):
        node = {"partition-id": i, "num-partitions": CLIENTS}
        grid.add(1000 - 7 * i, app, **node)
        grid.contexts[1000 - 7 * i].run_config = dict(config)
    return grid


class Kept(CohortStrategy):
    """Remembers the strategies that an app makes."""

    made: list[CohortStrategy] = []  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, timeout=60, **options)
        self.made.append(self)


def run(name, digits, monkeypatch, **changes):
    server, client = load(name, monkeypatch)
    monkeypatch.setattr(server, "CohortStrategy", Kept)
    Kept.made.clear()
    config = settings(name, **changes)
    grid = federation(digits, client.app, config)
    server.app(grid, Context(0, 1, {}, RecordDict(), config))
    (strategy,) = Kept.made
    return strategy, grid


@pytest.mark.parametrize("name", NAMES)
def test_an_app_runs_with_the_policy_of_its_run_config(name, digits, monkeypatch, tmp_path):
    changes = {"results": str(tmp_path)} if name == "advanced" else {}
    strategy, _ = run(name, digits, monkeypatch, **changes)
    assert strategy.session.policy.name == settings(name)["policy"].partition(":")[0]
    assert [len(r.finished) for r in strategy.history] == [4, 4, 4]
    assert not strategy.refused and not sum(strategy.unanswered.values())
    if name == "advanced":
        lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3]
        assert lines[-1]["best"] == max(line["accuracy"] for line in lines) > 0.15


@pytest.mark.parametrize("policy", ["uniform", "sketch-match:centered=false"])
def test_another_policy_is_a_change_of_the_run_config(digits, monkeypatch, policy):
    strategy, _ = run("pytorch", digits, monkeypatch, policy=policy)
    assert strategy.session.policy.name == policy.partition(":")[0]
    assert len(strategy.history) == 3


def test_a_model_without_trees_has_no_accuracy(monkeypatch):
    server, _ = load("xgboost", monkeypatch)
    assert server.evaluate(0, ArrayRecord([np.frombuffer(b"", np.uint8)])) is None


@pytest.mark.parametrize("name", NAMES)
def test_two_imports_and_two_lines_are_all(name):
    """Without them, the app is an ordinary one of Flower's."""
    added = []
    for part in ("client_app", "server_app"):
        text = (APPS / name / f"{name}_app" / f"{part}.py").read_text().splitlines()
        marks = ("fedcohort.flower", "attach(", "CohortStrategy(")
        plain = [line for line in text if not any(mark in line for mark in marks)]
        assert not any("fedcohort" in line for line in plain)
        diff = difflib.ndiff(plain, text)
        added += [line[2:] for line in diff if line.startswith("+ ") and line.strip() != "+"]
    assert len(added) == 4 and sum("import" in line for line in added) == 2


FOR_THE_HUB = ["flower-quickstart", "flower-deployment"]


@pytest.mark.parametrize("name", [*FOR_THE_HUB, *(f"flower-apps/{name}" for name in NAMES)])
def test_an_example_can_be_built_and_says_how_to_run_it(name):
    """What Flower Hub asks for: an archive, metadata, and a README with these sections."""
    from flwr.cli.build import build_fab_from_disk

    folder = APPS.parent / name
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))) as archive:
        files = archive.namelist()
        project = tomllib.loads(archive.read("pyproject.toml").decode())
    assert "README.md" in files and any(f.endswith("client_app.py") for f in files)
    assert len(project["project"]["description"]) < 200
    requirements = project["project"]["dependencies"]
    assert not any("@" in r or "/" in r for r in requirements)  # all from the index
    assert any(r.startswith("flwr[simulation]>=1.28") for r in requirements)
    if name in FOR_THE_HUB:  # the strict rules, which building checked
        assert project["tool"]["flwr"]["app"]["fab-format-version"] == 1 and "LICENSE" in files
    readme = (folder / "README.md").read_text()
    sections = [line[3:] for line in readme.splitlines() if line.startswith("## ")]
    runs = ["Run with the Simulation Runtime", "Run with the Deployment Runtime"]
    assert sections[:3] == ["Install dependencies and project", *runs]
    commands = readme.split(runs[0])[1].split("```")[1].splitlines()[1:]
    assert commands[0].startswith("export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 ")
    assert commands[1].startswith("flwr run . --stream ")


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
