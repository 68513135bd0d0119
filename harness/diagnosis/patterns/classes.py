"""Classes: what elements of a wrong stage are, besides where they lie."""

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

Class = tuple[str, str, torch.Tensor]
"""Its name, its words as in "only …", and the mask of its elements, in the coordinates of the stage."""


def classes(outcome: Outcome, wrong: StageResult) -> Iterator[Class]:
    """The classes of a stage's elements: of codes, block scales and dequantized values by what was quantized, of a
    product's outputs by what they are sums of."""
    assert wrong.wrong is not None
    shape = wrong.wrong.shape
    if products := [one for one in outcome.products if one.stage == wrong.stage]:
        found = _of_outputs(products)
    else:
        judged = _judged(outcome, wrong)
        kind = wrong.stage.rpartition(".")[2]
        makers = {"codes": _of_codes, "scales": _of_scales, "values": _of_codes}
        found = makers[kind](judged) if judged is not None and kind in makers else iter(())
        if judged is not None and judged.kernel.transposed:
            found = ((name, words, mask.T) for name, words, mask in found)
    for name, words, mask in found:
        if mask.shape == shape:
            yield name, words, mask


def _judged(outcome: Outcome, wrong: StageResult) -> Judged | None:
    """The matrix whose stage is wrong: of sections and matrices the one that the finding names."""
    prefix = wrong.stage.rpartition(".")[0]
    of_stage = [judged for judged in outcome.judged if judged.prefix.rstrip(".") == prefix]
    first = wrong.finding["elements"][0] if wrong.finding else {}
    number = first.get("section", first.get("matrix", 0))
    return of_stage[number] if number < len(of_stage) else None


# ---- a quantized matrix ----------------------------------------------------------------------------------------------


def _encode(judged: Judged) -> torch.Tensor | None:
    """The tensor's scale by which the kernel's own stages are judged."""
    recipe, oracle, given = judged.subject.recipe, judged.oracle, judged.given
    if oracle.amax is None or oracle.tensor_scale is None or recipe.tensor_scale == "given":
        return oracle.tensor_scale
    if given.tensor_scale is not None:
        return given.tensor_scale
    return tensor_scale(oracle.amax if given.amax is None else given.amax, recipe, judged.subject.x.dtype)


def _of_codes(judged: Judged) -> Iterator[Class]:
    subject, recipe = judged.subject, judged.subject.recipe
    x, scales = subject.x, linear_scales(judged.kernel)
    factor = used_scale(_encode(judged), scales, judged.given)
    blocks = per_row(subject.blocks, recipe, x.shape[0])
    rows = per_row(scales, recipe, x.shape[0])
    values = scaled_elements(x, rows, factor, recipe, blocks)
    size, fmt = values.abs(), recipe.element
    yield "ties", "where the scaled element is a tie", _ties(size, fmt)
    yield from _of_numbers(x)
    yield "saturated", f"where the scaled element is above {fmt.max:g}", size > fmt.max
    smallest = fmt.value(1 << fmt.mantissa_bits)
    yield "subnormal-codes", f"where the scaled element is below {smallest:g}", (size < smallest) & (size > 0)
    held = elements(stored_along_rows(judged.kernel), x.shape[1], recipe)
    yield "negative-zero", "where the kernel's code is -0", held == fmt.sign_code
    largest = over_elements(x.abs().float(), blocks, recipe, torch.eq)
    yield "largest-of-block", "at the largest element of a block", largest
    if recipe.scale is not FP32 and not recipe.whole:
        stored = decode(rows, recipe.scale)
        for name, words, mask in _of_stored(stored, recipe.scale):
            yield (
                name,
                words,
                over_elements(torch.zeros_like(x, dtype=torch.float32), mask.float(), recipe, torch.add) > 0,
            )


def _of_scales(judged: Judged) -> Iterator[Class]:
    subject, recipe = judged.subject, judged.subject.recipe
    amaxes = subject.blocks
    yield "zero-blocks", "of blocks that are 0", amaxes == 0
    yield "subnormal", "of blocks whose largest element is subnormal", _subnormal(amaxes, subject.x.dtype)
    yield "not-finite", "of blocks with infinity or NaN", ~amaxes.isfinite()
    yield "largest-of-tensor", "of blocks that hold the tensor's largest element", amaxes == tensor_amax(amaxes)
    if recipe.scale is E4M3:
        unrounded = unrounded_scales(amaxes, _encode(judged), recipe, subject.x.dtype)
        yield "ties", "where the scale is a tie before it is rounded", _ties(unrounded, E4M3)
        yield from _of_stored(decode(encode(unrounded, E4M3), E4M3), E4M3)


def _of_stored(scales: torch.Tensor, fmt: Format) -> Iterator[Class]:
    smallest = fmt.value(1 << fmt.mantissa_bits) if fmt is E4M3 else 0.0
    yield "zero-scales", "where the block scale is 0", scales == 0
    yield "subnormal-scales", "where the block scale is subnormal", (scales > 0) & (scales < smallest)
    yield "saturated-scales", f"where the block scale is {fmt.max:g} or above", scales >= fmt.max


def _of_numbers(x: torch.Tensor) -> Iterator[Class]:
    yield "negative", "where the element is negative", x < 0
    yield "positive", "where the element is positive", x > 0
    yield "zero", "where the element is 0", x == 0
    yield "subnormal", "where the element is subnormal", _subnormal(x, x.dtype)
    yield "not-finite", "where the element is infinite or NaN", ~x.isfinite()
    yield "nan", "where the element is NaN", x.isnan()


def _subnormal(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x != 0) & (x.abs() < torch.finfo(dtype).smallest_normal)


def _ties(size: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Magnitudes halfway between two neighbours of a format."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float64, device=size.device)
    return torch.isin(size.double(), (points[1:] + points[:-1]) / 2)


# ---- a product -------------------------------------------------------------------------------------------------------


def _of_outputs(products: Sequence[Product]) -> Iterator[Class]:
    joined = {name: torch.cat([getattr(one.limits, name) for one in products]) for name in ("exact", "expected")}
    expected, exact = joined["expected"], joined["exact"]
    yield "exact-sums", "where no order of summation can round", exact
    yield "rounding-sums", "where the order of summation can round", ~exact
    yield "negative", "where the output is negative", expected < 0
    yield "positive", "where the output is positive", expected > 0
    yield "zero", "where the output is 0", expected == 0
    yield "subnormal", "where the output is subnormal", _subnormal(expected, expected.dtype)
    yield "not-finite", "where the output is infinite or NaN", ~expected.isfinite()
    if all(one.c is not None for one in products):
        yield "with-c", "where c is not 0", torch.cat([one.c for one in products if one.c is not None]) != 0
    if all(one.bias is not None for one in products):
        added = [one.bias.expand_as(one.output) != 0 for one in products if one.bias is not None]
        yield "with-bias", "where the bias is not 0", torch.cat(added)
    start = 0
    for number, one in enumerate(products if len(products) > 1 else ()):
        mask = torch.zeros_like(expected, dtype=torch.bool)
        mask[start : start + len(one.output)] = True
        start += len(one.output)
        yield f"section-{number}", f"in section {number}", mask
