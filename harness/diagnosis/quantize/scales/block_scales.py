"""Mistakes in block scales that are computed from correct block amaxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay, ScaleFunction
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.scales.e8m0_exponents import exponent_deviations, unrounded_exponents
from narrowgauge.harness.diagnosis.quantize.scales.four_over_six import choose_scales, four_over_six_deviations
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import SCALES_FOR_ZERO_AMAX
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import divide, encode_scales, unrounded_scales
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

SCALES = frozenset({"scales"})


def scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's block scales, the most plausible first."""
    if recipe.scale is E8M0:
        yield from exponent_deviations(recipe)
    elif recipe.scale is FP32:
        if not recipe.whole:
            yield from _float_scale_deviations(recipe)
    else:
        yield from four_over_six_deviations(recipe)
        yield from _rounding_deviations(recipe)
        yield from _order_deviations(recipe)
        for step in (1, -1):
            yield _scale_deviation(
                f"scale-code:{step:+}", f"the code is 1 {'larger' if step > 0 else 'smaller'}",
                partial(_shifted_codes, step), implausible=True,
            )  # fmt: skip
    if recipe.scale in (E8M0, FP32) and not recipe.whole:
        yield _scale_deviation("scales-flushed", "flushed to 0 where they are subnormal", _flushed_scales)
    if not recipe.whole:
        yield QuantizeDeviation(
            "scales-transposed", "scales are stored by column, not by row", SCALES, row_local=False,
            overrides={"scales": lambda replay: _reference_scales(replay).T.reshape(replay.scales.shape)},
        )  # fmt: skip
    if recipe.block[0] > 1 and not recipe.whole:
        yield QuantizeDeviation(
            "tiles-transposed", "the scale of a tile is that of the tile with row and column exchanged", SCALES,
            overrides={"scales": _tiles_exchanged}, row_local=False,
        )  # fmt: skip
        for side in (2, 4, 8):
            yield QuantizeDeviation(
                "tiles-transposed", f"tiles within a square of {side}x{side} have each other's block amaxes, "
                "row and column exchanged", SCALES, overrides={"blocks": partial(_tiles_exchanged_within, side)},
                row_local=False,
            )  # fmt: skip
    yield QuantizeDeviation(
        "scales-of-next-block", "a block has the scale of the next one", SCALES,
        overrides={"scales": lambda replay: _reference_scales(replay).roll(-1, 1)},
    )  # fmt: skip
    yield QuantizeDeviation(
        "scales-of-previous-block", "a block has the scale of the one before", SCALES,
        overrides={"scales": lambda replay: _reference_scales(replay).roll(1, 1)},
    )  # fmt: skip


def _scale_deviation(cause: str, sentence: str, override: Override, *, implausible: bool = False) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"scales: {sentence}", SCALES, overrides={"scales": override}, implausible=implausible
    )


def _reference_scales(replay: Replay) -> torch.Tensor:
    return Replay(replay.kernel_matrix).compute_stage("scales")


def _shifted_codes(step: int, replay: Replay) -> torch.Tensor:
    codes = _reference_scales(replay)
    shifted = (codes.int() + step).clamp(0, replay.recipe.scale.max_code).to(torch.uint8)
    return torch.where(codes > replay.recipe.scale.max_code, codes, shifted)  # NaN


def _flushed_scales(replay: Replay) -> torch.Tensor:
    """Scales with 0 for subnormal numbers of float32: for E8M0 before they are rounded to a power of two."""
    scales = _reference_scales(replay)
    if replay.recipe.scale is FP32:
        return torch.where(scales.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, scales)
    unrounded = unrounded_exponents(replay)
    return scales.masked_fill((unrounded > 0) & (unrounded < torch.finfo(torch.float32).smallest_normal), 0)


def _tiles_exchanged(replay: Replay) -> torch.Tensor:
    stored = _reference_scales(replay)
    height = replay.recipe.block[0] // replay.recipe.stored_rows
    tiles = stored[::height]
    return tiles.T.reshape(tiles.shape).repeat_interleave(height, 0)[: len(stored)]


