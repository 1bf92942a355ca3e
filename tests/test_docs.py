"""The documentation holds: its Python runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Blocks of Python that cannot run in a test, by page and position, and why.
NOT_RUN = {
    ("other-frameworks.md", 1): "an excerpt of examples/nvflare, which needs NVFlare",
    ("other-frameworks.md", 2): "an excerpt of examples/pfl, which needs pfl-research",
    ("ray.md", 0): "needs a running Ray cluster; tests/distribute runs the same calls",
}
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
GENERATED = {"tour.md", "cli.md", "config.md", "api.md", "policies/index.md"}


def blocks(page):
    return PYTHON.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_examples_run(page, tmp_path):
    """All blocks of a page, in order, as one program."""
    code = [b for i, b in enumerate(blocks(page)) if (page.name, i) not in NOT_RUN]
    script = tmp_path / "example.py"
    script.write_text("\n".join(code))
    subprocess.run([sys.executable, script], check=True, timeout=280, cwd=tmp_path)


def test_blocks_that_do_not_run_are_there():
    for (name, i), reason in NOT_RUN.items():
        assert i < len(blocks(ROOT / "docs" / name)), f"{name}, {i}: {reason}"


def test_the_tour_prints_what_it_shows(tmp_path):
    """The cells of the notebook, in order, with the printed output that it was saved with."""
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    script = tmp_path / "tour.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in code))
    result = subprocess.run(
        [sys.executable, script], check=True, timeout=280, capture_output=True, text=True
    )
    shown = "".join("".join(o["text"]) for cell in code for o in cell["outputs"])
    # Accuracies may differ in the last digit where another PyTorch adds in another order.
    assert len(result.stdout.splitlines()) == len(shown.splitlines())
    for line, expected in zip(result.stdout.splitlines(), shown.splitlines(), strict=True):
        if "accuracy" not in expected:
            assert line == expected


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for page in ("index.html", "tour/index.html", "policies/oort/index.html", "cli/index.html"):
        assert (tmp_path / page).stat().st_size > 5000
    assert "local.schedule" not in (tmp_path / "config/index.html").read_text()
    assert "milestones" in (tmp_path / "config/index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        there = target in GENERATED or (page.parent / target).exists()
        assert there, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page):
    import typer

    known = set(typer.main.get_command(app).commands)
    text = page.read_text()
    fenced = "\n".join(re.findall(r"```(?:\w*)\n(.*?)```", text, re.S))
    used = re.findall(r"^(?:\$ )?fedcohort ([a-z]+)", fenced, re.M)
    used += re.findall(r"`fedcohort ([a-z]+)", text)
    assert set(used) <= known, f"{page.name} speaks of unknown commands"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_result_files_exist(page):
    for name in re.findall(r"benchmarks/results/[\w.-]+\.json", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} cites {name}"


def test_numbers_are_those_of_the_result_files():
    """Where a page differs from its result file, ``make docs-numbers`` writes it again."""
    script = ROOT / "benchmarks" / "docs_numbers.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"make docs-numbers: {done.stdout}{done.stderr}"
