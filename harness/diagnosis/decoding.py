"""Dequantized values: known deviations of a dequantizer, each run again on the kernel's own codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.auxiliary.explain_auxiliary import same_floats
from narrowgauge.harness.diagnosis.explanation import Explanation, Tried
from narrowgauge.harness.diagnosis.gemm.operands import changed_codes, changed_scales, swapped
from narrowgauge.harness.diagnosis.quantize.explain_quantize import WORK, WORK_OF_A_CASE
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import decode_factors, divide, over_elements, per_row, used_tensor_scale
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized

Values = Callable[[Quantized, torch.dtype], torch.Tensor | None]
"""What becomes of a quantized matrix, (M, K) of that dtype; None where the deviation means nothing to it."""
Factors = Callable[[Quantized], torch.Tensor | None]
"""What the codes of a block are multiplied by, float32 like its scales."""


def decoding_explanations(outcome: Outcome, wrong: StageResult, tried: Tried) -> list[Explanation]:
    """The known deviations that give every dequantized value, bit for bit, where the first wrong stage is `values`."""
    values = outcome.outputs.get("values")
    if wrong.stage != "values" or values is None or not outcome.judged:
        return []
    q = _along_rows(outcome.judged[0].kernel)
    found: dict[str, Explanation] = {}
    work = 0
    for cause, sentence, make in decoding_deviations():
        cost = values.numel()
        if work + cost > WORK_OF_A_CASE or tried.work + cost > WORK:
            break
        work, tried.work = work + cost, tried.work + cost
        made = make(q, values.dtype)
        if made is not None and same_floats(made, values):
            found.setdefault(cause, Explanation(cause, sentence, wrong.stage, exact=True))
    return list(found.values())


def _along_rows(q: Quantized) -> Quantized:
    """The same, codes and scales stored along rows, the first of two codes in the low nibble."""
    recipe = replace(q.recipe, packing="low-first")
    return Quantized(rowwise_codes(q), linear_scales(q), q.amax, recipe, q.shape, q.tensor_scale)


def decoding_deviations() -> Iterator[tuple[str, str, Values]]:
    """Deviations of dequantize, the most plausible first: a cause, its sentence, and what makes the values."""
    yield "nibbles-swapped", "the two elements of a byte change places", _of(swapped)
    yield "tensor-scale-ignored", "codes are multiplied by the scale of their block alone", _by(_stored_alone)
    for expression, factors in _ORDERS.items():
        yield f"decode-order:{expression}", f"the factor of a block is {expression}", _by(factors)
    yield "decode-order:(code*s)*dec", "a code is multiplied by the scale of its block, then by dec", _in_two_steps
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield f"decode-through-{name}", f"the factor of a block is rounded to {name}", _by(partial(_through, dtype))
        yield f"values-through-{name}", f"values are rounded to {name} on the way", partial(_rounded, dtype)
    yield "subnormal-factors-flushed", "the scale 2^-127, which has code 0, is taken for 0", _without_code_0
    yield "values-truncated", "values are truncated to their dtype, not rounded", _truncated
    for cause, sentence, change in (*changed_scales(), *changed_codes()):
        yield cause, sentence.format("the matrix"), _of(change)
    yield "negative-zero-lost", "-0 becomes 0", lambda q, dtype: dequantize(q, dtype) + 0
    yield "signs-lost", "signs are lost", lambda q, dtype: dequantize(q, dtype).abs()


def _of(change: Callable[[Quantized], Quantized | None]) -> Values:
    """The right values of another matrix."""

    def values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
        changed = change(q)
        return None if changed is None else dequantize(changed, dtype)

    return values


def _by(factors: Factors) -> Values:
    def values(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
        found = factors(q)
        return None if found is None else _multiplied(_codes(q), found, q).to(dtype)

    return values


def _codes(q: Quantized) -> torch.Tensor:
    return decode_stored(q.codes, q.recipe.element, q.shape[1])


def _multiplied(values: torch.Tensor, factors: torch.Tensor, q: Quantized) -> torch.Tensor:
    return over_elements(values, per_row(factors, q.recipe, q.shape[0]), q.recipe, torch.mul)


def _scales(q: Quantized) -> torch.Tensor:
    return q.scales if q.recipe.scale is FP32 else decode(q.scales, q.recipe.scale)


def _through(dtype: torch.dtype, q: Quantized) -> torch.Tensor:
    return decode_factors(q.scales, q).to(dtype).float()


def _without_code_0(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if q.recipe.scale is not E8M0:
        return None
    return _multiplied(_codes(q), _scales(q).masked_fill(q.scales == 0, 0), q).to(dtype)


def _rounded(narrow: torch.dtype, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(q).to(narrow).to(dtype)


def _truncated(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if dtype is not torch.bfloat16:
        return None
    return (dequantize(q).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def _in_two_steps(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    dec = _tensor_factor(q, lambda amax, most: amax * (1.0 / most))
    return None if dec is None else (_multiplied(_codes(q), _scales(q), q) * dec).to(dtype)


def _stored_alone(q: Quantized) -> torch.Tensor | None:
    return None if q.recipe.decode == "s" else _scales(q)


def _tensor_factor(q: Quantized, form: Callable[[torch.Tensor, float], torch.Tensor]) -> torch.Tensor | None:
    """A number of the tensor's amax, (1, 1) or (M, 1), and of what the recipe maps it to."""
    return None if q.amax is None or q.recipe.decode == "s" else form(q.amax.unsqueeze(1), q.recipe.max_product)


def _ordered(form: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Factors:
    """Of the scale of a block, the tensor's amax, and what the recipe maps that to."""

    def factors(q: Quantized) -> torch.Tensor | None:
        return _tensor_factor(q, lambda amax, most: form(_scales(q), amax, most))

    return factors


def _by_encode(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Factors:
    """Of the scale of a block, and the tensor's."""

    def factors(q: Quantized) -> torch.Tensor | None:
        if q.recipe.decode == "s" or q.recipe.tensor_scale == "amax/max":
            return None
        if q.tensor_scale is None and (q.amax is None or q.recipe.statistics != "float32"):
            return None
        return form(_scales(q), used_tensor_scale(q).unsqueeze(1))

    return factors


_ORDERS: dict[str, Factors] = {
    "s*(amax*(1/max))": _ordered(lambda s, amax, most: s * (amax * (1.0 / most))),
    "s*(amax/max)": _ordered(lambda s, amax, most: s * (amax / torch.full_like(amax, most))),
    "(s*amax)/max": _ordered(lambda s, amax, most: s * amax / torch.full_like(s, most)),
    "(s*amax)*(1/max)": _ordered(lambda s, amax, most: s * amax * (1.0 / most)),
    "(s*(1/max))*amax": _ordered(lambda s, amax, most: s * (1.0 / most) * amax),
    "s/enc": _by_encode(lambda s, enc: s / enc),
    "s*(1/enc)": _by_encode(lambda s, enc: s * divide(1.0, enc)),
}
