"""What kernels do to block scales, made of right block amaxes, in place of what their recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Hook, QuantizeDeviation, Run, Store
from narrowgauge.harness.diagnosis.quantize.elements import grids
from narrowgauge.harness.diagnosis.quantize.scales.exponents import exponent_deviations
from narrowgauge.harness.diagnosis.quantize.scales.four_over_six import choosing_deviations, chosen
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import OF_ZERO
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.reference.quantize.scaling import divide, encode_scales, unrounded_scales
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

SCALES = frozenset({"scales"})


def scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's block scales, the most plausible first."""
    if recipe.scale is E8M0:
        yield from exponent_deviations(recipe)
    elif recipe.scale is FP32:
        if not recipe.whole:
            yield from _inverses(recipe)
    else:
        yield from choosing_deviations(recipe)
        yield from _rounded(recipe)
        yield from _ordered(recipe)
    if not recipe.whole:
        yield QuantizeDeviation(
            "scales-transposed", "scales are stored by column, not by row", SCALES, local=False,
            hooks={"scales": lambda run: _of_reference(run).T.reshape(run.scales.shape)},
        )  # fmt: skip
    if recipe.block[0] > 1 and not recipe.whole:
        yield QuantizeDeviation(
            "tiles-transposed", "the scale of a tile is that of the tile with row and column exchanged", SCALES,
            hooks={"scales": _tiles_exchanged}, local=False,
        )  # fmt: skip
        for side in (2, 4, 8):
            yield QuantizeDeviation(
                "tiles-transposed", f"tiles within a square of {side}x{side} have each other's block amaxes, "
                "row and column exchanged", SCALES, hooks={"blocks": partial(_tiles_exchanged_within, side)},
                local=False,
            )  # fmt: skip
    yield QuantizeDeviation(
        "scales-of-next-block", "a block has the scale of the next one", SCALES,
        hooks={"scales": lambda run: _of_reference(run).roll(-1, 1)},
    )  # fmt: skip
    yield QuantizeDeviation(
        "scales-of-previous-block", "a block has the scale of the one before", SCALES,
        hooks={"scales": lambda run: _of_reference(run).roll(1, 1)},
    )  # fmt: skip


def _of(cause: str, sentence: str, hook: Hook, *, odd: bool = False) -> QuantizeDeviation:
    return QuantizeDeviation(cause, f"scales: {sentence}", SCALES, hooks={"scales": hook}, odd=odd)


def _of_reference(run: Run) -> torch.Tensor:
    return Run(run.evidence).stage("scales")


def _tiles_exchanged(run: Run) -> torch.Tensor:
    stored = _of_reference(run)
    height = run.recipe.block[0] // run.recipe.stored_rows
    tiles = stored[::height]
    return tiles.T.reshape(tiles.shape).repeat_interleave(height, 0)[: len(stored)]


