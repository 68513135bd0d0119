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
from narrowgauge.harness.operations.quantize.call import quantize, quantize_both
from narrowgauge.harness.operations.quantize.given_codes import given_operand
from narrowgauge.harness.operations.quantize.judge import columnwise_subject, only_half, rotates_freely, second_half
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

COLUMNWISE = {"tn": "", "nn": "w", "nt": "xw"}
"""Operands that a layout stores transposed, so that their columnwise halves are multiplied."""


def judge_gemm(case: GemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge x @ w.T (+ c) (+ bias), x (M, K) and w (N, K).

    The backend quantizes the operands if it can, and their stages are judged. The product is judged on these codes, so
    that a wrong code is one finding. A backend that does not quantize the operands gets those of the reference. The
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
    if not bands:
        add_end_to_end(outcome, [(a.own, b.own)])
    return outcome


@dataclass
class Source:
    """An operand of a product before it is quantized."""

    name: str
    matrix: torch.Tensor
    """(M, K), quantized along its rows."""
    recipe: Recipe
    random: Random | None = None
    scale: torch.Tensor | None = None
    columnwise: bool = False
    """Whether the operand is the columnwise half of the physical transpose. A rowwise operand is quantize of the
    matrix, and so is a columnwise one if the backend has no `quantize_both`."""
    view: str = "contiguous"
    """Memory of the tensor that is quantized (`laid_out`)."""
    swizzled: bool = False
    """Whether the scales of the operand are swizzled."""

    @cached_property
    def physical(self) -> torch.Tensor:
        """The transpose, as it is stored."""
        return self.matrix.T.contiguous()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of quantize."""
        return {"scale": self.scale, "random": self.random}


def judge_operands(case: GemmCase, inputs: Inputs, backend: Backend, outcome: Outcome) -> tuple[Operand, Operand]:
    """x and w of a case, quantized, with their stages judged. Scales are swizzled if the case asks for it; x alone is
    quantized, and is both operands, if x is multiplied by itself."""
    sources = [
        Source(
            name, matrix, recipe, random=inputs.random(name), scale=inputs.get(f"scale.{name}"),
            columnwise=name in COLUMNWISE[case.layout], view=case.view, swizzled=case.scales == "swizzled",
        )
        for name, matrix, recipe in zip("xw", (inputs.x, inputs["w"]), case.operand_recipes, strict=True)
    ][: 1 if case.same else 2]  # fmt: skip
    results = quantize_sources(sources, backend)
    operands = [judge_operand(source, *found, backend, outcome) for source, found in zip(sources, results, strict=True)]
    return operands[0], operands[-1]


def quantize_sources(sources: Sequence[Source], backend: Backend) -> list[tuple[Quantized | None, bool]]:
    """Each source as the backend quantizes it, and whether it is a columnwise half; None if the backend does not
    quantize it. The process holds the lock of the GPU for all sources together."""
    with backend.host.lock():
        return [_quantize(source, backend) for source in sources]


def _quantize(source: Source, backend: Backend) -> tuple[Quantized | None, bool]:
    recipe = source.recipe
    if makes_own_bits(backend, recipe):
        backend.host.seed(source.random)
    options = {**source.options, "swizzled": source.swizzled}
    if source.columnwise:
        with suppress(Unsupported):
            physical = laid_out(source.physical, source.view)
            return only_half(quantize_both(backend, physical, recipe, rowwise=False, **options)), True
    with suppress(Unsupported):
        return quantize(backend, laid_out(source.matrix, source.view), recipe, **options), False
    return None, False


def judge_operand(source: Source, kernel: Quantized | None, half: bool, backend: Backend, outcome: Outcome) -> Operand:
    """The operand that `quantize_sources` gave, with its stages judged; the reference's operand if it gave None."""
    recipe = source.recipe
    free, own = rotates_freely(backend), makes_own_bits(backend, recipe)
    if half:
        oracle = only_half(reference.quantize_both(source.physical, recipe, rowwise=False, **source.options))
        subject = columnwise_subject(source.matrix, recipe, second_half(source.random), free=free, own=own)
    else:
        oracle = reference.quantize(source.matrix, recipe, **source.options)
        subject = Subject(source.matrix, recipe, source.random, free=free, own=own)
    if kernel is None:
        return Operand(_swizzled(oracle) if source.swizzled else oracle, oracle)
    stages, judged = quantize_stages(subject, kernel, oracle, prefix=f"{source.name}.")
    outcome.stages += stages
    outcome.judged.append(judged)
    # Numbers that the kernel does not show are those of the reference.
    shown = replace(kernel, amax=judged.kernel.amax, tensor_scale=judged.kernel.tensor_scale)
    return Operand(shown, oracle)


def _swizzled(q: Quantized) -> Quantized:
    """`q` with its scales in the 128×4 layout."""
    return replace(q, scales=reference.swizzle(linear_scales(q)), swizzled=True)
