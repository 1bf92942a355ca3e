"""The documentation holds: its Python runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = ["README.md", "docs/write-a-policy.md"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_python_examples_run(name, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
    assert blocks
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    subprocess.run([sys.executable, script], check=True, timeout=280, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
