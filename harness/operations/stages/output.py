"""The stage of an output with bounds, (M, N)."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.checks.gemm_bound import check_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.reference.bounds.bounds import Bounds


def rule_at(limits: Bounds, here: tuple[int, int]) -> str:
    """Why an output is right or wrong: no order of summation rounds, the declared order gives it, or a proved interval
    of all orders holds it."""
    if int(limits.tier[here]) == 1:
        return "declared order"
    return "no order rounds" if bool(limits.exact[here]) else "proved interval"


def output_stage(name: str, output: torch.Tensor, limits: Bounds, *, figures: bool = True) -> StageResult:
    """Judge an output (M, N) by its bounds, as the stage of that name; `figures` as of `bound`."""

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        parts = {
            "expected": limits.expected[here], "lower": limits.lower[here], "upper": limits.upper[here],
            "actual": output[here],
        }  # fmt: skip
        found: dict[str, Any] = {"row": row, "column": column, "tile": f"({row // 128}, {column // 128})"}
        for part, value in parts.items():
            found[part], found[f"{part}_bits"] = float_view(value)
        found["rule"] = rule_at(limits, here)
        return found

    return check_bounds(name, output, limits, describe=describe, figures=figures)
