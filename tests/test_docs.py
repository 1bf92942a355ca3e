"""The documentation holds: its Python runs, its imports, links and commands exist."""

from __future__ import annotations

import html
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fedcohort
from fedcohort.cli import app
from fedcohort.gates import GATES
from fedcohort.policies import POLICIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))

#: Blocks of Python that cannot run in a test, by page and position, and why.
NOT_RUN = {
    ("other-frameworks.md", 1): "an excerpt of examples/nvflare, which needs NVFlare",
    ("other-frameworks.md", 2): "an excerpt of examples/pfl, which needs pfl-research",
    ("other-frameworks.md", 3): "needs a running Ray cluster; tests/distribute runs the same calls",
}
PYTHON = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)
GENERATED = {"tour.md", "cli.md", "config.md", "api.md", "all-policies.md"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
END = "\x1e"  # separates the outputs of blocks
TOUR = ROOT / "examples" / "tour.ipynb"
LIMIT = 900  # seconds for what takes about one minute on a quiet machine

#: What looks like a measurement: a number with a unit of speed, accuracy, time or size.
MEASURED = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:x\b| ?%| (?:times|points|ms|s|seconds|[kMG]B)\b)"
)
#: Such numbers that pages may hold outside of generated places, and why.
STATED = {
    r"9[05] ?% (bootstrap )?(interval|quantile)": "the level of an interval",
    r"(includes|without) 1x": "no difference, by definition",
    r"at least 5 %": "the smallest effect that matters",
    r"(below|below about) 1%": "the level of a test",
    r"fewer than 15% of the pairs": "the rule of a verdict",
    r"(above|at|as) 10 times the median|100 times less than another": "constants of the code",
    r"at most 2 GB more memory": "the limit of a test",
    r"than 1 GB": "a limit of the code",
    r"30 % of the clients|20 % of the cohort|5 % of the readings": "the setting of a test",
    r"36 MB for 100,000 clients|at most 80 MB for": "the product of the sizes beside it",
    r"70 % of them after one selection, 99 % after four": "from the 30 % of clients that are away",
    r"To \d+ %:|did not reach 90 % in|[Ss]econds to \d+ %": "a target",
    r"\| \d\.\dx to \d\.\dx \|": "the output of the command above it, in docs/plan.md",
}


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks(page):
    """Return pairs of code and the output that the page shows for it, if it shows one."""
    return PYTHON.findall(page.read_text())


WITH_PYTHON = [page for page in PAGES if blocks(page)]


