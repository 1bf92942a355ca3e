"""The page docs/measure.md shows what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from fedcohort.cli import app, invoke

PAGE = Path(__file__).parents[2] / "docs" / "measure.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.S)


def lines(text):
    """Lines without what compression libraries decide."""
    kept = (line.rstrip() for line in text.splitlines())
    return [line for line in kept if line and not line.startswith("│ size")]


def test_commands_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # some test runners set it
    make, *python = blocks("python")
    exec(compile(make, "make", "exec"), {})
    for block in blocks("console"):
        command, _, wanted = block.removeprefix("$ ").partition("\n")
        assert invoke(shlex.split(command)[1:]) == 0
        shown = capsys.readouterr().out
        if "--epsilon" not in command:  # noise differs from run to run
            assert lines(shown) == lines(wanted)
    exec(compile("\n".join(python), "python", "exec"), {})
    assert capsys.readouterr().out == "['client-07']\n"


def test_options_exist():
    def options(command):
        yield from (name for p in command.params for name in (*p.opts, *p.secondary_opts))
        for child in getattr(command, "commands", {}).values():
            yield from options(child)

    shown = set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text()))
    assert shown <= set(options(typer.main.get_command(app)))
