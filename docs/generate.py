"""Pages that are made from the code when the site is built: a hook of MkDocs.

One page per policy and gate from its docstring, the command line from its help, the configuration
from its dataclasses, the API from all modules, and the tour from the notebook.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import fedcohort
from fedcohort.experiments.config import reference
from fedcohort.gates import GATES
from fedcohort.policies import POLICIES

ROOT = Path(__file__).parents[1]

#: Modules of the API reference that a user calls, by subject.
API = {
    "Rounds and sessions": ["rounds", "session", "ledger", "checkpoint", "exceptions", "registry"],
    "Policies and gates": ["policies.base", "gates.base", "testing"],
    "Signals": ["signals.catalog", "signals.table", "signals.projection", "signals.updates"],
    "Sketches": ["sketch.race", "sketch.distances", "sketch.transforms", "sketch.file"],
    "Privacy": ["privacy.release", "privacy.budget", "privacy.calibration", "privacy.planning"],
    "Data": ["datasets", "partition", "metrics"],
    "Simulation": [
        "simulate.simulation",
        "simulate.local",
        "simulate.models",
        "simulate.aggregation",
        "simulate.availability",
        "simulate.history",
    ],
    "Personalization": ["personalize.registry", "personalize.cold_start", "personalize.search"],
    "Flower": ["flower.strategy", "flower.client"],
    "Experiments": ["experiments.config", "experiments.folder", "experiments.several"],
    "Ray": ["distribute.cluster", "distribute.runs", "distribute.rounds"],
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the generated pages: path to Markdown."""
    found = {f"policies/{name}.md": _policy(name) for name in POLICIES}
    found |= {f"gates/{name}.md": _gate(name) for name in GATES}
    found["policies/index.md"] = _policy_index()
    found["cli.md"] = "".join(_cli())
    found["config.md"] = "".join(_config())
    found["api.md"] = _api()
    found["tour.md"] = notebook(ROOT / "examples" / "tour.ipynb")
    return found


def _policy(name: str) -> str:
    policy = POLICIES[name]
    made = policy()
    rows = [
        f"| {when} | {', '.join(sorted(names)) or 'nothing'} |"
        for when, names in (
            ("once per client", made.needs.profile),
            ("before the selection", made.needs.query),
            ("with the update", made.needs.reply),
        )
    ]
    text = [f"# {name}", f"Use it when {policy.when}.", f'`policy = "{name}"`']
    text += ["\n".join(["| asked | signals |", "|---|---|", *rows])]
    text += ["How it does against the others: [pick a policy](../policies.md)."]
    return "\n\n".join([*text, _reference(policy)])


def _gate(name: str) -> str:
    return f'# {name}\n\n`gate = "{name}"`; see [skip uploads](../skip.md).\n\n' + _reference(
        GATES[name]
    )


def _reference(kind: type) -> str:
    return (
        f"::: {kind.__module__}.{kind.__qualname__}\n"
        "    options:\n      show_root_heading: true\n      members: false\n"
    )


def _policy_index() -> str:
    rows = [f"| [{name}]({name}.md) | {POLICIES[name].when} |" for name in POLICIES]
    return "\n".join(["# All policies", "", "| policy | use it when |", "|---|---|", *rows]) + "\n"


def _config() -> Iterator[str]:
    yield "# Configuration\n\nEvery key of an experiment's TOML file. `fedcohort config init` "
    yield "writes a file with all of them; `--set key=value` sets one on the command line.\n\n"
    yield "A name can carry options, `name:key=value,key=value`, in TOML and on the command line "
    yield "alike. It may be `FILE.py:OBJECT`, an object of your own.\n"
    table = None
    for key in reference():
        if key.table != table:
            table = key.table
            title = f"`[{table}]`" if table else "Top level"
            yield f"\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        default = "" if key.default is None else f"`{json.dumps(key.default)}`"
        yield f"| `{key.name}` | {key.kind} | {default} | {key.about} |\n"


def _cli() -> Iterator[str]:
    import click
    import typer

    from fedcohort.cli import app

    yield "# Command line\n\nEvery command takes `-h`. A mistake is one line and exit status 2; "
    yield "with `FEDCOHORT_DEBUG=1` its traceback is shown as well.\n"

    def walk(command: click.Command, path: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield from walk(child, f"{path} {name}")
            return
        yield f"\n## {path}\n\n{_plain(command.help)}\n\n| option | meaning |\n|---|---|\n"
        for parameter in command.params:
            names = ", ".join(getattr(parameter, "opts", [])) or parameter.name
            yield f"| `{names}` | {_plain(getattr(parameter, 'help', ''))} |\n"

    yield from walk(typer.main.get_command(app), "fedcohort")


def _plain(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")


def _api() -> str:
    parts = [
        "# Python API\n\n`from fedcohort import ...` offers these names: "
        + ", ".join(f"`{name}`" for name in sorted(fedcohort.__all__))
        + ".\n"
    ]
    for subject, modules in API.items():
        parts.append(f"## {subject}\n")
        parts += [f"::: fedcohort.{module}\n" for module in modules]
    parts.append("## All modules\n")
    parts += [f"- `{name}`" for name in modules_of(fedcohort.__path__, "fedcohort.")]
    return "\n".join(parts)


def modules_of(path: Any, prefix: str) -> list[str]:
    """Return all public modules of the package."""
    found = pkgutil.walk_packages(path, prefix, onerror=lambda name: None)
    return sorted(m.name for m in found if not any(p.startswith("_") for p in m.name.split(".")))


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, with the outputs it was saved with."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts.append(f"```python\n{text}\n```")
            shown = "".join("".join(o.get("text", [])) for o in cell["outputs"])
            if shown:
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
