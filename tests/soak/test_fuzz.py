"""A few seconds of what `make soak` does for longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).with_name("fuzz.py")


def test_only_our_errors_come_out_of_damaged_files(tmp_path):
    command = [sys.executable, str(FUZZ), "--seconds", "240", "--count", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) > 15, done.stderr[-2000:]
    assert {r["target"]: r["errors"] for r in results if r["errors"]} == {}
    assert min(result["trials"] for result in results) > 0