def _tiles_exchanged_within(side: int, replay: Replay) -> torch.Tensor:
    """Block amaxes with rows and columns of tiles exchanged in squares. Tiles outside the matrix have amax 0."""
    blocks = block_amaxes(replay.x, replay.recipe)
    height = replay.recipe.block[0] // replay.recipe.stored_rows
    tiles = blocks[::height]
    rows, columns = tiles.shape
    squares = torch.nn.functional.pad(tiles, (0, -columns % side, 0, -rows % side))
    down, across = (extent // side for extent in squares.shape)
    exchanged = squares.view(down, side, across, side).transpose(1, 3).reshape(squares.shape)[:rows, :columns]
    return exchanged.repeat_interleave(height, 0)[: len(blocks)]


def _with_rounding(rounding: roundings.Rounding, recipe: Recipe) -> Override:
    """Scales by a different rounding, otherwise by the recipe."""

    def rounded_scales(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        stored = rounding(unrounded_scales(blocks, tensor, recipe, x.dtype), recipe.scale)
        if recipe.zero_block == "stored-2^-3":
            return stored.masked_fill(stored == 0, int(encode(torch.tensor(2.0**-3), recipe.scale)))
        return stored

    scale_function: ScaleFunction = rounded_scales if recipe.candidates == "6" else choose_scales(rounding)
    return lambda replay: replay.store_scales(scale_function)


def _rounding_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    for cause, phrase, rounding in (
        ("scale-truncated", "rounded toward zero, not to the nearest", roundings.truncated),
        ("scale-rounded-up", "rounded up, not to the nearest", roundings.rounded_up),
        ("scale-ties-away", "ties round away from zero", roundings.ties_away),
        ("scale-ties-toward-zero", "ties round toward zero", roundings.ties_toward_zero),
        ("scale-through-bf16", "rounded to bf16 first", roundings.through(torch.bfloat16)),
        ("scale-through-fp16", "rounded to fp16 first", roundings.through(torch.float16)),
        ("scale-not-clamped", "NaN where they overflow", roundings.unsaturated),
        ("scale-not-clamped", "those that overflow wrap round to small codes", _wrapping),
        ("subnormal-scales-flushed", "0 in place of subnormal codes", roundings.subnormals_to_zero),
        (
            "subnormal-scales-flushed",
            "0 below the least normal number, before they are rounded",
            roundings.flushed_before,
        ),
        (
            "subnormal-scales-raised",
            "the least normal number in place of subnormal codes",
            roundings.subnormals_to_smallest,
        ),
        ("zero-scale-raised", "the least subnormal number in place of 0", _without_zero),
        ("power-of-two-scales", "rounded to a power of two", _power_of_two(0)),
        ("power-of-two-scales", "rounded up to a power of two", _power_of_two(1)),
    ):
        yield _scale_deviation(cause, phrase, _with_rounding(rounding, recipe), implausible="through" in cause)


def _wrapping(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    bits = x.view(torch.int32).long()
    shift = 23 - fmt.mantissa_bits
    rounded = (bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift
    code = (rounded - ((127 - fmt.bias) << fmt.mantissa_bits)) & 0xFF
    return torch.where(x > fmt.max, code.to(torch.uint8), encode(x, fmt))


def _without_zero(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return encode(x, fmt).clamp(min=1)


def _power_of_two(up: int) -> roundings.Rounding:
    def rounding(x: torch.Tensor, fmt: Format) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        power = exponent - 1 + ((mantissa > 0.5) & (x > 0)).int() * up
        return encode(torch.where((x > 0) & x.isfinite(), torch.ldexp(torch.ones_like(x), power), x), fmt)

    return rounding


def _order_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Orders of operations that no recipe has, for block scales computed with an encode scale of the tensor."""
    if recipe.candidates != "6" or recipe.tensor_scale not in ("max/amax", "(1/amax)*max"):
        return
    largest = recipe.element.max
    forms: tuple[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
        ("amax*(enc/6)", lambda amax, enc: amax * (enc / torch.full_like(enc, largest))),
        ("(amax*enc)*(1/6)", lambda amax, enc: amax * enc * (1.0 / largest)),
        ("amax/(6*(1/enc))", lambda amax, enc: amax / (divide(1.0, enc) * largest)),
        ("(amax/6)/(1/enc)", lambda amax, enc: amax / torch.full_like(amax, largest) / divide(1.0, enc)),
        ("amax/6", lambda amax, enc: amax / torch.full_like(amax, largest) + 0 * enc),
        ("amax*enc", lambda amax, enc: amax * enc),
    )
    for expression, expression_function in forms:
        override = partial(Replay.store_scales, scale_function=_scales_of_form(expression_function))
        yield _scale_deviation(f"scale-order:{expression}", f"made as {expression}", override, implausible=True)


def _scales_of_form(expression_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> ScaleFunction:
    """Rounded scales by an expression of the block amax and the encode scale of the tensor."""

    def scale_function(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        assert tensor is not None
        scales = expression_function(blocks, tensor.unsqueeze(1))
        return encode(scales.clamp(max=torch.finfo(torch.float32).max), recipe.scale)

    return scale_function


def _float_scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of float32 block scales, which are the inverses of encode scales."""
    largest = recipe.element.max

    def block_amax(replay: Replay) -> torch.Tensor:
        return replay.blocks.clamp(min=replay.recipe.smallest_amax) if replay.recipe.smallest_amax else replay.blocks

    def with_scale_1(replay: Replay, scale: torch.Tensor) -> torch.Tensor:
        """Scale 1 for blocks with an amax of 0, infinity or NaN."""
        return torch.where((block_amax(replay) > 0) & block_amax(replay).isfinite(), scale, 1.0)

    def encode_scale(replay: Replay) -> torch.Tensor:
        return encode_scales(replay.blocks, replay.recipe, replay.x.dtype)

    forms: tuple[tuple[str, Override], ...] = (
        ("amax/max", lambda replay: with_scale_1(replay, block_amax(replay) / torch.full_like(replay.blocks, largest))),
        ("amax*(1/max)", lambda replay: with_scale_1(replay, block_amax(replay) * (1.0 / largest))),
        ("max/amax", encode_scale),
    )
    for expression, override in forms:
        yield _scale_deviation(f"scale-order:{expression}", f"stored as {expression}", override)
    yield _scale_deviation(
        "scale-not-clamped", "made of max/amax, infinite for a small amax too",
        lambda replay: with_scale_1(
            replay, divide(1.0, _truncate_to_power_of_two(divide(largest, block_amax(replay)), replay.recipe))
        ),
    )  # fmt: skip
    yield _scale_deviation(
        "scale-not-clamped", "made of max/amax as it comes, infinite too",
        lambda replay: divide(1.0, _truncate_to_power_of_two(divide(largest, block_amax(replay)), replay.recipe)),
    )  # fmt: skip
    for phrase, number in SCALES_FOR_ZERO_AMAX.items():
        yield _scale_deviation(
            "zero-block-not-one", f"stored as the inverse of a scale that is {phrase} for an amax of 0, not 1",
            partial(_scales_for_zero_amax, number),
        )  # fmt: skip
    yield _scale_deviation(
        "zero-block-not-one",
        "the largest number of the inputs for an amax of 0, not 1",
        _scales_for_zero_amax_of_input_max,
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _scale_deviation(
            f"scale-through-{name}", f"rounded to {name}",
            partial(_rounded_inverse, dtype),
        )  # fmt: skip
    yield _scale_deviation(
        "exponent:up",
        "max/amax is rounded up to a power of two",
        lambda replay: divide(1.0, _round_up_to_power_of_two(replay)),
    )


def _scales_for_zero_amax(number: float, replay: Replay) -> torch.Tensor:
    amax = replay.blocks.clamp(min=replay.recipe.smallest_amax)
    return torch.where(amax == 0, divide(1.0, torch.full_like(amax, number)), _reference_scales(replay))


def _scales_for_zero_amax_of_input_max(replay: Replay) -> torch.Tensor:
    return _scales_for_zero_amax(torch.finfo(replay.x.dtype).max, replay)


def _rounded_inverse(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return divide(1.0, encode_scales(replay.blocks, replay.recipe, replay.x.dtype)).to(dtype).float()


def _truncate_to_power_of_two(scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if recipe.scale_rounding != "down":
        return scale
    return scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _round_up_to_power_of_two(replay: Replay) -> torch.Tensor:
    scales = encode_scales(replay.blocks, replace(replay.recipe, scale_rounding="none"), replay.x.dtype)
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
