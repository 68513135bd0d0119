"""Commands that refuse a foreign file: a clear line, exit status 2, and little memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

from typer.testing import CliRunner

from narrowgauge.harness.cli import app

MOST_MEMORY = 128 << 20
"""Bytes that a refusal may allocate in Python and NumPy at a time."""
LONGEST_MESSAGE = 6000


def refusal(*arguments: Any) -> str:
    """The only line of a command before its exit status 2."""
    tracemalloc.start()
    try:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("narrowgauge: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < LONGEST_MESSAGE
    assert peak < MOST_MEMORY, f"{peak >> 20} MiB"
    return result.stderr.removeprefix("narrowgauge: ").rstrip("\n")
