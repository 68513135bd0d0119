"""Mistakes in the codes of elements, computed from correct scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import without_tail
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import elements, swap_nibbles
from narrowgauge.reference.quantize.scaling import divide, per_row
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

CODES = frozenset({"codes"})
_SCALES_AND_CODES = frozenset({"scales", "codes"})
_AMAX = frozenset({"amax"})
"""A kernel that changes its inputs can compute the amax of the tensor before or after the change."""


@lru_cache(maxsize=256)
def element_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """Deviations of a recipe's codes, the most plausible first. Module `stochastic_deviations` has further ones."""
    return (*_rounding_deviations(recipe), *_special_value_deviations(recipe), *_scaling_deviations(recipe))


def _code_deviation(cause: str, sentence: str, override: Override) -> QuantizeDeviation:
    implausible = cause.startswith(("element-order", "input-truncated:")) or "-through-" in cause
    return QuantizeDeviation(
        cause, f"elements: {sentence}", CODES, overrides={"codes": override}, implausible=implausible
    )


def _with_rounding(rounding: roundings.Rounding) -> Override:
    """Codes by a different rounding; zeros and NaN follow the recipe."""

    def override(replay: Replay) -> torch.Tensor:
        codes = rounding(replay.scaled_elements, replay.recipe.element)
        return replay.pack_codes(_apply_zero_and_nan_rules(codes, replay.scaled_elements, replay.recipe))

    return override


