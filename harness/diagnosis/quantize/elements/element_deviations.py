"""Mistakes in the codes of elements, computed from correct scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW, UPPER_BITS, flush, narrowed, upper_bits
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import without_tail
from narrowgauge.harness.operations.stages.deviation import Deviation, in_turn
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import elements, swap_nibbles
from narrowgauge.reference.quantize.scaling import divide
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

_LARGEST = torch.finfo(torch.float32).max


def _rounds_to_nearest(recipe: Recipe) -> bool:
    return recipe.rounding != "stochastic"


def _has_encode_scale(recipe: Recipe) -> bool:
    return recipe.tensor_scale == "max/amax" and recipe.scale is E4M3


# ---- roundings -------------------------------------------------------------------------------------------------------


def _rounded(rounding: roundings.Rounding, r: Replay) -> torch.Tensor:
    """Codes by a different rounding; zeros and NaN follow the recipe."""
    codes, scaled, element = rounding(r.scaled_elements, r.recipe.element), r.scaled_elements, r.recipe.element
    if r.recipe.negative_zero == "rounded":
        codes = codes.masked_fill(scaled == 0, 0)
    elif r.recipe.negative_zero == "never":
        codes = codes.masked_fill(codes == element.sign_code, 0)
    return codes if element is not E2M1 else codes.masked_fill(scaled.isnan(), r.recipe.nan_code)


def _by(rounding: roundings.Rounding) -> Callable[[Replay], torch.Tensor]:
    return partial(_rounded, rounding)


def _without_rest(axis: int, whole: int, codes: torch.Tensor) -> torch.Tensor:
    """Zeros behind the last whole tile; the codes themselves without a whole tile, where all would be 0."""
    kept = codes.shape[axis] // whole * whole or codes.shape[axis]
    changed = codes.clone()
    changed.narrow(axis, kept, codes.shape[axis] - kept).zero_()
    return changed


CODES_ZERO: QuantizeDeviation = Deviation(
    "codes-zero", "all codes are 0", "element codes", lambda r: torch.zeros_like(r.element_codes)
)
_WHOLE = {str(2**bits): 2**bits for bits in range(2, 11)}
LEFT_OUT: tuple[QuantizeDeviation, ...] = (
    Deviation("columns-left-out:{}", "the codes behind the last whole {} columns are 0", "element codes",
              lambda whole, r: _without_rest(1, whole, r.element_codes), _WHOLE, row_local=False),
    Deviation("rows-left-out:{}", "the codes behind the last whole {} rows are 0", "element codes",
              lambda whole, r: _without_rest(0, whole, r.element_codes), _WHOLE, row_local=False),
)  # fmt: skip
"""Codes of 0 behind the whole tiles of a loop. No search for pairs takes them: each fits some codes of 0."""
ROUNDINGS: tuple[QuantizeDeviation, ...] = (
    Deviation("ties-away", "elements: ties round away from zero", "element codes", _by(roundings.ties_away),
              when=_rounds_to_nearest),
    Deviation("ties-toward-zero", "elements: ties round toward zero", "element codes", _by(roundings.ties_toward_zero),
              when=_rounds_to_nearest),
    Deviation("truncated", "elements: rounded toward zero, not to the nearest", "element codes",
              _by(roundings.truncated), when=_rounds_to_nearest),
    Deviation("rounded-up", "elements: rounded away from zero, not to the nearest", "element codes",
              _by(roundings.rounded_up), when=_rounds_to_nearest),
    Deviation("carry-lost", "elements: a mantissa that rounds up to 2 becomes 1, the exponent stays", "element codes",
              _by(roundings.carry_lost), when=lambda recipe: _rounds_to_nearest(recipe) and recipe.element.bits > 4),
    Deviation("rounded-toward-infinity", "elements: rounded toward +infinity", "element codes",
              _by(roundings.toward_infinity), when=_rounds_to_nearest),
    Deviation("rounded-toward-minus-infinity", "elements: rounded toward -infinity", "element codes",
              _by(roundings.toward_minus_infinity), when=_rounds_to_nearest),
    Deviation("element-through-{}", "elements: scaled elements are rounded to {} first", "element codes",
              lambda dtype, r: _rounded(roundings.through(dtype), r), NARROW, _rounds_to_nearest, implausible=True),
    Deviation("top-binade-saturated", "elements: the largest number in place of all that have its exponent",
              "element codes", _by(roundings.top_binade_saturated),
              when=lambda recipe: _rounds_to_nearest(recipe) and recipe.element.mantissa_bits > 1),
    Deviation("overflow-to-nan", "elements: NaN{} where they overflow", "element codes", _rounded,
              {"": roundings.overflow_to_nan, ", without a sign,": roundings.unsigned_overflow},
              lambda recipe: _rounds_to_nearest(recipe) and recipe.element.nan_code is not None),
    Deviation("overflow-to-infinity", "elements: infinity where they overflow", "element codes",
              _by(roundings.unsaturated),
              when=lambda recipe: _rounds_to_nearest(recipe) and recipe.element.inf_code is not None),
)  # fmt: skip
"""Wrong roundings of elements."""

# ---- zeros, signs, NaN -----------------------------------------------------------------------------------------------


def _sign(r: Replay) -> int:
    return r.recipe.element.sign_code


def _codes_of_nan(code: Callable[[Format], int], r: Replay) -> torch.Tensor:
    """Codes with `code` and the sign of the element for each element that is NaN."""
    signed = r.x.signbit().byte() * _sign(r) | code(r.recipe.element)
    return torch.where(r.x.isnan(), signed, r.element_codes)


def _codes_with_kernel_padding(r: Replay) -> torch.Tensor:
    """Correct codes with the padding nibbles of the kernel."""
    codes, kernel_codes = r.compute_stage("codes"), r.kernel_matrix.kernel_stages["codes"]
    if r.x.shape[1] % 2 == 0:
        raise ValueError("an even number of columns fills all bytes")
    padding_mask = 0xF0 if r.recipe.packing == "low-first" else 0xF
    codes[:, -1] = codes[:, -1] & (0xFF ^ padding_mask) | kernel_codes[:, -1] & padding_mask
    return codes


def _flushed(signed: bool, r: Replay) -> torch.Tensor:
    """Codes with 0 in place of subnormal codes."""
    fmt, codes = r.recipe.element, r.element_codes
    small = (codes & (fmt.sign_code - 1) < 1 << fmt.mantissa_bits) & (codes != (fmt.nan_code or 0x7F))
    return torch.where(small, codes & (fmt.sign_code if signed else 0), codes)


SPECIAL_VALUES: tuple[QuantizeDeviation, ...] = (
    Deviation("negative-zero-lost", "elements: -0 is stored as 0", "element codes",
              lambda r: r.element_codes.masked_fill(r.element_codes == _sign(r), 0),
              when=lambda recipe: recipe.element.negative_zero),
    Deviation("nibbles-swapped", "elements: the two of a byte are exchanged", "codes",
              lambda r: swap_nibbles(r.compute_stage("codes")), when=lambda recipe: recipe.element.bits == 4),
    Deviation("negative-zero-lost", "elements: -0 is stored as 0, but not of negative numbers that round to it",
              "element codes", lambda r: r.element_codes.masked_fill(r.scaled_elements == 0, 0),
              when=lambda recipe: recipe.element.negative_zero),
    Deviation("negative-zero-lost", "elements: negative numbers that round to zero lose their sign", "element codes",
              lambda r: r.element_codes.masked_fill((r.element_codes == _sign(r)) & (r.scaled_elements != 0), 0),
              when=lambda recipe: recipe.element.negative_zero),
    Deviation("negative-zero-kept", "elements: -0 keeps its sign", "element codes",
              lambda r: torch.where(r.element_codes == 0, r.scaled_elements.signbit().byte() * _sign(r),
                                    r.element_codes),
              when=lambda recipe: recipe.negative_zero != "keep"),
    Deviation("subnormal-codes-flushed", "elements: 0{} in place of subnormal codes", "element codes", _flushed,
              {"": True, ", without its sign": False}),
    Deviation("subnormal-codes-flushed", "elements: flushed to 0 below the least normal number", "element codes",
              _by(roundings.flushed_before), when=_rounds_to_nearest),
    Deviation("nan-read-as-number", "elements: NaN becomes {} with its sign", "element codes", _codes_of_nan,
              {"the largest number": lambda element: element.max_code, "0": lambda element: 0}),
    Deviation("signs-lost", "elements: signs are lost", "element codes", lambda r: r.element_codes & (_sign(r) - 1)),
    Deviation("nan-keeps-sign", "elements: the code of a NaN has the sign of the element", "element codes",
              lambda r: torch.where(r.scaled_elements.isnan(), r.element_codes | r.x.signbit().byte() * _sign(r),
                                    r.element_codes)),
    Deviation("padding-not-zeroed", "elements: the nibble behind an odd number of columns is not 0", "codes",
              _codes_with_kernel_padding, when=lambda recipe: recipe.element.bits == 4),
    Deviation("zero-block-nan", "elements: NaN in blocks whose scale is 0", "element codes",
              lambda r: r.element_codes.masked_fill(r.of_elements(r.blocks == 0), r.recipe.nan_code)),
)  # fmt: skip
"""Wrong zeros, signs and NaN of elements."""

# ---- inputs and factors ----------------------------------------------------------------------------------------------


def _inverse_encode_scale(r: Replay) -> torch.Tensor:
    return divide(1.0, r.tensor_scale_column)


def _flushed_steps(r: Replay) -> torch.Tensor:
    """1/(s·(1/enc)) with subnormal intermediate results flushed to 0."""
    return r.of_rows(divide(1.0, flush(r.decoded_scales * flush(_inverse_encode_scale(r)))).clamp(max=_LARGEST))


_FACTORS: dict[str, Callable[[Replay], torch.Tensor]] = {
    "x*(enc/s)": lambda r: r.tensor_scale_column / r.decoded_scales,
    "x*((1/s)*enc)": lambda r: divide(1.0, r.decoded_scales) * r.tensor_scale_column,
}


def _limited(limit: float) -> Callable[[Callable[[Replay], torch.Tensor], Replay], torch.Tensor]:
    return lambda factors, r: r.of_rows(factors(r).clamp(max=limit))


def _divided(r: Replay, divisors: torch.Tensor) -> torch.Tensor:
    """Elements divided by a number for each stored scale; zeros stay."""
    x = r.x.float()
    return torch.where(x == 0, x, x / r.of_elements(divisors))


def _factors_of_other_block(step: int, r: Replay) -> torch.Tensor:
    if r.factors.shape[1] == 1:
        raise ValueError("a row has a single block")
    return r.factors.roll(step, 1)


def _factors_moved(step: int, r: Replay) -> torch.Tensor:
    moved = (r.factors.view(torch.int32) + step).view(torch.float32)
    return torch.where((r.factors > 0) & (r.factors < _LARGEST), moved, r.factors)


SCALINGS: tuple[QuantizeDeviation, ...] = (
    Deviation("factor-not-clamped",
              "elements: the factor is not limited to the largest number, and is infinite for a scale of 0", "factors",
              lambda r: r.of_rows(divide(1.0, r.decoded_scales * _inverse_encode_scale(r))),
              when=lambda recipe: recipe.element_scale == "x*min(1/(s*(1/enc)),FLT_MAX)"),
    Deviation("element-order:{}", "elements: scaled as {}", "factors", _limited(_LARGEST), _FACTORS, _has_encode_scale,
              implausible=True),
    Deviation("element-order:{}", "elements: scaled as {}, not limited to the largest number", "factors",
              _limited(torch.inf), _FACTORS, _has_encode_scale, implausible=True),
    Deviation("element-order:{}", "elements: scaled as {}", "scaled elements",
              lambda _, r: _divided(r, r.decoded_scales * _inverse_encode_scale(r)), {"x/(s*(1/enc))": ""},
              _has_encode_scale, implausible=True),
    Deviation("subnormal-factors-flushed",
              "elements: 1/enc and s*(1/enc) are flushed to 0 where they are subnormal", "factors", _flushed_steps,
              when=_has_encode_scale),
    Deviation("element-order:{}", "elements: scaled as {}", "factors",
              lambda _, r: r.of_rows(divide(1.0, r.scales)), {"x*(1/s)": ""}, lambda recipe: recipe.scale is FP32,
              implausible=True),
    Deviation("element-order:{}", "elements: scaled as {}", "scaled elements", lambda _, r: _divided(r, r.scales),
              {"x/s": ""}, lambda recipe: recipe.scale is FP32, implausible=True),
    Deviation("subnormal-factors-flushed", "elements: factors are flushed to 0 where they are subnormal", "factors",
              lambda r: flush(r.factors), when=lambda recipe: recipe.scale is FP32),
    Deviation("scales-of-next-block", "elements: scaled by the scale of the next block", "factors",
              partial(_factors_of_other_block, -1), when=lambda recipe: not recipe.spans_k),
    Deviation("scales-of-previous-block", "elements: scaled by the scale of the previous block", "factors",
              partial(_factors_of_other_block, 1), when=lambda recipe: not recipe.spans_k),
    Deviation("subnormal-factors-flushed",
              "elements: factors are flushed to 0 where they are subnormal, as 2^-127 is, of code 0", "factors",
              lambda r: flush(r.factors), when=lambda recipe: recipe.scale is E8M0),
    Deviation("element-factor-ulp", "elements: the factor is one step of float32 {}", "factors", _factors_moved,
              {"larger": 1, "smaller": -1}, lambda recipe: recipe.scale is not E8M0,  # not a power of two
              implausible=True),
    *in_turn(
        NARROW,
        Deviation("factor-through-{}", "elements: the factor is rounded to {}", "factors",
                  lambda dtype, r: r.factors.to(dtype).float().clamp(max=_LARGEST), implausible=True),
        Deviation("input-through-{}", "inputs are rounded to {}", "x", narrowed(lambda r: r.x), implausible=True),
        Deviation("input-through-{}", "elements: rounded to {} before they are scaled", "elements",
                  narrowed(lambda r: r.x.float()), implausible=True),
    ),
    *in_turn(
        UPPER_BITS,
        Deviation("input-truncated:{}", "inputs are cut to the upper {1} bits of float32", "x",
                  lambda bits, r: upper_bits(r.x, bits).to(r.x.dtype), implausible=True),
        Deviation("input-truncated:{}", "elements: cut to the upper {1} bits of float32 before they are scaled",
                  "elements", lambda bits, r: upper_bits(r.x, bits), implausible=True),
    ),
    Deviation("inputs-flushed", "inputs are flushed to 0 where they are subnormal", "x", lambda r: flush(r.x)),
    Deviation("inputs-flushed", "elements: flushed to 0 where they are subnormal, before they are scaled", "elements",
              lambda r: flush(r.x)),
    Deviation("input-transposed", "the matrix is read column by column", "x", lambda r: r.x.T.reshape(r.x.shape),
              row_local=False),
    Deviation("rows-rolled", "a row is that of the row {}", "x", lambda step, r: r.x.roll(step, 0),
              {"behind it, the last one that of the first": -1, "before it, the first one that of the last": 1},
              row_local=False),
    Deviation("tail-dropped", "columns behind the last whole block are taken for 0", "x",
              lambda r: without_tail(r.recipe.block[1], r.x), when=lambda recipe: not recipe.spans_k),
    Deviation("tensor-scale-ignored", "elements: scaled without the tensor's scale", "scaled elements",
              lambda r: r.x.float() if r.recipe.whole else _divided(r, r.decoded_scales),
              when=lambda recipe: recipe.tensor_scale in ("max/amax", "(1/amax)*max")),
)  # fmt: skip
"""Wrong inputs and wrong factors of elements."""

NAN_CODE: QuantizeDeviation = Deviation(
    "nan-code:{}", "elements: the code of a NaN is {}", "element codes",
    lambda code, r: r.element_codes.masked_fill(r.scaled_elements.isnan(), code),
)  # fmt: skip


def nan_code_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """A wrong code of NaN, if the kernel stores the same code for all elements that are NaN before rounding."""
    codes = []
    for matrix in matrices:
        replay = Replay(matrix)
        kernel_codes = elements(matrix.kernel_stages["codes"], matrix.subject.matrix.shape[1], matrix.subject.recipe)
        codes.append(kernel_codes[replay.scaled_elements.isnan()])
    nan_codes = torch.unique(torch.cat(codes))
    if len(nan_codes) == 1:
        yield NAN_CODE.bound(int(nan_codes), int(nan_codes))


# ---- a boundary between two codes ------------------------------------------------------------------------------------


def _moved(boundary: tuple[int, float, bool], r: Replay) -> torch.Tensor:
    """Codes with another boundary between a code of a magnitude and the next; the boundary itself goes up or not."""
    low, threshold, up = boundary

    def rounding(x: torch.Tensor, fmt: Format) -> torch.Tensor:
        magnitude, codes = x.abs(), encode(x, fmt)
        between = (magnitude > fmt.values[low]) & (magnitude < fmt.values[low + 1])
        above = magnitude >= threshold if up else magnitude > threshold
        return torch.where(between, codes & fmt.sign_code | (low + above.byte()), codes)

    return _rounded(rounding, r)


MIDPOINT: QuantizeDeviation = Deviation(
    "midpoint-moved", "elements: the boundary between {0[0]:g} and {0[1]:g} is {0[2]:g}, {0[3]}, not the middle",
    "element codes", _moved,
)  # fmt: skip


def moved_midpoint_deviations(
    matrices: Sequence[KernelMatrix], masks: Sequence[torch.Tensor]
) -> Iterator[QuantizeDeviation]:
    """Another boundary between two neighbouring codes, if all wrong codes are these two and a number separates them.

    The boundary is the number with the fewest bits that does. `masks`: of the wrong codes as they are stored.
    """
    recipe = matrices[0].subject.recipe
    if not _rounds_to_nearest(recipe) or recipe.element.bits >= 32 or not any(bool(mask.any()) for mask in masks):
        return
    element, magnitudes, codes, wrong = recipe.element, [], [], []
    for matrix in matrices:
        replay, columns = Replay(matrix), matrix.subject.matrix.shape[1]
        found = elements(matrix.kernel_stages["codes"], columns, recipe) & (element.sign_code - 1)
        expected = replay.element_codes & (element.sign_code - 1)
        magnitudes.append(replay.scaled_elements.abs().flatten())
        codes.append(found.flatten())
        wrong.append(torch.stack([found, expected])[:, found != expected])
    pairs = torch.cat(wrong, 1)
    if not pairs.numel() or not pairs.shape[1]:
        return
    low, high = int(pairs.min()), int(pairs.max())
    if high != low + 1 or high > element.max_code:
        return
    magnitude, code = torch.cat(magnitudes), torch.cat(codes)
    between = (magnitude > element.values[low]) & (magnitude < element.values[high])
    below, above = (magnitude[between & (code == number)].double() for number in (low, high))
    if not len(below) or not len(above):  # the boundary is one of the two numbers
        threshold = element.values[high if len(below) else low]
    elif (first := float(below.amax())) < (last := float(above.amin())):
        step = 2.0 ** math.floor(math.log2(last))
        while math.floor(last / step) * step <= first:
            step /= 2
        threshold = math.floor(last / step) * step
    else:
        return
    words = (element.values[low], element.values[high], threshold)
    for up, phrase in ((True, "which goes up"), (False, "which goes down")):
        yield MIDPOINT.bound((*words, phrase), (low, threshold, up))
