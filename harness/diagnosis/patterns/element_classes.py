"""Classes of elements of a wrong stage, by their values: ties, zeros, subnormal numbers and the like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.quantized import Judged, scaled_elements, stored_along_rows, used_scale
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import over_elements, per_row, tensor_scale, unrounded_scales
from narrowgauge.spec.formats import E4M3, FP32, Format

ElementClass = tuple[str, str, torch.Tensor]
"""Name, phrase for "only …", and mask of the elements in the coordinates of the stage."""


def element_classes(outcome: Outcome, wrong_stage: StageResult) -> Iterator[ElementClass]:
    """Classes of a stage's elements: codes, scales and values by the quantized elements, GEMM outputs by their sums."""
    assert wrong_stage.wrong_elements is not None
    shape = wrong_stage.wrong_elements.shape
    if products := [product for product in outcome.products if product.stage == wrong_stage.stage]:
        candidates = _output_classes(products)
    else:
        judged = _judged_matrix(outcome, wrong_stage)
        kind = wrong_stage.stage.rpartition(".")[2]
        class_functions = {"codes": code_classes, "scales": scale_classes, "values": code_classes}
        candidates = class_functions[kind](judged) if judged is not None and kind in class_functions else iter(())
        if judged is not None and judged.kernel.transposed:
            candidates = ((name, phrase, mask.T) for name, phrase, mask in candidates)
    for name, phrase, mask in candidates:
        if mask.shape == shape:
            yield name, phrase, mask


def _judged_matrix(outcome: Outcome, wrong_stage: StageResult) -> Judged | None:
    """The matrix with the wrong stage. Among several sections or matrices, the finding names its number."""
    prefix = wrong_stage.stage.rpartition(".")[0]
    stage_matrices = [judged for judged in outcome.judged if judged.prefix.rstrip(".") == prefix]
    first = wrong_stage.finding["elements"][0] if wrong_stage.finding else {}
    part_number = first.get("section", first.get("matrix", 0))
    return stage_matrices[part_number] if part_number < len(stage_matrices) else None


# ---- a quantized matrix ----------------------------------------------------------------------------------------------


def _tensor_scale(judged: Judged) -> torch.Tensor | None:
    """Tensor scale with which the kernel's stages are judged."""
    recipe, oracle, result = judged.subject.recipe, judged.oracle, judged.given
    if oracle.amax is None or oracle.tensor_scale is None or recipe.tensor_scale == "given":
        return oracle.tensor_scale
    if result.tensor_scale is not None:
        return result.tensor_scale
    return tensor_scale(oracle.amax if result.amax is None else result.amax, recipe, judged.subject.x.dtype)


def code_classes(judged: Judged) -> Iterator[ElementClass]:
    subject, recipe = judged.subject, judged.subject.recipe
    x, scales = subject.x, linear_scales(judged.kernel)
    factor = used_scale(_tensor_scale(judged), scales, judged.given)
    blocks = per_row(subject.blocks, recipe, x.shape[0])
    rows = per_row(scales, recipe, x.shape[0])
    values = scaled_elements(x, rows, factor, recipe, blocks)
    magnitude, fmt = values.abs(), recipe.element
    yield "ties", "where the scaled element is a tie", _ties(magnitude, fmt)
    yield from _number_classes(x)
    yield "saturated", f"where the scaled element is above {fmt.max:g}", magnitude > fmt.max
    smallest = fmt.value(1 << fmt.mantissa_bits)
    yield "subnormal-codes", f"where the scaled element is below {smallest:g}", (magnitude < smallest) & (magnitude > 0)
    kernel_codes = elements(stored_along_rows(judged.kernel), x.shape[1], recipe)
    yield "negative-zero", "where the kernel's code is -0", kernel_codes == fmt.sign_code
    is_block_amax = over_elements(x.abs().float(), blocks, recipe, torch.eq)
    yield "largest-of-block", "at the largest element of a block", is_block_amax
    if recipe.scale is not FP32 and not recipe.whole:
        stored = decode(rows, recipe.scale)
        for name, phrase, mask in _stored_scale_classes(stored, recipe.scale):
            yield (
                name,
                phrase,
                over_elements(torch.zeros_like(x, dtype=torch.float32), mask.float(), recipe, torch.add) > 0,
            )


