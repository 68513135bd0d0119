"""The output of a product of quantized operands, judged by what any order of summation can give."""

from __future__ import annotations

from typing import Any

import torch

from harness.checks.bound import bound
from harness.finding import float_view
from harness.operations.outcome import Outcome
from reference.bounds import Bounds


def add_output(outcome: Outcome, output: torch.Tensor, limits: Bounds) -> None:
    """Judge the output (M, N) and keep it."""

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        parts = {
            "expected": limits.expected[here], "lower": limits.lower[here], "upper": limits.upper[here],
            "actual": output[here],
        }  # fmt: skip
        found: dict[str, Any] = {"row": row, "column": column, "tile": f"({row // 128}, {column // 128})"}
        for name, value in parts.items():
            found[name], found[f"{name}_bits"] = float_view(value)
        found["rule"] = "exact" if bool(limits.exact[here]) else "bound"
        return found

    outcome.stages.append(bound("output", output, limits, describe=describe))
    outcome.actual, outcome.expected, outcome.limits = output, limits.expected, limits
