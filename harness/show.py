"""One case, element by element: what `narrowgauge show` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from harness.backend import Backend
from harness.capture import Captured
from harness.case import Case
from harness.finding import bits, float_view
from harness.operations.outcome import Outcome
from harness.runner import judge, make_case_inputs
from reference import ops as reference
from reference.decode import decode
from reference.layout import unpack
from reference.quantized import Quantized
from reference.recipes import Recipe, recipe
from reference.scaling import element_factors, tensor_scale


def show_case(
    case: Case, backend: Backend, *, device: str, seed: int, source: Path | None, at: tuple[int, int] | None
) -> bool:
    """Run `case` and print every stage, then the elements around `at`, (row, column), or around the first wrong one.

    True where every stage is right. Raises BackendError and Unsupported.
    """
    console = Console(highlight=False)
    captures = None if source is None else Captured.load(source)
    inputs = make_case_inputs(case, seed=seed, captures=captures, device=device)
    outcome = judge(case, inputs, backend)
    console.print(f"{case.id}   backend {backend.name}, device {device}, seed {seed}", markup=False)
    console.print(_stages(outcome))
    if outcome.actual is None or not outcome.actual.numel():
        console.print("the result is empty")
    elif case.operation == "quantize":
        console.print(_quantize_block(inputs.x, recipe(case.recipe), outcome, _place(outcome, "codes", at, inputs.x)))
    else:
        console.print(_outputs(outcome, _place(outcome, "output", at, outcome.actual)))
    return all(stage.right for stage in outcome.stages)


def _stages(outcome: Outcome) -> Table:
    table = Table("stage", "rule", "compared", "wrong", "", box=None)
    for s in outcome.stages:
        table.add_row(s.stage, s.rule, str(s.compared), str(s.mismatches), s.sentence or "✓")
    return table


def _place(outcome: Outcome, stage: str, at: tuple[int, int] | None, shape_of: torch.Tensor) -> tuple[int, int]:
    """Where to look: as asked, within the matrix; else the first wrong element of the last stage; else the first."""
    if at is not None:
        return min(at[0], shape_of.shape[0] - 1), min(at[1], shape_of.shape[1] - 1)
    for result in outcome.stages:
        if result.stage == stage and result.finding is not None:
            first = result.finding["elements"][0]
            return first["row"], first["column"]
    return 0, 0


def _quantize_block(x: torch.Tensor, rule: Recipe, outcome: Outcome, at: tuple[int, int]) -> Table:
    row, block = at[0], at[1] // rule.block[1]
    columns = range(block * rule.block[1], min((block + 1) * rule.block[1], x.shape[1]))
    oracle = reference.quantize(x, rule)
    kernel = _kernel(outcome, oracle)
    table = Table(title=_block_title(oracle, kernel, row, block), title_justify="left", box=None)
    for heading in ("column", "x", "bits of x", "x·e", "expected", "", "actual", ""):
        table.add_column(heading, justify="right")
    factor = element_factors(kernel.scales[row : row + 1], _encode_scale(kernel, oracle), rule)[0, block]
    codes = [unpack(q.codes[row : row + 1], x.shape[1])[0] for q in (oracle, kernel)]
    for column in columns:
        value, raw = float_view(x[row, column])
        expected, actual = (int(c[column]) for c in codes)
        cells = [str(column), str(value), raw, f"{float(x[row, column].float() * factor):.9g}"]
        for code in (expected, actual):
            cells += [bits(code, rule.element.bits), str(rule.element.value(code))]
        table.add_row(*cells, style="" if expected == actual else "bold red")
    return table


def _kernel(outcome: Outcome, oracle: Quantized) -> Quantized:
    parts = outcome.outputs
    codes, scales = parts["codes"], parts["scales"]
    assert codes is not None
    assert scales is not None
    return Quantized(codes, scales, parts["amax"], oracle.recipe, oracle.shape, parts["tensor_scale"])


def _encode_scale(kernel: Quantized, oracle: Quantized) -> torch.Tensor:
    if kernel.tensor_scale is not None:
        return kernel.tensor_scale
    amax = oracle.amax if kernel.amax is None else kernel.amax
    assert amax is not None
    return tensor_scale(amax, kernel.recipe)


def _block_title(oracle: Quantized, kernel: Quantized, row: int, block: int) -> str:
    lines = [f"row {row}, block {block}"]
    for name, q in (("expected", oracle), ("actual", kernel)):
        scale = q.scales[row, block]
        parts: list[Any] = [bits(int(scale), q.recipe.scale.bits), float(decode(scale.view(1), q.recipe.scale))]
        amax = "not shown" if q.amax is None else float(q.amax)
        encode = "not shown" if q.tensor_scale is None else float(q.tensor_scale)
        lines.append(f"{name}: amax {amax}, tensor scale {encode}, block scale {parts[0]} = {parts[1]}")
    return "\n".join(lines)


def _outputs(outcome: Outcome, at: tuple[int, int]) -> Table:
    assert outcome.actual is not None
    limits = outcome.limits
    assert limits is not None
    row = at[0]
    start = at[1] // 8 * 8
    table = Table(title=f"row {row}", title_justify="left", box=None)
    for heading in ("column", "rule", "expected", "", "lower", "upper", "actual", ""):
        table.add_column(heading, justify="right")
    for column in range(start, min(start + 8, outcome.actual.shape[1])):
        here = (row, column)
        expected, actual = float_view(limits.expected[here]), float_view(outcome.actual[here])
        exact = bool(limits.exact[here])
        table.add_row(
            str(column), "exact" if exact else "bound", str(expected[0]), expected[1],
            "" if exact else str(float(limits.lower[here])), "" if exact else str(float(limits.upper[here])),
            str(actual[0]), actual[1], style="" if expected == actual else "bold",
        )  # fmt: skip
    return table