def scale_classes(judged: Judged) -> Iterator[ElementClass]:
    subject, recipe = judged.subject, judged.subject.recipe
    amaxes = subject.blocks
    yield "zero-blocks", "of blocks that are 0", amaxes == 0
    yield "subnormal", "of blocks whose largest element is subnormal", _subnormal(amaxes, subject.x.dtype)
    yield "not-finite", "of blocks with infinity or NaN", ~amaxes.isfinite()
    yield "largest-of-tensor", "of blocks that hold the tensor's largest element", amaxes == tensor_amax(amaxes)
    if recipe.scale is E4M3:
        unrounded = unrounded_scales(amaxes, _tensor_scale(judged), recipe, subject.x.dtype)
        yield "ties", "where the scale is a tie before it is rounded", _ties(unrounded, E4M3)
        yield from _stored_scale_classes(decode(encode(unrounded, E4M3), E4M3), E4M3)


def _stored_scale_classes(scales: torch.Tensor, fmt: Format) -> Iterator[ElementClass]:
    smallest = fmt.value(1 << fmt.mantissa_bits) if fmt is E4M3 else 0.0
    yield "zero-scales", "where the block scale is 0", scales == 0
    yield "subnormal-scales", "where the block scale is subnormal", (scales > 0) & (scales < smallest)
    yield "saturated-scales", f"where the block scale is {fmt.max:g} or above", scales >= fmt.max


def _number_classes(x: torch.Tensor) -> Iterator[ElementClass]:
    yield "negative", "where the element is negative", x < 0
    yield "positive", "where the element is positive", x > 0
    yield "zero", "where the element is 0", x == 0
    yield "subnormal", "where the element is subnormal", _subnormal(x, x.dtype)
    yield "not-finite", "where the element is infinite or NaN", ~x.isfinite()
    yield "nan", "where the element is NaN", x.isnan()


def _subnormal(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x != 0) & (x.abs() < torch.finfo(dtype).smallest_normal)


def _ties(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """bool mask of magnitudes halfway between two neighbouring numbers of a format."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float64, device=magnitude.device)
    return torch.isin(magnitude, ((points[1:] + points[:-1]) / 2).to(magnitude.dtype))  # the points are exact in bf16


# ---- a product -------------------------------------------------------------------------------------------------------


def _output_classes(products: Sequence[Product]) -> Iterator[ElementClass]:
    joined = {
        name: torch.cat([getattr(product.limits, name) for product in products]) for name in ("exact", "expected")
    }
    expected, exact = joined["expected"], joined["exact"]
    yield "exact-sums", "where no order of summation can round", exact
    yield "rounding-sums", "where the order of summation can round", ~exact
    yield "negative", "where the output is negative", expected < 0
    yield "positive", "where the output is positive", expected > 0
    yield "zero", "where the output is 0", expected == 0
    yield "subnormal", "where the output is subnormal", _subnormal(expected, expected.dtype)
    yield "not-finite", "where the output is infinite or NaN", ~expected.isfinite()
    if all(product.c is not None for product in products):
        yield "with-c", "where c is not 0", torch.cat([product.c for product in products if product.c is not None]) != 0
    if all(product.bias is not None for product in products):
        has_bias = [product.bias.expand_as(product.output) != 0 for product in products if product.bias is not None]
        yield "with-bias", "where the bias is not 0", torch.cat(has_bias)
    start = 0
    for part_number, product in enumerate(products if len(products) > 1 else ()):
        mask = torch.zeros_like(expected, dtype=torch.bool)
        mask[start : start + len(product.output)] = True
        start += len(product.output)
        yield f"section-{part_number}", f"in section {part_number}", mask
