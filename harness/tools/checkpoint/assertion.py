"""`narrowgauge.assert_checkpoint`."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.tools.checkpoint.findings import alike
from narrowgauge.harness.tools.checkpoint.judge import judge_checkpoint

SHOWN = 20
"""Findings of a message."""


def assert_checkpoint(
    path: str | Path, *more: str | Path, weights: str | Path | None = None, strict: bool = False, scales: str = ""
) -> None:
    """Assert that the quantized weights in files are possible, and with `weights` that they are right.

    path, more: a .safetensors or .gguf file, several shards, or a folder. weights: file or folder with the weights that
    were quantized (float32, bfloat16 or float16), under the same names. strict: warnings fail too.
    scales: pattern of the names of scales, such as "{weight}.scale", for names that no known layout has.
    Layouts and rules: docs/checkpoints.md.

    Raises AssertionError with the findings; CheckpointError, a ValueError, for files that cannot be read, and for a
    checkpoint without a quantized matrix.
    """
    __tracebackhide__ = True
    result = judge_checkpoint(path, *more, weights=weights, scales=scales)
    if result.passed(strict=strict):
        return
    found = alike(finding for finding in result.all_findings if finding.severity != "note")
    lines = [f"{path}: {result.sentence}", *(line for first, *more_ in found[:SHOWN] for line in first.lines(more_))]
    if len(found) > SHOWN:
        lines.append(f"{len(found) - SHOWN} more findings: narrowgauge checkpoint {path}")
    raise AssertionError(escape("\n".join(lines)))
