"""The types, as `make lint` checks them: a test, since a process before all tests would leave a core idle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_types_hold() -> None:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[test]'")
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