def agree(printed, shown):
    """Compare outputs: the same words, and numbers that differ by 0.03 or a twentieth at most.

    Another PyTorch or processor adds in another order, so accuracies may differ a little.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (printed, shown)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (printed, shown)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.03)


#: Loads what the examples share, once, and runs every example.py in a process forked from that.
FORKS = """
import os, runpy, sys, traceback
import torch
import fedcohort.simulate, fedcohort.personalize.finetune
from fedcohort.datasets import load
load("digits")
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for number, name in ((1, "printed"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        status = 0
        try:
            runpy.run_path("example.py", run_name="__main__")
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        with open(os.path.join(folder, "errors"), "a") as file:
            file.write(f"status {status}")
"""


def program(page):
    """All Python blocks of a page, in order, as one program. The tour's cells are one, too."""
    if page == TOUR:
        return "\n".join("".join(cell["source"]) for cell in tour_cells())
    kept = [b for i, b in enumerate(blocks(page)) if (page.name, i) not in NOT_RUN]
    return "".join(f"{code}\nprint({END!r}, end='')\n" for code, _ in kept)


def tour_cells():
    cells = json.loads(TOUR.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Run the examples of all pages and the tour, each in a folder of its own."""
    folders = {page: tmp_path_factory.mktemp("page") for page in (*WITH_PYTHON, TOUR)}
    for page, folder in folders.items():
        (folder / "example.py").write_text(program(page))
    command = [sys.executable, "-c", FORKS, *map(str, folders.values())]
    subprocess.run(command, check=True, timeout=LIMIT)

    def read(page):
        errors = (folders[page] / "errors").read_text()
        assert "status " not in errors, errors
        return (folders[page] / "printed").read_text()

    return read


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_examples_run_and_print_what_is_shown(page, printed):
    kept = [b for i, b in enumerate(blocks(page)) if (page.name, i) not in NOT_RUN]
    for (code, shown), found in zip(kept, printed(page).split(END)[:-1], strict=True):
        assert not shown or agree(found, shown), f"{code}\nprints\n{found}\nnot\n{shown}"


def test_the_readme_and_the_tutorials_show_what_their_code_prints():
    assert blocks(ROOT / "README.md")[0][1]
    for page in TUTORIALS:
        assert any(shown for _, shown in blocks(page)), f"{page.name} shows no output"


@pytest.mark.timeout(LIMIT)
def test_the_tour_prints_what_it_shows(printed):
    """The cells of the notebook, in order, with the printed output that it was saved with."""
    found = printed(TOUR).splitlines()
    shown = "".join("".join(o["text"]) for cell in tour_cells() for o in cell["outputs"])
    # Accuracies may differ in the last digit where another PyTorch adds in another order.
    assert len(found) == len(shown.splitlines())
    for line, expected in zip(found, shown.splitlines(), strict=True):
        if "accuracy" not in expected:
            assert line == expected


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    # With --quiet, warnings would neither be printed nor counted.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for path in (ROOT / "docs").rglob("*.md"):  # no two pages are built to the same place
        name = path.relative_to(ROOT / "docs").with_suffix("")
        built = tmp_path / (name.parent if name.name == "index" else name) / "index.html"
        heading = html.escape(path.read_text().splitlines()[0].removeprefix("# "), quote=False)
        assert f">{heading}<a class=" in built.read_text(), f"{path.name} is not on the site"
    for page in ("index.html", "tour/index.html", "policies/oort/index.html", "cli/index.html"):
        assert (tmp_path / page).stat().st_size > 5000
    oort = (tmp_path / "policies/oort/index.html").read_text()
    for part in ("Idea", "When it fails", "Measured", "2010.06081", "Fashion-MNIST, two shards"):
        assert part in oort
    assert (tmp_path / "concepts/index.html").read_text().count('<svg class="fd"') == 5
    api = "".join(page.read_text() for page in (tmp_path / "api").rglob("*.html"))
    for name in (
        "personalize.maintenance.add_folder",
        "analysis.heterogeneity.measure",
        "gates.base.Gate",
    ):
        assert f'id="fedcohort.{name}' in api
    assert "local.schedule" not in (tmp_path / "config/index.html").read_text()
    assert "milestones" in (tmp_path / "config/index.html").read_text()


def test_every_module_is_in_the_reference_and_every_policy_has_its_notes(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    packages = [f"fedcohort.{p}" for ps in generate.API.values() for p in ps]
    listed = [module for package in packages for module in generate.modules_of(package)]
    assert len(listed) == len(set(listed))
    found = {m.name for m in pkgutil.iter_modules(fedcohort.__path__)} - {*generate.NOT_IN_API}
    assert {f"fedcohort.{name}" for name in found} == set(packages)
    assert {*POLICIES, *GATES} <= generate.NOTES.keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        place = Path(os.path.normpath(page.parent / target))
        there = place.exists() or any(place == ROOT / "docs" / name for name in GENERATED)
        assert there, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    text = page.read_text()
    fenced = "\n".join(re.findall(r"```(?:\w*)\n(.*?)```", text, re.S))
    used = re.findall(r"^(?:\$ )?fedcohort ([a-z]+)", fenced, re.M)
    used += re.findall(r"`fedcohort ([a-z]+)", text)
    unknown = set(used) - set(typer.main.get_command(app).commands)
    assert not unknown, f"{page.name} speaks of unknown commands"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_result_files_exist(page):
    for name in re.findall(r"benchmarks/results/[\w.-]+\.json", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} cites {name}"


def test_numbers_are_those_of_the_result_files(monkeypatch, capsys):
    """Where a page differs from its result file, ``make docs-numbers`` writes it again."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["docs_numbers.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / "docs_numbers.py"), run_name="__main__")
    assert end.value.code == 0, f"make docs-numbers: {capsys.readouterr().out}"


def prose(text):
    """A page without its generated places, its code and its commands."""
    for part in (r"<!-- numbers:.*?<!-- /numbers -->", r"```.*?```", r"`[^`\n]*`"):
        text = re.sub(part, " ", text, flags=re.S)
    text = " ".join(text.split())
    for stated in STATED:
        text = re.sub(stated, " ", text)
    return text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measurements_are_generated(page):
    """A number that was measured stands between markers; one that was not has its reason above."""
    found = [m.group() for m in MEASURED.finditer(prose(page.read_text()))]
    assert not found, f"{page.name}: generate {found}, leave them out, or give a reason in STATED"