def _tiles_exchanged_within(side: int, run: Run) -> torch.Tensor:
    """Block amaxes; those of tiles behind the last row and column are 0."""
    blocks = block_amaxes(run.x, run.recipe)
    height = run.recipe.block[0] // run.recipe.stored_rows
    tiles = blocks[::height]
    rows, columns = tiles.shape
    squares = torch.nn.functional.pad(tiles, (0, -columns % side, 0, -rows % side))
    down, across = (extent // side for extent in squares.shape)
    exchanged = squares.view(down, side, across, side).transpose(1, 3).reshape(squares.shape)[:rows, :columns]
    return exchanged.repeat_interleave(height, 0)[: len(blocks)]


def _rounding(rounding: grids.Rounding, recipe: Recipe) -> Hook:
    """The recipe's scales, but for the rounding."""

    def plain(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        stored = rounding(unrounded_scales(blocks, tensor, recipe, x.dtype), recipe.scale)
        if recipe.zero_block == "stored-2^-3":
            return stored.masked_fill(stored == 0, int(encode(torch.tensor(2.0**-3), recipe.scale)))
        return stored

    store: Store = plain if recipe.candidates == "6" else chosen(rounding)
    return lambda run: run.stored(store)


def _rounded(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    for cause, words, rounding in (
        ("scale-truncated", "rounded toward zero, not to the nearest", grids.truncated),
        ("scale-rounded-up", "rounded up, not to the nearest", grids.rounded_up),
        ("scale-ties-away", "ties round away from zero", grids.ties_away),
        ("scale-ties-toward-zero", "ties round toward zero", grids.ties_toward_zero),
        ("scale-through-bf16", "rounded to bf16 first", grids.through(torch.bfloat16)),
        ("scale-through-fp16", "rounded to fp16 first", grids.through(torch.float16)),
        ("scale-not-clamped", "NaN where they overflow", grids.unsaturated),
        ("scale-not-clamped", "those that overflow wrap round to small codes", _wrapping),
        ("subnormal-scales-flushed", "0 in place of subnormal codes", grids.subnormals_to_zero),
        ("subnormal-scales-flushed", "0 below the least normal number, before they are rounded", grids.flushed_before),
        (
            "subnormal-scales-raised",
            "the least normal number in place of subnormal codes",
            grids.subnormals_to_smallest,
        ),
        ("zero-scale-raised", "the least subnormal number in place of 0", _without_zero),
        ("power-of-two-scales", "rounded to a power of two", _power_of_two(0)),
        ("power-of-two-scales", "rounded up to a power of two", _power_of_two(1)),
    ):
        yield _of(cause, words, _rounding(rounding, recipe), odd="through" in cause)


def _wrapping(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    bits = x.view(torch.int32).long()
    shift = 23 - fmt.mantissa_bits
    rounded = (bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift
    code = (rounded - ((127 - fmt.bias) << fmt.mantissa_bits)) & 0xFF
    return torch.where(x > fmt.max, code.to(torch.uint8), encode(x, fmt))


def _without_zero(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return encode(x, fmt).clamp(min=1)


def _power_of_two(up: int) -> grids.Rounding:
    def rounding(x: torch.Tensor, fmt: Format) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        power = exponent - 1 + ((mantissa > 0.5) & (x > 0)).int() * up
        return encode(torch.where((x > 0) & x.isfinite(), torch.ldexp(torch.ones_like(x), power), x), fmt)

    return rounding


def _ordered(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Orders of operations of a block scale that no recipe has, of an encode factor."""
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
    for expression, form in forms:
        yield _of(
            f"scale-order:{expression}", f"made as {expression}", partial(Run.stored, store=_made(form)), odd=True
        )


def _made(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Store:
    """The rounded scales of a form, of a block's amax and enc."""

    def store(
        x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        assert tensor is not None
        return encode(form(blocks, tensor.unsqueeze(1)).clamp(max=torch.finfo(torch.float32).max), recipe.scale)

    return store


def _inverses(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Of float32 scales, which are inverses of encode scales."""
    largest = recipe.element.max

    def amax_of(run: Run) -> torch.Tensor:
        return run.blocks.clamp(min=run.recipe.smallest_amax) if run.recipe.smallest_amax else run.blocks

    def proper(run: Run, scale: torch.Tensor) -> torch.Tensor:
        return torch.where((amax_of(run) > 0) & amax_of(run).isfinite(), scale, 1.0)

    def encoded(run: Run) -> torch.Tensor:
        return encode_scales(run.blocks, run.recipe, run.x.dtype)

    forms: tuple[tuple[str, Hook], ...] = (
        ("amax/max", lambda run: proper(run, amax_of(run) / torch.full_like(run.blocks, largest))),
        ("amax*(1/max)", lambda run: proper(run, amax_of(run) * (1.0 / largest))),
        ("max/amax", encoded),
    )
    for expression, hook in forms:
        yield _of(f"scale-order:{expression}", f"stored as {expression}", hook)
    yield _of(
        "scale-not-clamped", "made of max/amax as it comes, infinite too",
        lambda run: divide(1.0, _cut(divide(largest, amax_of(run)), run.recipe)),
    )  # fmt: skip
    for words, number in OF_ZERO.items():
        yield _of(
            "zero-block-not-one", f"stored as the inverse of a scale that is {words} for an amax of 0, not 1",
            partial(_of_zero, number),
        )  # fmt: skip
    yield _of("zero-block-not-one", "the largest number of the inputs for an amax of 0, not 1", _of_zero_as_input)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _of(
            f"scale-through-{name}", f"rounded to {name}",
            partial(_inverse_through, dtype),
        )  # fmt: skip
    yield _of("exponent:up", "max/amax is rounded up to a power of two", lambda run: divide(1.0, _up(run)))


def _of_zero(number: float, run: Run) -> torch.Tensor:
    amax = run.blocks.clamp(min=run.recipe.smallest_amax)
    return torch.where(amax == 0, divide(1.0, torch.full_like(amax, number)), _of_reference(run))


def _of_zero_as_input(run: Run) -> torch.Tensor:
    return _of_zero(torch.finfo(run.x.dtype).max, run)


def _inverse_through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return divide(1.0, encode_scales(run.blocks, run.recipe, run.x.dtype)).to(dtype).float()


def _cut(scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if recipe.scale_rounding != "down":
        return scale
    return scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _up(run: Run) -> torch.Tensor:
    full = encode_scales(run.blocks, _unrounded(run.recipe), run.x.dtype)
    mantissa, exponent = torch.frexp(full)
    return torch.ldexp(torch.ones_like(full), exponent - (mantissa == 0.5).int())


def _unrounded(recipe: Recipe) -> Recipe:
    return replace(recipe, scale_rounding="none")
