"""Pages that are made from the code when the site is built: a hook of MkDocs.

One page per policy and gate from its docstring and the committed measurements, the command line
from its help, the configuration from its dataclasses, the API from all modules, and the tour from
the notebook. Drawings are put into their page, so that they follow its light or dark theme.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files

import fedcohort
from fedcohort.cli.planning import policy_costs
from fedcohort.experiments.config import reference
from fedcohort.gates import GATES
from fedcohort.policies import POLICIES

ROOT = Path(__file__).parents[1]
HIDDEN = re.compile(r"\._|triton")  # private modules, and one that only a GPU can import
DRAWING = re.compile(r"!\[([^\]]*)\]\((drawings/[\w-]+\.svg)\)")

#: Pages of the API reference, in reading order: title, and the modules or packages on it.
API = {
    "Sessions and rounds": ["rounds", "session", "ledger", "storage", "metrics", "exceptions"],
    "Policies and gates": ["policies", "gates", "testing"],
    "Signals": ["signals"],
    "Sketches": ["sketch"],
    "Privacy": ["privacy"],
    "Data and partitions": ["datasets", "partition", "files"],
    "Simulation": ["simulate"],
    "Personalization": ["personalize"],
    "Flower": ["flower"],
    "Experiments": ["experiments"],
    "Analysis": ["analysis"],
    "Reports": ["report"],
    "Ray": ["distribute"],
    "Numerics and helpers": [
        "numerics", "registry", "options", "progress", "provenance", "loops",
    ],
}  # fmt: skip
SELECTION = "benchmark-selection.json"  # the benchmark of policies, in benchmarks/results
NOT_IN_API = ("cli",)  # it has a page of its own


class Notes(NamedTuple):
    """What a docstring does not say: when a policy fails, and where its paper is."""

    fails: str
    paper: str = ""


NOTES = {
    "active-fl": Notes(
        "High losses come from rare labels and from noise alike. With one or two labels per client "
        "it trains the same few labels again and again. A loss within range can be forged.",
        "https://arxiv.org/abs/1909.12641",
    ),
    "clustered-sampling": Notes(
        "Clusters by size know nothing about data. Clusters by updates need every client to have "
        "trained once, and help little where clients hold several labels.",
        "https://arxiv.org/abs/2105.05883",
    ),
    "dc-fedavg": Notes(
        "Most of the cohort is random, so that little is gained; label counts are sensitive and are "
        "believed, and large clients dominate the pooled counts.",
        "https://arxiv.org/abs/2509.20877",
    ),
    "delta": Notes(
        "It compares last updates, which are old for clients that rarely train. The weights that "
        "keep it unbiased add variance in small cohorts.",
        "https://arxiv.org/abs/2205.13925",
    ),
    "divfl": Notes(
        "Every client downloads the model and sends a gradient sketch in every round, which costs "
        "more than training. Cohorts may keep to few clients.",
        "https://openreview.net/forum?id=nwKXyFvaUm",
    ),
    "fed-cbs": Notes(
        "Label counts are sensitive and are believed. Balanced labels are the wrong target if the "
        "federation is not balanced, and features that differ are not seen.",
        "https://arxiv.org/abs/2209.15245",
    ),
    "fedacs": Notes(
        "It prefers clients that are each close to the average. With one or two labels per client "
        "there are none, and it trains on few clients.",
        "https://openreview.net/forum?id=YuLafzqqmT",
    ),
    "fedcor": Notes(
        "It needs losses of all clients in its warm-up and now and then later, each after a model "
        "download. Losses within range can be forged.",
        "https://arxiv.org/abs/2103.13822",
    ),
    "fedsae": Notes(
        "It prefers high losses, as active-fl does, with the same weakness for few labels.",
        "https://arxiv.org/abs/2104.07515",
    ),
    "flips": Notes(
        "Label counts are sensitive and are believed. The number of clusters must fit: equal "
        "places per cluster are uneven places per client.",
        "https://arxiv.org/abs/2308.03901",
    ),
    "haccs": Notes(
        "The fastest member of a cluster trains again and again, so that the others' data are "
        "learned less. Strong privacy scatters histograms, and then every client is alone.",
        "https://doi.org/10.1109/IPDPS53621.2022.00100",
    ),
    "hics-fl": Notes(
        "It reads label balance from updates of the output biases, which are noisy for small "
        "clients and missing in models without biases. With two labels per client all look alike.",
        "https://arxiv.org/abs/2310.00198",
    ),
    "kdpp": Notes(
        "Clients that differ from each other need not add up to the federation: the gain is small "
        "where clients hold several labels. Profiles of features are not private.",
        "https://arxiv.org/abs/2303.17358",
    ),
    "label-match": Notes(
        "Label counts are sensitive and are believed, and features that differ are not seen. "
        "Clients that complete cohorts best train most, so that the others' data are learned less.",
    ),
    "oort": Notes(
        "High losses and speed are preferred. With one or two labels per client these are the same "
        "few clients round after round, and accuracy suffers.",
        "https://arxiv.org/abs/2010.06081",
    ),
    "power-of-choice": Notes(
        "Each candidate downloads the model to answer. With few labels per client, the highest "
        "losses are the same labels again and again, the more so the larger d is.",
        "https://arxiv.org/abs/2010.01243",
    ),
    "race-softmax": Notes(
        "It prefers clients that are each close to the federation. In a federation of specialists "
        "these are few and always the same.",
        "https://openreview.net/forum?id=KMxRQO7P98",
    ),
    "refl": Notes(
        "It knows nothing about data. Where all clients are always there, it is random selection "
        "with a rest.",
        "https://arxiv.org/abs/2111.01108",
    ),
    "sketch-match": Notes(
        "Where clients are alike there is nothing to gain: cohorts are then random. Very small "
        "clients with strong privacy are mostly noise; they are shrunk toward the federation. A "
        "client can send a false sketch.",
    ),
    "sketch-to-select": Notes(
        "A cohort is kept for several rounds, which hurts where it misses labels. It needs "
        "clusters that are labels, so it helps only with about one label per client.",
        "https://research.ibm.com/publications/sketch-to-skip-and-select-communication-efficient-"
        "federated-learning-using-locality-sensitive-hashing",
    ),
    "tifl": Notes(
        "A tier of one speed need not look like the federation. Slow tiers keep their credits "
        "longest, and rounds become long in the end.",
        "https://arxiv.org/abs/2001.09249",
    ),
    "uniform": Notes(
        "Cohorts of clients with few labels miss labels by chance, and the model forgets them.",
        "https://arxiv.org/abs/1602.05629",
    ),
    "sketch-to-skip": Notes(
        "The more clients' data differ, the less there is to skip: models drift apart, and their "
        "average is worth less.",
        "https://research.ibm.com/publications/sketch-to-skip-and-select-communication-efficient-"
        "federated-learning-using-locality-sensitive-hashing",
    ),
    "cmfl": Notes(
        "Signs of updates of clients with few labels disagree most, so those are held back first.",
        "https://doi.org/10.1109/ICDCS.2019.00099",
    ),
    "optimal-sampling": Notes(
        "Everybody in the cohort trains, so it saves uploads and no computing. The weights vary, and "
        "with few uploads so does the model. A client that claims a large norm uploads.",
        "https://openreview.net/forum?id=8GvRCWKHIL",
    ),
}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put drawings into the page: an image could not follow the theme that the reader chose."""

    def drawing(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / match[2]).read_text(encoding="utf-8")
        return f'<figure class="drawing">\n{svg}</figure>\n'

    return DRAWING.sub(drawing, markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the generated pages: path to Markdown."""
    found = {f"policies/{name}.md": _policy(name) for name in POLICIES}
    found |= {f"gates/{name}.md": _gate(name) for name in GATES}
    found["all-policies.md"] = _policy_index()
    found["cli.md"] = "".join(_cli())
    found["config.md"] = "".join(_config())
    found |= _api()
    found["tour.md"] = notebook(ROOT / "examples" / "tour.ipynb")
    return found


def _policy(name: str) -> str:
    policy, notes = POLICIES[name], NOTES.get(name)
    needs = policy().needs
    asked = [
        f"| {when} | {', '.join(f'`{n}`' for n in sorted(names)) or 'nothing'} |"
        for when, names in (
            ("once per client", needs.profile),
            ("before the selection", needs.query),
            ("with the update", needs.reply),
        )
    ]
    text = [f"# {name}", f"Use it when {policy.when}.", f'`policy = "{name}"`']
    text += ["## Idea", _idea(policy, notes)]
    text += ["## What it asks for", "\n".join(["| when | signals |", "|---|---|", *asked])]
    text += [_cost(name)]
    if notes is not None:
        text += ["## When it fails", notes.fails]
    text += ["## Measured", _measured(name), "## Options"]
    return "\n\n".join([*text, _reference(policy)])


def _idea(kind: type, notes: Notes | None) -> str:
    """Return the description of a docstring as Markdown, with a link to the paper."""
    text = inspect.getdoc(kind) or ""
    idea = re.split(r"\n(?:Parameters|Attributes|Notes|References|Examples)\n-+\n", text)[0]
    idea = re.sub(r" ?\[\d+\]_", "", idea).replace("``", "`").strip()
    paper = f"\n\n[The paper]({notes.paper})" if notes is not None and notes.paper else ""
    return idea + paper


@cache
def _costs() -> dict[str, Any]:
    return {row.policy: row for row in policy_costs(100, 10, 4 * 52_500)}


def _cost(name: str) -> str:
    if name not in _costs():  # registered after the costs were measured
        return ""
    row = _costs()[name]
    return (
        f"With 100 clients, cohorts of 10 and a model of 210 kB, clients send {row.once / 1e3:.1f} "
        f"kB once and {row.each_round / 1e3:.1f} kB per round beside the models, and "
        f"{row.models_each_round:.0f} models move per round (20 without any query)."
    )


def _measured(name: str) -> str:
    """Return every setting of the benchmark in which the policy ran, against uniform."""
    results = _results()
    settings: dict[str, list[list[str]]] = {}  # one after the other, as they first come
    for part in (results.result(SELECTION) or {"parts": []})["parts"]:
        if part["experiment"]["policy"]["name"] != name or not part["targets"]:
            continue
        base = results.parts(SELECTION, part["setting"]).get("uniform")
        target = part["targets"][0]
        if base is None or target not in base["targets"]:
            continue
        times = ("1x", "baseline") if name == "uniform" else results.ratio(part, base, target)
        accuracy = results.spread([100 * row["accuracy"] for row in part["seeds"]])
        rounds = results.rounds_cell(part, target)
        setting = f"{part['setting']}, {target:.0%}"
        row = [setting, part["variant"], rounds, *times, accuracy]
        settings.setdefault(setting, []).append(row)
    lines = [row for rows in settings.values() for row in rows]
    speed = _speed(name)
    more = "How it does against the others: [pick a policy](../policies.md)."
    if not lines:
        return f"It is not part of the published benchmark at this commit. {speed} {more}"
    header = ["setting, target", "variant", "rounds", "fewer rounds", "verdict", "accuracy %"]
    return (
        results.table(header, lines)
        + "\nRounds to the target accuracy, mean ± standard deviation over held-out seeds; fewer "
        "rounds than uniform with a 95 % interval over paired seeds; accuracy over the last "
        f"rounds ([benchmark](../benchmark.md)). {speed} {more}"
    )


def _speed(name: str) -> str:
    held = json.loads((ROOT / "benchmarks/results/selection-speed.json").read_text())["result"]
    rows = {(r["policy"], r["clients"]): r["median_round_s"] for r in held["rounds"]}
    if (name, 1_000) not in rows or (name, 1_000_000) not in rows:
        return ""
    small, large = rows[name, 1_000], rows[name, 1_000_000]
    return (
        f"Choosing takes {1e3 * small:.2f} ms among 1,000 clients and {large:.2f} s among a "
        "million, on one thread ([speed](../speed.md))."
    )


@cache
def _results() -> Any:
    """Return benchmarks/docs_tables/results.py, which reads the committed results."""
    import sys

    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("docs_tables.results")
    finally:
        sys.path.remove(str(folder))


def _gate(name: str) -> str:
    notes = NOTES.get(name)
    text = [f"# {name}", f'`gate = "{name}"`; see [skip uploads](../skip.md).']
    text += ["## Idea", _idea(GATES[name], notes)]
    if notes is not None:
        text += ["## When it fails", notes.fails]
    return "\n\n".join([*text, "## Options", _reference(GATES[name])])


def _reference(kind: type) -> str:
    return (
        f"::: {kind.__module__}.{kind.__qualname__}\n"
        "    options:\n      show_root_heading: true\n      heading_level: 3\n"
        "      members: false\n      show_bases: false\n      show_docstring_description: false\n"
    )


def _policy_index() -> str:
    rows = [f"| [{name}](policies/{name}.md) | {POLICIES[name].when} |" for name in POLICIES]
    text = ["# All policies", "", "| policy | use it when |", "|---|---|", *rows, ""]
    text += ["## Where each comes from, and how it was checked", ""]
    text += ["| policy or gate | source | checked |", "|---|---|---|"]
    for folder, kinds in (("policies", POLICIES), ("gates", GATES)):
        for name, kind in kinds.items():
            source, checked = (_line(kind, key) for key in ("Source", "Checked"))
            text.append(f"| [{name}]({folder}/{name}.md) | {source} | {checked} |")
    return "\n".join(text) + "\n"


def _line(kind: type, key: str) -> str:
    """Return what a docstring's Notes state in the line ``key: ...``."""
    match = re.search(rf"^{key}: (.+?)\.$", inspect.getdoc(kind) or "", re.M | re.S)
    return " ".join(match[1].split()).replace("``", "`") if match else ""


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


def _api() -> dict[str, str]:
    """Return the front page, with the names of ``from fedcohort import ...``, and all modules."""
    rows = [f"| {_link(name)} | {_first_line(name)} |" for name in sorted(fedcohort.__all__)]
    front = "\n".join(["| name | what it is |", "|---|---|", *rows])
    found, subjects = {}, []
    for subject, packages in API.items():
        page = f"api/{subject.lower().replace(' ', '-')}.md"
        modules = [m for package in packages for m in modules_of(f"fedcohort.{package}")]
        found[page] = "\n".join([f"# {subject}\n", *(f"::: {module}\n" for module in modules)])
        names = ", ".join(f"`{m.removeprefix('fedcohort.')}`" for m in modules)
        subjects.append(f"| [{subject}]({page}) | {names} |")
    found["api.md"] = "\n".join(
        [
            "# Python API\n\n`from fedcohort import ...` offers what most people need:\n",
            front,
            "\n## All modules\n\n| page | modules |\n|---|---|",
            *subjects,
            "",
        ]
    )
    return found


@cache
def _homes():
    """Return the module of each public name, from the package's table of lazy names."""
    table = Path(fedcohort.__file__).with_suffix(".pyi").read_text()
    return {name: home for home, name in re.findall(r"from \.(\S+) import (\w+) as", table)}


def _link(name: str) -> str:
    """Link a front-door name to its place in the reference."""
    item = getattr(fedcohort, name)
    home = f"fedcohort.{_homes()[name]}"
    if name == "simulate":  # also a package
        home = "fedcohort.simulate.simulation.simulate"
    elif isinstance(item, type) and item.__module__.startswith("fedcohort"):
        home = f"{item.__module__}.{item.__qualname__}"
    elif getattr(item, "__module__", "").startswith("fedcohort"):
        home = f"{item.__module__}.{item.__name__}"
    return f"[`{name}`][{home}]"


def _first_line(name: str) -> str:
    kinds = {"ClientId": "The id of a client: a string.", "GATES": "All gates, by name."}
    kinds |= {"POLICIES": "All policies, by name.", "SIGNALS": "All signals, by name."}
    item = fedcohort.simulate.simulate if name == "simulate" else getattr(fedcohort, name)
    line = kinds.get(name) or (item.__doc__ or "").strip().split("\n\n")[0]
    return re.sub(r" ?\[\d+\]_", "", " ".join(line.split())).replace("|", "\\|")


def modules_of(name: str) -> list[str]:
    """Return a module and, of a package, all public modules in it.

    Policies and gates have pages of their own.
    """
    own = {kind.__module__ for kind in (*POLICIES.values(), *GATES.values())}
    module = importlib.util.find_spec(name)
    if module is None or module.submodule_search_locations is None:
        return [name]
    inside = pkgutil.walk_packages(
        module.submodule_search_locations, f"{name}.", onerror=lambda _: None
    )
    return [
        name,
        *sorted(m.name for m in inside if m.name not in own and not HIDDEN.search(m.name)),
    ]


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
