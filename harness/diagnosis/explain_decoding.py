"""Diagnosis of dequantized values: known deviations of a dequantizer, each run on the kernel's codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.operands import changed_codes, changed_scales, swap_code_pairs
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import decode_factors, divide, over_elements, per_row, used_tensor_scale
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized

Values = Callable[[Quantized, torch.dtype], torch.Tensor | None]
"""Function from a quantized matrix and a dtype to values (M, K). None if the deviation does not apply to the matrix."""
Factors = Callable[[Quantized], torch.Tensor | None]
"""Function from a quantized matrix to the factors of its blocks, float32 in the shape of its scales, or None."""


_NOT_BY_ROWS = frozenset({
    "scale-of-next-block", "scale-of-previous-block", "scales-transposed", "scales-read-swizzled", "scales-read-linear",
})  # fmt: skip
"""Causes for which values depend on the scales of other rows. They are not tried on a single tile of rows."""


def explain_decoding(outcome: Outcome, wrong_stage: StageResult, limit: WorkLimit) -> list[Explanation]:
    """Deviations that give the bits of every dequantized value. None unless the first wrong stage is `values`."""
    values = outcome.outputs.get("values")
    if wrong_stage.stage != "values" or values is None or not outcome.judged:
        return []
    q = _stored_along_rows(outcome.decoded or outcome.judged[0].kernel)
    tile = _first_wrong_tile(q, values, wrong_stage.wrong_elements)
    explanations: dict[str, Explanation] = {}
    for cause, sentence, compute in decoding_deviations():
        if not limit.may_try(0 if tile is None else tile[1].numel()):
            continue
        if tile is not None and cause not in _NOT_BY_ROWS:
            of_tile = compute(tile[0], values.dtype)
            if of_tile is None or not equal_bits(of_tile, tile[1]):
                continue
        if not limit.may_verify(cause, values.numel()):
            continue
        deviating_values = compute(q, values.dtype)
        if deviating_values is not None and equal_bits(deviating_values, values):
            explanations.setdefault(cause, Explanation(cause, sentence, wrong_stage.stage, exact=True))
    return list(explanations.values())


def _stored_along_rows(q: Quantized) -> Quantized:
    """The matrix with codes and scales stored along rows, and the first code of a byte in the low nibble."""
    recipe = replace(q.recipe, packing="low-first")
    return Quantized(rowwise_codes(q), linear_scales(q), q.amax, recipe, q.shape, q.tensor_scale)


def _first_wrong_tile(
    q: Quantized, values: torch.Tensor, wrong: torch.Tensor | None
) -> tuple[Quantized, torch.Tensor] | None:
    """The rows of the first wrong value that share scales: their matrix and their values."""
    if wrong is None or not bool(wrong.any()):
        return None
    height = 1 if q.recipe.whole else q.recipe.block[0]
    start = int(wrong.any(1).nonzero()[0]) // height * height
    rows = slice(start, min(start + height, q.shape[0]))
    stored_rows = q.recipe.stored_rows
    scales = q.scales if q.recipe.whole else q.scales[rows.start // stored_rows : -(-rows.stop // stored_rows)]
    amax, tensor_scale = (
        numbers[rows] if numbers is not None and len(numbers) > 1 else numbers for numbers in (q.amax, q.tensor_scale)
    )
    shape = (rows.stop - rows.start, q.shape[1])
    return Quantized(q.codes[rows], scales, amax, q.recipe, shape, tensor_scale), values[rows]


def decoding_deviations() -> Iterator[tuple[str, str, Values]]:
    """Deviations of dequantize, the most plausible first: cause, sentence, and function to the values."""
    yield "nibbles-swapped", "the two elements of a byte change places", _values_of_changed_matrix(swap_code_pairs)
    yield (
        "tensor-scale-ignored",
        "codes are multiplied by the scale of their block alone",
        _values_of_factors(_block_scales_only),
    )
    for expression, factors in _ORDERS.items():
        yield f"decode-order:{expression}", f"the factor of a block is {expression}", _values_of_factors(factors)
    yield (
        "decode-order:(code*s)*dec",
        "a code is multiplied by the scale of its block, then by dec",
        _values_in_two_steps,
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield (
            f"decode-through-{name}",
            f"the factor of a block is rounded to {name}",
            _values_of_factors(partial(_rounded_factors, dtype)),
        )
        yield f"values-through-{name}", f"values are rounded to {name} on the way", partial(_rounded_values, dtype)
        yield (
            f"decoded-through-{name}",
            f"a code times the scale of its block is rounded to {name}, then multiplied by the tensor's scale",
            partial(_values_decoded_through, dtype),
        )
        yield (
            f"decoded-through-{name}",
            f"codes, factors and their products are of {name}",
            partial(_values_of_narrow_factors, dtype),
        )
    yield "values-flushed", "values are flushed to 0 where they are subnormal in float32", _flushed_values
    yield "values-flushed", "values are flushed to 0 where they are subnormal in their dtype", _flushed_results
    yield "subnormal-factors-flushed", "the scale 2^-127, which has code 0, is taken for 0", _values_without_code_0
    yield "values-truncated", "values are truncated to their dtype, not rounded", _truncated_values
    for cause, sentence, change in (*changed_scales(), *changed_codes()):
        yield cause, sentence.format("the matrix"), _values_of_changed_matrix(change)
    yield "nan-read-as-number", "the scale 255 is read as infinity, not as NaN", _values_with_infinite_scales
    yield "negative-zero-lost", "-0 becomes 0", lambda q, dtype: dequantize(q, dtype) + 0
    yield "signs-lost", "signs are lost", lambda q, dtype: dequantize(q, dtype).abs()


def _values_of_changed_matrix(change: Callable[[Quantized], Quantized | None]) -> Values:
    """The right values of another matrix."""

    def values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
        changed = change(q)
        return None if changed is None else dequantize(changed, dtype)

    return values


def _values_of_factors(factors: Factors) -> Values:
    def values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
        block_factors = factors(q)
        return None if block_factors is None else _multiply(_codes(q), block_factors, q).to(dtype)

    return values


def _codes(q: Quantized) -> torch.Tensor:
    return decode_stored(q.codes, q.recipe.element, q.shape[1])


def _multiply(values: torch.Tensor, factors: torch.Tensor, q: Quantized) -> torch.Tensor:
    return over_elements(values, per_row(factors, q.recipe, q.shape[0]), q.recipe, torch.mul)


def _scales(q: Quantized) -> torch.Tensor:
    return q.scales if q.recipe.scale is FP32 else decode(q.scales, q.recipe.scale)


def _rounded_factors(dtype: torch.dtype, q: Quantized) -> torch.Tensor:
    return decode_factors(q.scales, q).to(dtype).float()


def _values_without_code_0(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if q.recipe.scale is not E8M0:
        return None
    return _multiply(_codes(q), _scales(q).masked_fill(q.scales == 0, 0), q).to(dtype)


def _values_with_infinite_scales(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if q.recipe.scale is not E8M0:
        return None
    return _multiply(_codes(q), _scales(q).masked_fill(q.scales == (E8M0.nan_code or 0), torch.inf), q).to(dtype)


def _rounded_values(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(q).to(narrow_dtype).to(dtype)


def _values_decoded_through(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    dec = _expression_of_amax(q, lambda amax, max_product: amax * (1.0 / max_product))
    return None if dec is None else (_multiply(_codes(q), _scales(q), q).to(narrow_dtype).float() * dec).to(dtype)


def _values_of_narrow_factors(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    factors = decode_factors(q.scales, q).to(narrow_dtype).float()
    return _multiply(_codes(q), factors, q).to(narrow_dtype).to(dtype)


def _flush(values: torch.Tensor) -> torch.Tensor:
    small = values.abs() < torch.finfo(values.dtype).smallest_normal
    return torch.where(small, torch.zeros_like(values).copysign(values), values)


def _flushed_values(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return _flush(dequantize(q)).to(dtype)


def _flushed_results(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return _flush(dequantize(q, dtype))


def _truncated_values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if dtype is not torch.bfloat16:
        return None
    return (dequantize(q).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def _values_in_two_steps(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    dec = _expression_of_amax(q, lambda amax, max_product: amax * (1.0 / max_product))
    return None if dec is None else (_multiply(_codes(q), _scales(q), q) * dec).to(dtype)


def _block_scales_only(q: Quantized) -> torch.Tensor | None:
    return None if q.recipe.decode == "s" else _scales(q)


def _expression_of_amax(q: Quantized, form: Callable[[torch.Tensor, float], torch.Tensor]) -> torch.Tensor | None:
    """`form` of the amax, (1, 1) or (M, 1), and of the largest product of a code and a scale. None without an amax."""
    return None if q.amax is None or q.recipe.decode == "s" else form(q.amax.unsqueeze(1), q.recipe.max_product)


def _factors_of_amax(form: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Factors:
    """Factors from the block scale, the amax of the tensor, and the largest product of a code and a scale."""

    def factors(q: Quantized) -> torch.Tensor | None:
        return _expression_of_amax(q, lambda amax, max_product: form(_scales(q), amax, max_product))

    return factors


def _factors_of_tensor_scale(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Factors:
    """Factors from the block scale and the tensor scale."""

    def factors(q: Quantized) -> torch.Tensor | None:
        if q.recipe.decode == "s" or q.recipe.tensor_scale == "amax/max":
            return None
        if q.tensor_scale is None and (q.amax is None or q.recipe.statistics != "float32"):
            return None
        return form(_scales(q), used_tensor_scale(q).unsqueeze(1))

    return factors


_ORDERS: dict[str, Factors] = {
    "s*(amax*(1/max))": _factors_of_amax(lambda s, amax, max_product: s * (amax * (1.0 / max_product))),
    "s*(amax/max)": _factors_of_amax(lambda s, amax, max_product: s * (amax / torch.full_like(amax, max_product))),
    "(s*amax)/max": _factors_of_amax(lambda s, amax, max_product: s * amax / torch.full_like(s, max_product)),
    "(s*amax)*(1/max)": _factors_of_amax(lambda s, amax, max_product: s * amax * (1.0 / max_product)),
    "(s*(1/max))*amax": _factors_of_amax(lambda s, amax, max_product: s * (1.0 / max_product) * amax),
    "s/enc": _factors_of_tensor_scale(lambda s, enc: s / enc),
    "s*(1/enc)": _factors_of_tensor_scale(lambda s, enc: s * divide(1.0, enc)),
}
