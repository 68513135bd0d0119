"""GEMM, judged on the kernel's own codes: quantize both operands, then multiply."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.cases.families import CODES
from narrowgauge.harness.cases.sections import band_rows
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.gemm.case import GemmCase
from narrowgauge.harness.operations.gemm.end_to_end import Operand, add_end_to_end
from narrowgauge.harness.operations.gemm.product import judge_product
from narrowgauge.harness.operations.quantize.call import quantize, quantize_halves
from narrowgauge.harness.operations.quantize.case import SCALE_LAYOUTS
from narrowgauge.harness.operations.quantize.given_codes import given_operand
from narrowgauge.harness.operations.quantize.judge import rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.spec.arguments import split_random
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

COLUMNWISE = {"tn": "", "nn": "w", "nt": "xw"}
"""Operands stored transposed by a layout: their columnwise halves are multiplied."""


def judge_gemm(case: GemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge x @ w.T (+ c) (+ bias), x (M, K) and w (N, K).

    The backend quantizes the operands if it can, and their stages are judged. The product is judged on these codes: a
    wrong code is a single finding. A backend without quantization gets the reference's operands. The
    output is also compared with the product of the reference's own operands, which decides no verdict. Operands of the
    family `codes` are given, and nothing is quantized.
    """
    outcome = Outcome()
    if case.inputs == CODES.name:
        left, right = (given_operand(*pair) for pair in zip((inputs.x, inputs["w"]), case.operand_recipes, strict=True))
        judge_product(outcome, left, right, inputs, backend, TORCH_DTYPES[case.out], view=case.view)
        return outcome
    a, b = judge_operands(case, inputs, backend, outcome)
    bands = band_rows(case.shape[0], case.shape[2]) if case.bands else ()
    judge_product(outcome, a.kernel, b.kernel, inputs, backend, TORCH_DTYPES[case.out], view=case.view, bands=bands)
    if not bands and not backend.brief:
        add_end_to_end(outcome, [(a.own, b.own)])
    return outcome


@dataclass
class Source:
    """An operand of a product before it is quantized."""

    name: str
    matrix: torch.Tensor
    """(M, K), quantized along its rows."""
    recipe: Recipe
    random: tuple[int, int] | None = None
    scale: torch.Tensor | None = None
    half: Half = Half.ROW
    """A columnwise operand is that half of the physical transpose. A rowwise operand is quantize of the matrix, and so
    is a columnwise one if the backend has no `quantize_both`."""
    view: str = "contiguous"
    """Memory of the tensor that is quantized (`laid_out`)."""
    layout: ScaleLayout = LINEAR

    @cached_property
    def physical(self) -> torch.Tensor:
        """The transpose, as it is stored."""
        return self.matrix.T.contiguous()


def judge_operands(case: GemmCase, inputs: Inputs, backend: Backend, outcome: Outcome) -> tuple[Operand, Operand]:
    """x and w of a case, quantized, with their stages judged. x alone is quantized, and is both operands, if x is
    multiplied by itself."""
    sources = [
        Source(
            name, matrix, recipe, random=inputs.counters.get(name), scale=inputs.get(f"scale.{name}"),
            half=Half.of(columnwise=name in COLUMNWISE[case.layout]), view=case.view, layout=SCALE_LAYOUTS[case.scales],
        )
        for name, matrix, recipe in zip("xw", (inputs.x, inputs["w"]), case.operand_recipes, strict=True)
    ][: 1 if case.same else 2]  # fmt: skip
    results = quantize_sources(sources, backend)
    operands = [judge_operand(source, *found, backend, outcome) for source, found in zip(sources, results, strict=True)]
    return operands[0], operands[-1]


def quantize_sources(sources: Sequence[Source], backend: Backend) -> list[tuple[Quantized | None, Half]]:
    """Each source, quantized by the backend, and its half; None if the backend does not quantize the source. The
    process holds the lock of the GPU for all sources together."""
    with backend.host.lock():
        return [_quantize(source, backend) for source in sources]


def _quantize(source: Source, backend: Backend) -> tuple[Quantized | None, Half]:
    recipe = source.recipe
    if makes_own_bits(backend, recipe):
        backend.host.seed(source.random)
    options: dict[str, Any] = {"scale": source.scale, "random": source.random, "layout": source.layout}
    if source.half is Half.COLUMN:
        with suppress(Unsupported):
            physical = laid_out(source.physical, source.view)
            return quantize_halves(backend, [Half.COLUMN], physical, recipe, **options)[0], Half.COLUMN
    with suppress(Unsupported):
        return quantize(backend, laid_out(source.matrix, source.view), recipe, **options), Half.ROW
    return None, Half.ROW


def judge_operand(source: Source, kernel: Quantized | None, half: Half, backend: Backend, outcome: Outcome) -> Operand:
    """The operand that `quantize_sources` gave, with its stages judged; the reference's operand in place of None."""
    recipe = source.recipe
    x, random = half.pick((source.matrix, source.physical)), half.pick(split_random(source.random))
    oracle = reference.quantize_half(half, x, recipe, None, source.scale, random)
    if kernel is None:
        return Operand(with_layout(oracle, source.layout), oracle)
    free, own = rotates_freely(backend), makes_own_bits(backend, recipe)
    subject = Subject.of_half(half, x, recipe, random, free=free, own=own)
    stages, judged = quantize_stages(subject, kernel, oracle, prefix=f"{source.name}.")
    outcome.stages += stages
    outcome.judged.append(judged)
    # Numbers that the kernel does not show are those of the reference.
    shown = replace(kernel, amax=judged.kernel.amax, tensor_scale=judged.kernel.tensor_scale)
    return Operand(shown, oracle)
