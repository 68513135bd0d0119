"""Diagnosis of dequantized values: known deviations of a dequantizer, each run on the kernel's codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.operands import CHANGED_CODES, CHANGED_SCALES, swap_code_pairs
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW, flush
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation, in_turn, rows_of
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import decode_factors, divide, over_elements, per_row, used_tensor_scale
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized

Values = torch.Tensor | None
"""Values (M, K). None if the deviation does not apply to the matrix."""
VALUES, FACTORS = "values", "factors"
"""Steps of deviations whose `change` gives the values, from a matrix and a dtype; and the factors of its blocks, in the
shape of its scales, float32, or None. The change of every other step gives a changed matrix, or None."""


def explain_decoding(outcome: Outcome, wrong_stage: StageResult, limit: WorkLimit) -> list[Explanation]:
    """Deviations that give the bits of every dequantized value. None unless the first wrong stage is `values`."""
    values = outcome.outputs.get("values")
    if wrong_stage.stage != "values" or values is None or not outcome.judged:
        return []
    q = _stored_along_rows(outcome.decoded or outcome.judged[0].kernel)
    tile = _first_wrong_tile(q, values, wrong_stage.wrong_elements)
    explanations: dict[str, Explanation] = {}
    for row in decoding_deviations(q):
        if not limit.may_try(0 if tile is None else tile[1].numel()):
            continue
        if tile is not None and row.row_local:
            of_tile = values_of(row, tile[0], values.dtype)
            if of_tile is None or not equal_bits(of_tile, tile[1]):
                continue
        if not limit.may_verify(row.cause, values.numel()):
            continue
        deviating_values = values_of(row, q, values.dtype)
        if deviating_values is not None and equal_bits(deviating_values, values):
            explanations.setdefault(row.cause, Explanation.of(row, wrong_stage.stage))
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


def decoding_deviations(q: Quantized) -> Iterator[Deviation[Quantized]]:
    """Deviations of dequantize, the most plausible first."""
    yield from rows_of(DECODINGS, q)
    for row in rows_of((*CHANGED_SCALES, *CHANGED_CODES), q):
        yield replace(row, sentence=row.sentence.format(of="the matrix"))
    yield from rows_of(SIGNS, q)


def values_of(row: Deviation[Quantized], q: Quantized, dtype: torch.dtype) -> Values:
    """The values with the deviation."""
    if row.step == VALUES:
        values: Values = row.result(q, dtype)
        return values
    changed = row.result(q)
    if changed is None or row.step != FACTORS:
        return None if changed is None else dequantize(changed, dtype)
    return _multiply(_codes(q), changed, q).to(dtype)


def _codes(q: Quantized) -> torch.Tensor:
    return decode_stored(q.codes, q.recipe.element, q.shape[1])


def _multiply(values: torch.Tensor, factors: torch.Tensor, q: Quantized) -> torch.Tensor:
    return over_elements(values, per_row(factors, q.recipe, q.shape[0]), q.recipe, torch.mul)


def _scales(q: Quantized) -> torch.Tensor:
    return q.scales if q.recipe.scale is FP32 else decode(q.scales, q.recipe.scale)


def _rounded_factors(dtype: torch.dtype, q: Quantized) -> torch.Tensor:
    return decode_factors(q.scales, q).to(dtype).float()


def _factor_of_code(code: int, factor: float, q: Quantized) -> torch.Tensor | None:
    """Factors of E8M0 scales, with another number for a code."""
    return _scales(q).masked_fill(q.scales == code, factor) if q.recipe.scale is E8M0 else None


def _rounded_values(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(q).to(narrow_dtype).to(dtype)


def _values_decoded_through(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    dec = _expression_of_amax(q, lambda amax, max_product: amax * (1.0 / max_product))
    return None if dec is None else (_multiply(_codes(q), _scales(q), q).to(narrow_dtype).float() * dec).to(dtype)


def _values_of_narrow_factors(narrow_dtype: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    factors = decode_factors(q.scales, q).to(narrow_dtype).float()
    return _multiply(_codes(q), factors, q).to(narrow_dtype).to(dtype)


def _truncated_values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if dtype is not torch.bfloat16:
        return None
    return (dequantize(q).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def _values_in_two_steps(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    dec = _expression_of_amax(q, lambda amax, max_product: amax * (1.0 / max_product))
    return None if dec is None else (_multiply(_codes(q), _scales(q), q) * dec).to(dtype)


def _expression_of_amax(q: Quantized, form: Callable[[torch.Tensor, float], torch.Tensor]) -> torch.Tensor | None:
    """`form` of the amax, (1, 1) or (M, 1), and of the largest product of a code and a scale. None without an amax."""
    return None if q.amax is None or q.recipe.decode == "s" else form(q.amax.unsqueeze(1), q.recipe.max_product)


Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_amax(form: Form, q: Quantized) -> torch.Tensor | None:
    """Factors from the block scale, the amax of the tensor, and the largest product of a code and a scale."""
    return _expression_of_amax(q, lambda amax, max_product: form(_scales(q), amax, torch.full_like(amax, max_product)))


def _of_tensor_scale(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], q: Quantized) -> torch.Tensor | None:
    """Factors from the block scale and the tensor scale."""
    if q.recipe.decode == "s" or q.recipe.tensor_scale == "amax/max":
        return None
    if q.tensor_scale is None and (q.amax is None or q.recipe.statistics != "float32"):
        return None
    return form(_scales(q), used_tensor_scale(q).unsqueeze(1))


def _saturated(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return dequantize(q).clamp(-most, most).to(dtype)


_LANES = {
    "the last element": slice(-1, None), "the first element": slice(0, 1), "the second half": slice(-8, None),
    "the first half": slice(0, 8),
}  # fmt: skip
"""Elements of a block of 16."""


def _of_other_block(place: tuple[slice, int], q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    """Values in which some elements of each block of 16 columns have the factor of a neighbouring block."""
    lanes, step = place
    factors = per_row(decode_factors(q.scales, q), q.recipe, q.shape[0])
    if q.recipe.block[1] != 16 or factors.shape[1] < 2:
        return None
    numbers = (torch.arange(factors.shape[1], device=factors.device) + step).clamp(0, factors.shape[1] - 1)
    moved = torch.zeros(16, dtype=torch.bool, device=factors.device)
    moved[lanes] = True
    codes, columns = _codes(q), moved.repeat(factors.shape[1])[: q.shape[1]]
    right, other = (over_elements(codes, each, q.recipe, torch.mul) for each in (factors, factors[:, numbers]))
    return torch.where(columns, other, right).to(dtype)


def _neighbours() -> dict[str, tuple[slice, int]]:
    steps = {"next": 1, "previous": -1}
    return {f"{name} of a block has the factor of the {word} block": (lanes, step)
            for name, lanes in _LANES.items() for word, step in steps.items()}  # fmt: skip


DECODINGS: tuple[Deviation[Quantized], ...] = (
    Deviation("nibbles-swapped", "the two elements of a byte change places", "codes", swap_code_pairs),
    Deviation("tensor-scale-ignored", "codes are multiplied by the scale of their block alone", FACTORS,
              lambda q: None if q.recipe.decode == "s" else _scales(q)),
    Deviation("decode-order:{}", "the factor of a block is {}", FACTORS, _of_amax, {
        "s*(amax*(1/max))": lambda s, amax, most: s * (amax * (1.0 / most)),
        "s*(amax/max)": lambda s, amax, most: s * (amax / most),
        "(s*amax)/max": lambda s, amax, most: s * amax / most,
        "(s*amax)*(1/max)": lambda s, amax, most: s * amax * (1.0 / most),
        "(s*(1/max))*amax": lambda s, amax, most: s * (1.0 / most) * amax,
    }),
    Deviation("decode-order:{}", "the factor of a block is {}", FACTORS, _of_tensor_scale, {
        "s/enc": lambda s, enc: s / enc, "s*(1/enc)": lambda s, enc: s * divide(1.0, enc),
    }),
    Deviation("decode-order:(code*s)*dec", "a code is multiplied by the scale of its block, then by dec", VALUES,
              _values_in_two_steps),
    *in_turn(
        NARROW,
        Deviation("decode-through-{}", "the factor of a block is rounded to {}", FACTORS, _rounded_factors),
        Deviation("values-through-{}", "values are rounded to {} on the way", VALUES, _rounded_values),
        Deviation("decoded-through-{}", "a code times the scale of its block is rounded to {}, then multiplied by the "
                  "tensor's scale", VALUES, _values_decoded_through),
        Deviation("decoded-through-{}", "codes, factors and their products are of {}", VALUES,
                  _values_of_narrow_factors),
    ),
    Deviation("values-flushed", "values are flushed to 0 where they are subnormal in float32", VALUES,
              lambda q, dtype: flush(dequantize(q)).to(dtype)),
    Deviation("values-flushed", "values are flushed to 0 where they are subnormal in their dtype", VALUES,
              lambda q, dtype: flush(dequantize(q, dtype))),
    Deviation("subnormal-factors-flushed", "the scale 2^-127, which has code 0, is taken for 0", FACTORS,
              partial(_factor_of_code, 0, 0.0)),
    Deviation("values-saturated", "values too large for their dtype are its largest number", VALUES, _saturated),
    Deviation("factor-of-other-block", "{}", VALUES, _of_other_block, _neighbours()),
    Deviation("values-truncated", "values are truncated to their dtype, not rounded", VALUES, _truncated_values),
)  # fmt: skip
"""Wrong decoding. `CHANGED_SCALES` and `CHANGED_CODES` follow."""
SIGNS: tuple[Deviation[Quantized], ...] = (
    Deviation("nan-read-as-number", "the scale 255 is read as infinity, not as NaN", FACTORS,
              partial(_factor_of_code, E8M0.nan_code or 0, torch.inf)),
    Deviation("negative-zero-lost", "-0 becomes 0", VALUES, lambda q, dtype: dequantize(q, dtype) + 0),
    Deviation("negative-zero-lost", "-0 becomes 0 before values are rounded to their dtype", VALUES,
              lambda q, dtype: (dequantize(q) + 0).to(dtype)),
    Deviation("negative-zero-lost", "the code of -0 is read as 0", VALUES,
              lambda q, dtype: _multiply(_codes(q) + 0, decode_factors(q.scales, q), q).to(dtype)),
    Deviation("signs-lost", "signs are lost", VALUES, lambda q, dtype: dequantize(q, dtype).abs()),
)  # fmt: skip
"""Wrong signs and NaN."""
