"""A real comparison and a real browser for the tests of reports."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest

from fedcohort.experiments.compare import DEFAULT_SETTING, compare
from fedcohort.experiments.config import NamedConfig

DATA = dataclasses.replace(DEFAULT_SETTING.data, clients=24)
SMALL = dataclasses.replace(
    DEFAULT_SETTING, rounds=6, seeds=(0, 1), device="cpu", target=0.5, data=DATA
)
NAMES = ("uniform", "sketch-match", "oort", "power-of-choice", "active-fl")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run"
)
MISSING = "install a browser for this test: apt-get install chromium (Debian), or set CHROMIUM"


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    compare(SMALL, [NamedConfig(name) for name in NAMES], folder)
    return folder


@pytest.fixture(scope="session")
def browser():
    """Start Chromium; without one, skip, but fail in continuous integration."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield started
        started.close()
