"""Mistakes in block scales that are computed from correct block amaxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay, ScaleFunction
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW, flush, narrowed
from narrowgauge.harness.diagnosis.quantize.scales.e8m0_exponents import EXPONENTS, shifted, unrounded_exponents
from narrowgauge.harness.diagnosis.quantize.scales.four_over_six import FOUR_OVER_SIX, choose_scales
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import SCALES_FOR_ZERO_AMAX
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import divide, encode_scales, unrounded_scales
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import TILED, Layout


def scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's block scales, the most plausible first."""
    if recipe.scale is E8M0:
        yield from rows_of(EXPONENTS, recipe)
    elif recipe.scale is not FP32:
        yield from rows_of((*FOUR_OVER_SIX, *CODED_SCALES), recipe)
    elif not recipe.whole:
        yield from rows_of(FLOAT_SCALES, recipe)
    yield from rows_of(STORED_SCALES, recipe)


# ---- scales of E4M3 --------------------------------------------------------------------------------------------------


def _rounded(rounding: roundings.Rounding, r: Replay) -> torch.Tensor:
    """Scales by a different rounding, otherwise by the recipe."""

    def rounded_scales(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        stored = rounding(unrounded_scales(blocks, tensor, recipe, x.dtype), recipe.scale)
        if recipe.zero_block == "stored-2^-3":
            return stored.masked_fill(stored == 0, int(encode(torch.tensor(2.0**-3), recipe.scale)))
        return stored

    return r.store_scales(rounded_scales if r.recipe.candidates == "6" else choose_scales(rounding))


def _by(rounding: roundings.Rounding) -> Callable[[Replay], torch.Tensor]:
    return partial(_rounded, rounding)


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


def _scales_of_form(form: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> ScaleFunction:
    """Rounded scales by an expression of the block amax and the encode scale of the tensor."""

    def scale_function(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        assert tensor is not None
        scales = form(blocks, tensor.unsqueeze(1), recipe.element.max)
        return encode(scales.clamp(max=torch.finfo(torch.float32).max), recipe.scale)

    return scale_function


def _has_orders(recipe: Recipe) -> bool:
    """Whether block scales are computed with an encode scale of the tensor."""
    return recipe.candidates == "6" and recipe.tensor_scale in ("max/amax", "(1/amax)*max")


_ORDERS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "amax*(enc/6)": lambda amax, enc, most: amax * (enc / torch.full_like(enc, most)),
    "(amax*enc)*(1/6)": lambda amax, enc, most: amax * enc * (1.0 / most),
    "amax/(6*(1/enc))": lambda amax, enc, most: amax / (divide(1.0, enc) * most),
    "(amax/6)/(1/enc)": lambda amax, enc, most: amax / torch.full_like(amax, most) / divide(1.0, enc),
    "amax/6": lambda amax, enc, most: amax / torch.full_like(amax, most) + 0 * enc,
    "amax*enc": lambda amax, enc, most: amax * enc,
}
"""Orders of operations that no recipe has."""
CODED_SCALES: tuple[QuantizeDeviation, ...] = (
    Deviation("scale-truncated", "scales: rounded toward zero, not to the nearest", "scales", _by(roundings.truncated)),
    Deviation("scale-rounded-up", "scales: rounded up, not to the nearest", "scales", _by(roundings.rounded_up)),
    Deviation("scale-ties-away", "scales: ties round away from zero", "scales", _by(roundings.ties_away)),
    Deviation("scale-ties-toward-zero", "scales: ties round toward zero", "scales", _by(roundings.ties_toward_zero)),
    Deviation("scale-through-{}", "scales: rounded to {} first", "scales",
              lambda dtype, r: _rounded(roundings.through(dtype), r), NARROW | {"e5m2": torch.float8_e5m2},
              implausible=True),
    Deviation("scale-not-clamped", "scales: NaN where they overflow", "scales", _by(roundings.unsaturated)),
    Deviation("scale-not-clamped", "scales: those that overflow wrap round to small codes", "scales", _by(_wrapping)),
    Deviation("subnormal-scales-flushed", "scales: 0 in place of subnormal codes", "scales",
              _by(roundings.subnormals_to(normal=False))),
    Deviation("subnormal-scales-flushed", "scales: 0 below the least normal number, before they are rounded", "scales",
              _by(roundings.flushed_before)),
    Deviation("subnormal-scales-raised", "scales: the least normal number in place of subnormal codes", "scales",
              _by(roundings.subnormals_to(normal=True))),
    Deviation("zero-scale-raised", "scales: the least subnormal number in place of 0", "scales", _by(_without_zero)),
    Deviation("power-of-two-scales", "scales: rounded{} to a power of two", "scales",
              lambda up, r: _rounded(_power_of_two(up), r), {"": 0, " up": 1}),
    Deviation("scale-order:{}", "scales: made as {}", "scales",
              lambda form, r: r.store_scales(_scales_of_form(form)), _ORDERS, _has_orders, implausible=True),
    Deviation("scale-code:{}", "scales: the code is 1 larger", "scales", shifted, {"+1": 1}, implausible=True),
    Deviation("scale-code:{}", "scales: the code is 1 smaller", "scales", shifted, {"-1": -1}, implausible=True),
)  # fmt: skip
"""Wrong scales with a code."""

# ---- scales of float32, which are the inverses of encode scales ------------------------------------------------------


def _block_amax(r: Replay) -> torch.Tensor:
    return r.blocks.clamp(min=r.recipe.smallest_amax) if r.recipe.smallest_amax else r.blocks


def _with_scale_1(scale: Callable[[Replay], torch.Tensor], r: Replay) -> torch.Tensor:
    """Scale 1 for blocks with an amax of 0, infinity or NaN."""
    amax = _block_amax(r)
    return torch.where((amax > 0) & amax.isfinite(), scale(r), 1.0)


def _unlimited(r: Replay) -> torch.Tensor:
    """The inverse of max/amax, which may be infinite."""
    return divide(1.0, _truncate_to_power_of_two(divide(r.recipe.element.max, _block_amax(r)), r.recipe))


def _for_zero_amax(number: float, r: Replay) -> torch.Tensor:
    amax = r.blocks.clamp(min=r.recipe.smallest_amax)
    return torch.where(amax == 0, divide(1.0, torch.full_like(amax, number)), r.compute_stage("scales"))


def _truncate_to_power_of_two(scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if recipe.scale_rounding != "down":
        return scale
    return scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _round_up_to_power_of_two(r: Replay) -> torch.Tensor:
    scales = encode_scales(r.blocks, replace(r.recipe, scale_rounding="none"), r.x.dtype)
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def _nearest_power_of_two(boundary: float, r: Replay) -> torch.Tensor:
    """The inverse of max/amax rounded to a power of two: up from `boundary` times a power on."""
    mantissa, exponent = torch.frexp(encode_scales(r.blocks, replace(r.recipe, scale_rounding="none"), r.x.dtype))
    power = torch.ldexp(torch.ones_like(mantissa), exponent - (2 * mantissa.double() < boundary).int())
    return divide(1.0, power)


FLOAT_SCALES: tuple[QuantizeDeviation, ...] = (
    Deviation("scale-order:{}", "scales: stored as {}", "scales", lambda form, r: form(r), {
        "amax/max": partial(_with_scale_1, lambda r: _block_amax(r) / torch.full_like(r.blocks, r.recipe.element.max)),
        "amax*(1/max)": partial(_with_scale_1, lambda r: _block_amax(r) * (1.0 / r.recipe.element.max)),
        "max/amax": lambda r: encode_scales(r.blocks, r.recipe, r.x.dtype),
    }),
    Deviation("scale-not-clamped", "scales: made of max/amax, infinite for a small amax too", "scales",
              partial(_with_scale_1, _unlimited)),
    Deviation("scale-not-clamped", "scales: made of max/amax as it comes, infinite too", "scales", _unlimited),
    Deviation("zero-block-not-one", "scales: stored as the inverse of a scale that is {} for an amax of 0, not 1",
              "scales", _for_zero_amax, SCALES_FOR_ZERO_AMAX),
    Deviation("zero-block-not-one", "scales: the largest number of the inputs for an amax of 0, not 1", "scales",
              lambda r: _for_zero_amax(torch.finfo(r.x.dtype).max, r)),
    Deviation("scale-through-{}", "scales: rounded to {}", "scales",
              narrowed(lambda r: divide(1.0, encode_scales(r.blocks, r.recipe, r.x.dtype))), NARROW),
    Deviation("exponent:{}", "scales: max/amax is rounded {} to a power of two", "scales",
              lambda _, r: divide(1.0, _round_up_to_power_of_two(r)), {"up": ""}),
    Deviation("exponent:nearest", "scales: max/amax is rounded to the nearest power of two", "scales",
              partial(_nearest_power_of_two, 1.5)),
    Deviation("exponent:nearest-log2", "scales: max/amax is rounded to the nearest power of two by logarithm", "scales",
              partial(_nearest_power_of_two, 2**0.5)),
)  # fmt: skip
"""Wrong float32 scales of blocks."""

# ---- all scales ------------------------------------------------------------------------------------------------------


def _flushed_scales(r: Replay) -> torch.Tensor:
    """Scales with 0 for subnormal numbers of float32: for E8M0 before they are rounded to a power of two."""
    scales = r.compute_stage("scales")
    if r.recipe.scale is FP32:
        return flush(scales)
    unrounded = unrounded_exponents(r)
    return scales.masked_fill((unrounded > 0) & (unrounded < torch.finfo(torch.float32).smallest_normal), 0)


def _tiles_exchanged(r: Replay) -> torch.Tensor:
    stored = r.compute_stage("scales")
    height = r.recipe.block[0] // r.recipe.stored_rows
    tiles = stored[::height]
    return tiles.T.reshape(tiles.shape).repeat_interleave(height, 0)[: len(stored)]


def _tiles_exchanged_within(side: int, r: Replay) -> torch.Tensor:
    """Block amaxes with rows and columns of tiles exchanged in squares. Tiles outside the matrix have amax 0."""
    blocks = r.blocks
    height = r.recipe.block[0] // r.recipe.stored_rows
    tiles = blocks[::height]
    rows, columns = tiles.shape
    squares = torch.nn.functional.pad(tiles, (0, -columns % side, 0, -rows % side))
    down, across = (extent // side for extent in squares.shape)
    exchanged = squares.view(down, side, across, side).transpose(1, 3).reshape(squares.shape)[:rows, :columns]
    return exchanged.repeat_interleave(height, 0)[: len(blocks)]


def _has_tiles(recipe: Recipe) -> bool:
    return recipe.block[0] > 1 and not recipe.whole


def _has_rows(recipe: Recipe) -> bool:
    return not recipe.whole


def _in_layout(layout: Layout, r: Replay) -> torch.Tensor:
    """Scales in a layout with tiles, read as linear ones: only whole tiles have their shape."""
    scales = r.compute_stage("scales")
    whole = layout.padded_shape(scales.shape) == scales.shape
    return layout.pack(scales).view(scales.shape) if whole else scales


_DIGITS = {(row.rows, row.columns, row.order): name for name, row in reversed(TILED.items()) if not row.by_group}
_OF_ROWS = {name: TILED[name] for name in reversed(_DIGITS.values())}
"""Layouts of the scales of rows, one for each order of digits."""


STORED_SCALES: tuple[QuantizeDeviation, ...] = (
    Deviation("scales-flushed", "scales: flushed to 0 where they are subnormal", "scales", _flushed_scales,
              when=lambda recipe: recipe.scale in (E8M0, FP32) and not recipe.whole),
    Deviation("scale-inverse-stored", "scales: the encode scale is stored, not its inverse", "scales",
              lambda r: divide(1.0, r.compute_stage("scales")), when=lambda recipe: recipe.whole),
    Deviation("scales-transposed", "scales are stored by column, not by row", "scales",
              lambda r: r.compute_stage("scales").T.reshape(r.scales.shape),
              when=_has_rows, row_local=False),
    Deviation("tiles-transposed", "the scale of a tile is that of the tile with row and column exchanged", "scales",
              _tiles_exchanged, when=_has_tiles, row_local=False),
    Deviation("tiles-transposed", "tiles within a square of {0}x{0} have each other's block amaxes, row and column "
              "exchanged", "blocks", _tiles_exchanged_within, {str(side): side for side in (2, 4, 8)}, _has_tiles,
              stages=frozenset({"scales"}), row_local=False),
    Deviation("scales-of-next-block", "a block has the scale of the next one", "scales",
              lambda r: r.compute_stage("scales").roll(-1, 1)),
    Deviation("scales-of-previous-block", "a block has the scale of the one before", "scales",
              lambda r: r.compute_stage("scales").roll(1, 1)),
    Deviation("scales-of-next-row", "a row has the scales of the next one", "scales",
              lambda r: r.compute_stage("scales").roll(-1, 0), when=_has_rows, row_local=False),
    Deviation("scales-of-previous-row", "a row has the scales of the one before", "scales",
              lambda r: r.compute_stage("scales").roll(1, 0), when=_has_rows, row_local=False),
    Deviation("scales-in-layout:{}", "scales are in the layout {}, not linear", "scales", _in_layout, _OF_ROWS,
              when=lambda recipe: recipe.scale is not FP32, row_local=False),
)  # fmt: skip
"""Wrong scales of any format."""