def _apply_zero_and_nan_rules(codes: torch.Tensor, scaled: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Codes with the zeros and the NaN code that the recipe prescribes."""
    sign = recipe.element.sign_code
    if recipe.negative_zero == "rounded":
        codes = codes.masked_fill(scaled == 0, 0)
    elif recipe.negative_zero == "never":
        codes = codes.masked_fill(codes == sign, 0)
    return codes if recipe.element is not E2M1 else codes.masked_fill(scaled.isnan(), recipe.nan_code)


def _rounding_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    if recipe.rounding != "stochastic":
        yield _code_deviation("ties-away", "ties round away from zero", _with_rounding(roundings.ties_away))
        yield _code_deviation("ties-toward-zero", "ties round toward zero", _with_rounding(roundings.ties_toward_zero))
        yield _code_deviation(
            "truncated", "rounded toward zero, not to the nearest", _with_rounding(roundings.truncated)
        )
        yield _code_deviation(
            "rounded-up", "rounded away from zero, not to the nearest", _with_rounding(roundings.rounded_up)
        )
        yield _code_deviation(
            "rounded-toward-infinity", "rounded toward +infinity", _with_rounding(roundings.toward_infinity)
        )
        yield _code_deviation(
            "rounded-toward-minus-infinity", "rounded toward -infinity", _with_rounding(roundings.toward_minus_infinity)
        )
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            yield _code_deviation(
                f"element-through-{name}", f"scaled elements are rounded to {name} first",
                _with_rounding(roundings.through(dtype)),
            )  # fmt: skip
    if recipe.rounding == "stochastic":
        return
    if recipe.element.mantissa_bits > 1:
        yield _code_deviation(
            "top-binade-saturated", "the largest number in place of all that have its exponent",
            _with_rounding(roundings.top_binade_saturated),
        )  # fmt: skip
    if recipe.element.nan_code is not None:
        for rounding, phrase in ((roundings.overflow_to_nan, ""), (roundings.unsigned_overflow, ", without a sign,")):
            yield _code_deviation("overflow-to-nan", f"NaN{phrase} where they overflow", _with_rounding(rounding))
    if recipe.element.inf_code is not None:
        yield _code_deviation(
            "overflow-to-infinity", "infinity where they overflow", _with_rounding(roundings.unsaturated)
        )


def _special_value_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    sign = recipe.element.sign_code

    def changed_codes(change: Callable[[torch.Tensor, Replay], torch.Tensor]) -> Override:
        return lambda replay: replay.pack_codes(change(replay.encode_scaled(replay.scaled_elements), replay))

    if recipe.element.negative_zero:
        yield _code_deviation(
            "negative-zero-lost",
            "-0 is stored as 0",
            changed_codes(lambda codes, replay: codes.masked_fill(codes == sign, 0)),
        )
    if recipe.element.bits == 4:
        yield _code_deviation(
            "nibbles-swapped",
            "the two of a byte are exchanged",
            lambda replay: swap_nibbles(Replay(replay.kernel_matrix).compute_stage("codes")),
        )
    if recipe.element.negative_zero:
        yield _code_deviation(
            "negative-zero-lost", "-0 is stored as 0, but not of negative numbers that round to it",
            changed_codes(lambda codes, replay: codes.masked_fill(replay.scaled_elements == 0, 0)),
        )  # fmt: skip
        yield _code_deviation(
            "negative-zero-lost", "negative numbers that round to zero lose their sign",
            changed_codes(lambda codes, replay: codes.masked_fill((codes == sign) & (replay.scaled_elements != 0), 0)),
        )  # fmt: skip
    if recipe.negative_zero != "keep":
        yield _code_deviation(
            "negative-zero-kept", "-0 keeps its sign",
            changed_codes(
                lambda codes, replay: torch.where(codes == 0, replay.scaled_elements.signbit().byte() * sign, codes)
            ),
        )  # fmt: skip
    for zero, phrase in ((sign, ""), (0, ", without its sign")):
        yield _code_deviation(
            "subnormal-codes-flushed", f"0{phrase} in place of subnormal codes",
            changed_codes(partial(_flushed, recipe.element, zero)),
        )  # fmt: skip
    if recipe.rounding != "stochastic":
        yield _code_deviation(
            "subnormal-codes-flushed",
            "flushed to 0 below the least normal number",
            _with_rounding(roundings.flushed_before),
        )
    for phrase, number in (("the largest number with its sign", recipe.element.max_code), ("0 with its sign", 0)):
        yield _code_deviation(
            "nan-read-as-number", f"NaN becomes {phrase}",
            changed_codes(partial(_codes_of_nan, number)),
        )  # fmt: skip
    yield _code_deviation("signs-lost", "signs are lost", changed_codes(lambda codes, replay: codes & (sign - 1)))
    yield _code_deviation(
        "nan-keeps-sign",
        "the code of a NaN has the sign of the element",
        changed_codes(
            lambda codes, replay: torch.where(
                replay.scaled_elements.isnan(), codes | replay.x.signbit().byte() * sign, codes
            )
        ),
    )
    if recipe.element.bits == 4:
        yield _code_deviation(
            "padding-not-zeroed", "the nibble behind an odd number of columns is not 0", _codes_with_kernel_padding
        )
    yield _code_deviation(
        "zero-block-nan", "NaN in blocks whose scale is 0",
        changed_codes(
            lambda codes, replay: codes.masked_fill(_spread_over_elements(replay, replay.blocks == 0), recipe.nan_code)
        ),
    )  # fmt: skip


def _codes_of_nan(code: int, codes: torch.Tensor, replay: Replay) -> torch.Tensor:
    """`codes` with `code` and the sign of the element for each element that is NaN."""
    signed = replay.x.signbit().byte() * replay.recipe.element.sign_code | code
    return torch.where(replay.x.isnan(), signed, codes)


def _codes_with_kernel_padding(replay: Replay) -> torch.Tensor:
    """Correct codes with the padding nibbles of the kernel."""
    codes = Replay(replay.kernel_matrix).compute_stage("codes")
    kernel_codes = replay.kernel_matrix.kernel_stages["codes"]
    if replay.x.shape[1] % 2 == 0:
        raise ValueError("an even number of columns fills all bytes")
    padding_mask = 0xF0 if replay.recipe.packing == "low-first" else 0xF
    codes[:, -1] = codes[:, -1] & (0xFF ^ padding_mask) | kernel_codes[:, -1] & padding_mask
    return codes


def _spread_over_elements(replay: Replay, blocks: torch.Tensor) -> torch.Tensor:
    """A value for each element, bool (M, K), from a value for each stored scale."""
    rows, columns = per_row(blocks, replay.recipe, replay.x.shape[0]), replay.x.shape[1]
    if replay.recipe.spans_k:
        return rows.expand(-1, columns)
    return rows.repeat_interleave(replay.recipe.block[1], 1)[:, :columns]


def _scaling_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Wrong inputs and wrong factors of the elements."""

    def with_factors(change: Callable[[Replay], torch.Tensor]) -> Override:
        return lambda replay: replay.pack_codes(replay.encode_scaled(replay.scale_with(change(replay))))

    def with_block_factor(factors: Callable[[Replay], torch.Tensor]) -> Override:
        """Codes by a factor for each stored scale."""
        return with_factors(lambda replay: per_row(factors(replay), replay.recipe, replay.x.shape[0]))

    def with_scaled_values(values: Callable[[Replay, torch.Tensor, torch.Tensor], torch.Tensor]) -> Override:
        """Codes by scaled values, a function of x and the stored scale of each element, float32 (M, K)."""

        def override(replay: Replay) -> torch.Tensor:
            scales = per_row(_decoded_scales(replay), replay.recipe, replay.x.shape[0])
            columns = replay.x.shape[1]
            if not replay.recipe.spans_k:
                scales = scales.repeat_interleave(replay.recipe.block[1], 1)[:, :columns]
            return replay.pack_codes(replay.encode_scaled(values(replay, replay.x.float(), scales)))

        return override

    if recipe.element_scale == "x*min(1/(s*(1/enc)),FLT_MAX)":
        yield _code_deviation(
            "factor-not-clamped", "the factor is not limited to the largest number, and is infinite for a scale of 0",
            with_block_factor(
                lambda replay: divide(1.0, _decoded_scales(replay) * divide(1.0, _tensor_scale_column(replay)))
            ),
        )  # fmt: skip
    if recipe.tensor_scale == "max/amax" and recipe.scale is E4M3:
        for limit, phrase in ((_LARGEST, ""), (torch.inf, ", not limited to the largest number")):
            for expression, factors in (
                ("x*(enc/s)", lambda replay: _tensor_scale_column(replay) / _decoded_scales(replay)),
                ("x*((1/s)*enc)", lambda replay: divide(1.0, _decoded_scales(replay)) * _tensor_scale_column(replay)),
            ):
                yield _code_deviation(
                    f"element-order:{expression}", f"scaled as {expression}{phrase}",
                    with_block_factor(partial(_clamped_factors, factors, limit)),
                )  # fmt: skip
        yield _code_deviation(
            "element-order:x/(s*(1/enc))", "scaled as x/(s*(1/enc))",
            with_scaled_values(
                lambda replay, x, s: torch.where(x == 0, x, x / (s * divide(1.0, _tensor_scale_column(replay))))
            ),
        )  # fmt: skip
        yield _code_deviation(
            "subnormal-factors-flushed", "1/enc and s*(1/enc) are flushed to 0 where they are subnormal",
            with_block_factor(_factors_with_flushed_steps),
        )  # fmt: skip
    if recipe.scale is FP32:
        yield _code_deviation(
            "element-order:x*(1/s)", "scaled as x*(1/s)", with_block_factor(lambda replay: divide(1.0, replay.scales))
        )
        yield _code_deviation(
            "element-order:x/s", "scaled as x/s", with_scaled_values(lambda replay, x, s: torch.where(x == 0, x, x / s))
        )
        yield _code_deviation(
            "subnormal-factors-flushed", "factors are flushed to 0 where they are subnormal",
            with_factors(lambda replay: flush(replay.factors)),
        )  # fmt: skip
    if not recipe.spans_k:
        for step, phrase in ((-1, "next"), (1, "previous")):
            yield _code_deviation(
                f"scales-of-{phrase}-block", f"scaled by the scale of the {phrase} block",
                with_factors(partial(_factors_of_other_block, step)),
            )  # fmt: skip
    if recipe.scale is E8M0:
        yield _code_deviation(
            "subnormal-factors-flushed", "factors are flushed to 0 where they are subnormal, as 2^-127 is, of code 0",
            with_factors(lambda replay: flush(replay.factors)),
        )  # fmt: skip
    for step, phrase in ((1, "larger"), (-1, "smaller")) if recipe.scale is not E8M0 else ():  # not a power of two
        yield QuantizeDeviation(
            "element-factor-ulp", f"elements: the factor is one step of float32 {phrase}", CODES, implausible=True,
            overrides={"codes": with_factors(partial(_factors_moved, step))},
        )  # fmt: skip
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _code_deviation(
            f"factor-through-{name}", f"the factor is rounded to {name}",
            with_factors(partial(_factors_through, dtype)),
        )  # fmt: skip
        yield QuantizeDeviation(
            f"input-through-{name}", f"inputs are rounded to {name}", _SCALES_AND_CODES, optional_stages=_AMAX,
            overrides={"x": partial(_inputs_through, dtype)}, implausible=True,
        )  # fmt: skip
        yield _code_deviation(
            f"input-through-{name}", f"rounded to {name} before they are scaled",
            partial(_scaled_through, dtype),
        )  # fmt: skip
    for name, bits in roundings.UPPER_BITS.items():
        yield QuantizeDeviation(
            f"input-truncated:{name}", f"inputs are cut to the upper {bits} bits of float32", _SCALES_AND_CODES,
            optional_stages=_AMAX, overrides={"x": partial(_upper_bits_of_input, bits)}, implausible=True,
        )  # fmt: skip
        yield _code_deviation(
            f"input-truncated:{name}", f"cut to the upper {bits} bits of float32 before they are scaled",
            partial(_scaled_upper_bits, bits),
        )  # fmt: skip
    yield QuantizeDeviation(
        "inputs-flushed", "inputs are flushed to 0 where they are subnormal", _SCALES_AND_CODES,
        optional_stages=_AMAX, overrides={"x": lambda replay: flush(replay.kernel_matrix.subject.x)},
    )  # fmt: skip
    yield _code_deviation(
        "inputs-flushed", "flushed to 0 where they are subnormal, before they are scaled",
        lambda replay: replay.pack_codes(replay.encode_scaled(replay.scale_with(replay.factors, flush(replay.x)))),
    )  # fmt: skip
    for cause, sentence, change in (
        ("input-transposed", "the matrix is read column by column", _read_by_column),
        ("rows-rolled", "a row is that of the row behind it, the last one that of the first", partial(_rolled, -1)),
        ("rows-rolled", "a row is that of the row before it, the first one that of the last", partial(_rolled, 1)),
    ):
        yield QuantizeDeviation(
            cause, sentence, _SCALES_AND_CODES, row_local=False, optional_stages=_AMAX,
            overrides={"x": lambda replay, change=change: change(replay.kernel_matrix.subject.x)},  # type: ignore[misc]
        )  # fmt: skip
    if not recipe.spans_k:
        yield QuantizeDeviation(
            "tail-dropped", "columns behind the last whole block are taken for 0", _SCALES_AND_CODES,
            overrides={"x": lambda replay: without_tail(replay.recipe.block[1], replay.kernel_matrix.subject.x)},
            optional_stages=_AMAX,
        )  # fmt: skip
    if recipe.tensor_scale in ("max/amax", "(1/amax)*max"):
        yield _code_deviation(
            "tensor-scale-ignored", "scaled without the tensor's scale",
            with_scaled_values(lambda replay, x, s: torch.where(x == 0, x, x / s) if not replay.recipe.whole else x),
        )  # fmt: skip


def _read_by_column(x: torch.Tensor) -> torch.Tensor:
    return x.T.reshape(x.shape)


def _rolled(step: int, x: torch.Tensor) -> torch.Tensor:
    return x.roll(step, 0)


_LARGEST = torch.finfo(torch.float32).max


def _clamped_factors(factors: Callable[[Replay], torch.Tensor], limit: float, replay: Replay) -> torch.Tensor:
    return factors(replay).clamp(max=limit)


def _factors_with_flushed_steps(replay: Replay) -> torch.Tensor:
    """1/(s·(1/enc)) with subnormal intermediate results flushed to 0."""
    inverse = flush(divide(1.0, _tensor_scale_column(replay)))
    return divide(1.0, flush(_decoded_scales(replay) * inverse)).clamp(max=_LARGEST)


def _flushed(fmt: Format, zero: int, codes: torch.Tensor, _: Replay) -> torch.Tensor:
    small = (codes & (fmt.sign_code - 1) < 1 << fmt.mantissa_bits) & (codes != (fmt.nan_code or 0x7F))
    return torch.where(small, codes & zero, codes)


def _factors_of_other_block(step: int, replay: Replay) -> torch.Tensor:
    if replay.factors.shape[1] == 1:
        raise ValueError("a row has a single block")
    return replay.factors.roll(step, 1)


def _factors_moved(step: int, replay: Replay) -> torch.Tensor:
    moved = (replay.factors.view(torch.int32) + step).view(torch.float32)
    return torch.where((replay.factors > 0) & (replay.factors < _LARGEST), moved, replay.factors)


def _factors_through(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return replay.factors.to(dtype).float().clamp(max=_LARGEST)


def _upper_bits_of_input(bits: int, replay: Replay) -> torch.Tensor:
    x = replay.kernel_matrix.subject.x
    return roundings.upper_bits(x, bits).to(x.dtype)


def _scaled_upper_bits(bits: int, replay: Replay) -> torch.Tensor:
    x = roundings.upper_bits(replay.x, bits)
    return replay.pack_codes(replay.encode_scaled(replay.scale_with(replay.factors, x)))


def _inputs_through(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return replay.kernel_matrix.subject.x.to(dtype).to(replay.kernel_matrix.subject.x.dtype)


def _scaled_through(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return replay.pack_codes(replay.encode_scaled(replay.scale_with(replay.factors, replay.x.to(dtype).float())))


def _decoded_scales(replay: Replay) -> torch.Tensor:
    return replay.scales if replay.recipe.scale is FP32 else decode(replay.scales, replay.recipe.scale)


def _tensor_scale_column(replay: Replay) -> torch.Tensor:
    assert replay.used_tensor_scale is not None
    return replay.used_tensor_scale.unsqueeze(1)


def flush(x: torch.Tensor) -> torch.Tensor:
    """`x` with its subnormal numbers replaced by zeros of the same sign."""
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, torch.zeros_like(x).copysign(x), x)


def nan_code_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """A wrong code of NaN, if the kernel stores the same code for all elements that are NaN before rounding."""
    codes = []
    for matrix in matrices:
        replay = Replay(matrix)
        kernel_codes = elements(matrix.kernel_stages["codes"], matrix.subject.matrix.shape[1], matrix.subject.recipe)
        codes.append(kernel_codes[replay.scaled_elements.isnan()])
    nan_codes = torch.unique(torch.cat(codes))
    if len(nan_codes) != 1:
        return
    code = int(nan_codes)

    def override(replay: Replay) -> torch.Tensor:
        replay_codes = replay.encode_scaled(replay.scaled_elements)
        return replay.pack_codes(replay_codes.masked_fill(replay.scaled_elements.isnan(), code))

    yield _code_deviation(f"nan-code:{code}", f"the code of a NaN is {code}", override)
