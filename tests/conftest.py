"""Commands, as a person or a program uses them."""

from __future__ import annotations

import json

import pytest

from fedcohort.cli import invoke


@pytest.fixture
def told(capsys):
    """Run a command and return what it printed, as JSON if that was asked for.

    No name in it may command the terminal, and a mistake, code 2, must be answered in one line on
    standard error.
    """

    def run(*arguments, code=0):
        capsys.readouterr()
        assert invoke([str(argument) for argument in arguments]) == code
        shown = capsys.readouterr()
        if code == 2:
            assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
            assert shown.out == "" or arguments[:2] == ("spec", "check")  # which prints facts, too
        assert not [c for c in shown.out + shown.err if not c.isprintable() and c != "\n"]
        return json.loads(shown.out) if "json" in arguments else shown.out + shown.err

    return run


@pytest.fixture
def fails(told):
    """Run a command that must fail, and return its one line."""
    return lambda *arguments: told(*arguments, code=2)
