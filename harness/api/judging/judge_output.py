"""Judging the output of a GEMM by the bounds of the reference, computed only for the necessary elements.

An output with the bits of the reference is correct in any order of summation, except for simulated tensor cores and
decoded operands. The bounds of the other outputs are
computed for their rows and columns, slab by slab. A wrong output needs the bounds of all outputs, for its finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from narrowgauge.harness.checks.bit_equality import different_bits, same_bytes
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.harness.operations.stages.quantized import stored_along_rows
from narrowgauge.reference.bounds.bounds import Bounds, bounds
from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation

SLAB = 512
"""Rows of a slab. Float64 temporaries of a slab stay small; every slab decodes the second operand again."""


@dataclass(frozen=True)
class OutputArguments:
    """Arguments of a GEMM: operands (M, K) and (N, K) with linear scales, addends, dtype and order of the sums."""

    a: Quantized
    b: Quantized
    out_dtype: torch.dtype
    c: torch.Tensor | None
    bias: torch.Tensor | None
    order: Summation

    def expected(self) -> torch.Tensor:
        """Output (M, N) of the reference."""
        return gemm(self.a, self.b, out_dtype=self.out_dtype, c=self.c, bias=self.bias)

    def bounds(self) -> Bounds:
        """Bounds of all outputs."""
        return bounds(self.a, self.b, out_dtype=self.out_dtype, c=self.c, bias=self.bias, order=self.order)

    def select(self, rows: torch.Tensor, columns: torch.Tensor | None = None) -> OutputArguments:
        """The arguments of these outputs, given by the numbers of their rows and columns. None: all columns."""
        c = None if self.c is None else self.c[rows]
        if columns is None:
            return replace(self, a=_select_rows(self.a, rows), c=c)
        return replace(
            self, a=_select_rows(self.a, rows), b=_select_rows(self.b, columns),
            c=None if c is None else c[:, columns], bias=None if self.bias is None else self.bias[columns],
        )  # fmt: skip


def judge_output(arguments: OutputArguments, output: torch.Tensor) -> Outcome:
    """The outcome of an output (M, N), contiguous and of the dtype of the arguments: a single stage, `output`."""
    outcome = Outcome(outputs={"output": output})
    wrong_slabs: dict[int, Bounds] = {}
    if _correct(arguments, output, wrong_slabs):
        outcome.stages.append(StageResult("output", "bound", output.numel()))
        return outcome
    limits = _joined([
        wrong_slabs.get(number) or arguments.select(rows).bounds() for number, rows in enumerate(_slabs(output))
    ])  # fmt: skip
    outcome.stages.append(output_stage("output", output, limits, figures=False))
    outcome.actual, outcome.expected, outcome.limits = output, limits.expected, limits
    outcome.products.append(
        Product(arguments.a, arguments.b, arguments.c, arguments.bias, output, limits, arguments.order)
    )
    return outcome


def _correct(arguments: OutputArguments, output: torch.Tensor, wrong_slabs: dict[int, Bounds]) -> bool:
    """Whether all outputs lie within their bounds. The bounds of the first wrong slab are kept in `wrong_slabs`."""
    if not output.numel():
        return True
    differing = None
    if arguments.order.accepts_reference:
        expected = arguments.expected()
        if same_bytes(output, expected):
            return True
        differing = different_bits(output, expected)
    for number, rows in enumerate(_slabs(output)):
        columns = None
        if differing is not None:
            part = differing[rows]
            wrong_rows, wrong_columns = (part.any(across).nonzero()[:, 0] for across in (1, 0))
            if not len(wrong_rows):
                continue
            if 2 * len(wrong_rows) * len(wrong_columns) < part.numel():
                rows, columns = rows[wrong_rows], wrong_columns  # noqa: PLW2901
        limits = arguments.select(rows, columns).bounds()
        found = output[rows] if columns is None else output[rows][:, columns]
        if not bool(within_bounds(found, limits).all()):
            if columns is None:
                wrong_slabs[number] = limits
            return False
    return True


def _slabs(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Numbers of the rows of each slab."""
    for start in range(0, output.shape[0], SLAB):
        yield torch.arange(start, min(start + SLAB, output.shape[0]), device=output.device)


def _joined(parts: list[Bounds]) -> Bounds:
    """The bounds of all slabs."""
    return Bounds(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Bounds)})


def _select_rows(q: Quantized, rows: torch.Tensor) -> Quantized:
    """These rows of an operand, given by their numbers, with a scale for each row."""
    recipe, scales = q.recipe, linear_scales(q)
    if not recipe.whole:
        scales = scales[rows // recipe.stored_rows]
        recipe = replace(recipe, block=(1, recipe.block[1]))
    amax, tensor_scale = (
        numbers[rows] if numbers is not None and recipe.granularity == "row" else numbers
        for numbers in (q.amax, q.tensor_scale)
    )
    codes = stored_along_rows(q)[rows]
    return Quantized(codes, scales, amax, recipe, (len(rows), q.shape[1]), tensor_scale)
