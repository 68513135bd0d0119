"""Quantize to NVFP4: an orientation, both orientations in a launch, and sections with an amax per section."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.native.quantize.amax import amax as tensor_amax
from narrowgauge.native.quantize.amax import in_32_bits, in_tiles, oriented_amax, strips, tile_schedule
from narrowgauge.native.quantize.hadamard import transform
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime.arguments import (
    GENERAL_THREADS,
    STRIP,
    THREADS,
    blocks_for,
    check_contiguous,
    check_tensor,
    suffix,
)
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec.arguments import (
    as_matrix,
    check_random,
    check_random_of_sections,
    check_rotated,
    check_rotated_sections,
    check_scale,
    check_section_recipe,
)
from narrowgauge.spec.quantized import (
    GroupedQuantized,
    Half,
    Quantized,
    amax_shape,
    codes_shape,
    scales_shape,
)
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_PARAMETERS = KernelStruct("quantize/quantize_nvfp4.cu", "QuantizeNvfp4Parameters")
_VARIANT = KernelStruct("quantize/quantize_nvfp4.cu", "QuantizeNvfp4Variant")
_OUTPUT = KernelStruct("quantize/quantize_nvfp4.cu", "Output")
_SCHEDULE = KernelStruct("quantize/quantize_nvfp4.cu", "TileSchedule")
_KEYS = KernelStruct("quantize/quantize_nvfp4.cu", "PhiloxKeys")
SCALE_ORDER = {"amax*(enc*(1/6))": "AMAX_TIMES_ENC_SIXTH", "(amax/6)*enc": "AMAX_SIXTH_TIMES_ENC"}
_CANDIDATES = {
    "6": "SIX", "4-or-6-mae": "FOUR_OR_SIX_BY_ABSOLUTE_ERROR", "4-or-6-mse": "FOUR_OR_SIX_BY_SQUARED_ERROR"
}  # fmt: skip
_PLAIN_BLOCKS = 2
"""Blocks of 16 of a thread of the kernel quantize_nvfp4_plain."""
_DEEP = 8
"""Tiles of a thread block, vertically adjacent. A thread block begins with the factors of all scales, and stores the
scales of columns of all its tiles together. Both outputs of nvfp4-2d of 16384² bf16 take an H200 0.253 ms with 8, 0.256
with 4, 0.258 with 2, and 0.248 with 2 tiles in the last 16 strips, the schedule in use; nvfp4-rht-sr takes 0.290 with
it. With room for 16 tiles nvfp4-rht-sr takes 0.285 with 16, but 82 µs in place of 70 for 4096x14336, and nvfp4, -2d and
-rht take 5 to 9 % longer from 12 on."""
_KEY_STEPS = tuple((n * 0x9E3779B9, n * 0xBB67AE85) for n in range(10))
"""Increments of the two words of Philox's key in each round."""
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
"""Multipliers of words 0 and 2 in a round of Philox."""
_NO_KEYS = _KEYS(words=(0,) * 20)
_FUSED_GROUP = 16
"""Size of the groups that the quantization kernels rotate. Groups of other sizes are rotated by a launch of their
own."""


@dataclass
class Output:
    """An orientation of a result, (lines, length), in the buffers that the kernel writes."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    tensor_scale: torch.Tensor
    random: object

    @property
    def seed(self) -> int:
        """Seed of Philox."""
        return self.random[0] if isinstance(self.random, tuple) else 0

    @property
    def offset(self) -> int | None:
        """Offset of Philox; None if Philox generates no random words."""
        return self.random[1] % 2**64 if isinstance(self.random, tuple) else None

    def parameters(self) -> StructValue:
        """The kernel's struct Output."""
        return _OUTPUT(
            amax=self.amax, codes=self.codes, scales=self.scales, tensor_scale=self.tensor_scale,
            random=self.random if isinstance(self.random, torch.Tensor) else None, offset=self.offset or 0,
        )  # fmt: skip


_NO_OUTPUT = _OUTPUT(amax=None, codes=None, scales=None, tensor_scale=None, random=None, offset=0)


def new_output(
    shape: tuple[int, int], recipe: Recipe, amax: torch.Tensor, random: object, layout: ScaleLayout
) -> Output:
    device = amax.device
    # No thread writes the padding of a layout; torch sets the padding to 0.
    new = torch.empty if layout == LINEAR else torch.zeros
    scales = new(scales_shape(shape, recipe, layout=layout), dtype=torch.uint8, device=device)
    codes = torch.empty(codes_shape(shape, recipe), dtype=torch.uint8, device=device)
    return Output(codes, scales, amax, torch.empty_like(amax), random)


def variant(recipe: Recipe, *, rotation: str, layout: ScaleLayout, random_given: bool) -> dict[str, Value]:
    """Fields of the kernel's struct QuantizeNvfp4Variant. `rotation` is an enumerator of its Rotation."""
    return {
        "candidates": _CANDIDATES[recipe.candidates], "square_blocks": recipe.block[0] > 1,
        "amax_per_row": recipe.granularity == "row", "propagate_nan": recipe.nan == "propagate", "rotation": rotation,
        "signs": 0 if recipe.transform is None else recipe.transform.signs,
        "stochastic": recipe.rounding == "stochastic", "random_given": random_given,
        "swizzled": layout != LINEAR,
        "scale_order": SCALE_ORDER[recipe.block_scale],
    }  # fmt: skip


def _launch(
    x: torch.Tensor,
    recipe: Recipe,
    row: Output | None,
    column: Output | None,
    *,
    rotation: str,
    sizes: torch.Tensor | None = None,
    layout: ScaleLayout = LINEAR,
) -> None:
    rows, columns = x.shape
    outputs = (row, column)
    arguments, choices = arguments_of(x.shape, recipe, row, column, rotation=rotation, x=x, sizes=sizes, layout=layout)
    grid: tuple[int, ...]
    plain = column is None and sizes is None and layout == LINEAR and x.is_contiguous() and _is_plain(recipe)
    if row is not None and plain:
        name, threads = f"quantize_nvfp4_plain_{suffix(x.dtype)}", THREADS
        grid = (blocks_for(row.scales.numel(), THREADS * _PLAIN_BLOCKS),)
        arguments = arguments[:2]
    elif sizes is None and _in_tiles(x, recipe, row, column):
        name, threads = "quantize_nvfp4_tiles_bf16", THREADS
        grid, schedule = tile_schedule(x, _DEEP)
        keys = (
            _NO_KEYS
            if output is None or output.offset is None
            else _KEYS(words=philox_keys(output.seed, output.offset))
            for output in outputs
        )
        arguments += [_SCHEDULE(**schedule), *keys]
    else:
        name, threads = f"quantize_nvfp4_{suffix(x.dtype)}", GENERAL_THREADS["quantize_nvfp4"].get(x.device.type, 1)
        grid = (max(1, strips(rows, sizes)) * blocks_for(columns, STRIP),)
    flags = flags_of(choices, x.device) + unit_flags(name, x.device)
    launch("quantize_nvfp4", name, grid, (threads,), arguments, device=x.device, extra_flags=flags)


def arguments_of(
    shape: Sequence[int],
    recipe: Recipe,
    row: Output | None,
    column: Output | None,
    *,
    rotation: str,
    x: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
    layout: ScaleLayout = LINEAR,
) -> tuple[list[StructValue], dict[str, Value]]:
    """The structs QuantizeNvfp4Parameters and Output of both halves for a matrix of `shape` (M, K), and the fields of
    QuantizeNvfp4Variant. `x`: None if the kernel makes it."""
    given = [output for output in (row, column) if output is not None]
    random_given = any(isinstance(output.random, torch.Tensor) for output in given)
    choices = variant(recipe, rotation=rotation, layout=layout, random_given=random_given)
    strides = (0, 0) if x is None else x.stride()
    parameters = _PARAMETERS(
        x=x, row_stride=strides[0], column_stride=strides[1], rows=shape[0], columns=shape[1], sizes=sizes,
        sections=1 if sizes is None else len(sizes), max_product=recipe.max_product, variant=choices,
        seed=next((output.seed for output in given), 0) % 2**64,
    )  # fmt: skip
    outputs = [_NO_OUTPUT if output is None else output.parameters() for output in (row, column)]
    return [parameters, *outputs], choices


def flags_of(choices: Mapping[str, Value], device: torch.device) -> tuple[str, ...]:
    """Flags that compile a kernel for one variant of a recipe."""
    return variant_flags(_VARIANT, choices, device)


def philox_keys(seed: int, offset: int) -> tuple[int, ...]:
    """The 20 words of the kernel's PhiloxKeys for `philox_with_offset`.

    They are the keys of all rounds. The keys of the first three rounds also contain the part of rounds 0 and 1 that
    depends on the offset alone. Source: Salmon et al., SC 2011; philox.cuh has the rounds.
    """
    low, high = seed % 2**32, seed % 2**64 >> 32
    keys = [key for a, b in _KEY_STEPS for key in ((low + a) % 2**32, (high + b) % 2**32)]
    first = _MULTIPLIERS[0] * (offset % 2**32)
    second = _MULTIPLIERS[1] * (first >> 32 ^ keys[1])
    for n, word in (0, offset >> 32), (2, second >> 32), (3, first % 2**32), (4, second % 2**32):
        keys[n] ^= word
    return tuple(keys)


def _in_tiles(x: torch.Tensor, recipe: Recipe, *outputs: Output | None) -> bool:
    """Whether the kernel for whole tiles can quantize `x`."""
    square, chosen = recipe.block[0] > 1, recipe.candidates != "6"
    unsupported = (square and recipe.transform is not None) or (chosen and (square or recipe.granularity == "row"))
    aligned = all(o.codes.data_ptr() % 8 == o.scales.data_ptr() % 4 == 0 for o in outputs if o is not None)
    return not unsupported and aligned and in_tiles(x) and in_32_bits(x)


def _is_plain(recipe: Recipe) -> bool:
    """Whether a recipe consists of steps 1 to 8 of docs/numerics.md#nvfp4 alone."""
    choices = (recipe.block[0], recipe.granularity, recipe.transform, recipe.candidates, recipe.rounding)
    return choices == (1, "tensor", None, "6", "nearest-even")


def has_fused_rotation(recipe: Recipe) -> bool:
    return recipe.transform is None or recipe.transform.group == _FUSED_GROUP


def quantize(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
    layout: ScaleLayout = LINEAR,
) -> Quantized:
    """`native.ops.quantize`: a recipe with a transform rotates the rows. Source: docs/numerics.md#nvfp4."""
    check_scale(scale, 1, recipe)
    x = as_matrix(x)
    shape = (x.shape[0], x.shape[1])
    check_rotated(x, shape[1], recipe)
    check_random(random, shape, recipe)
    check_contiguous(random=random)
    if not has_fused_rotation(recipe):
        rotated = quantize(
            transform(x, recipe), replace(recipe, transform=None), amax=amax, random=random, layout=layout
        )
        return replace(rotated, recipe=recipe)
    if amax is None:
        amax = _amax(x, recipe)
    check_tensor(amax, "amax", (torch.float32,), amax_shape(shape, recipe))
    output = new_output(shape, recipe, amax, random, layout)
    rotation = "NO_ROTATION" if recipe.transform is None else "ROTATE_ROWS"
    _launch(x, recipe, output, None, rotation=rotation, layout=layout)
    return quantized(output, recipe, shape, layout)


def quantized(output: Output, recipe: Recipe, shape: tuple[int, int], layout: ScaleLayout) -> Quantized:
    return Quantized(output.codes, output.scales, output.amax, recipe, shape, output.tensor_scale, layout)


def _amax(x: torch.Tensor, recipe: Recipe, *, along_rows: bool = True) -> torch.Tensor:
    """Amax of the tensor, or of each row or column. If the recipe has a transform, `x` is rotated first."""
    propagate_nan = recipe.nan == "propagate"
    per_line, rotated = recipe.granularity == "row", recipe.transform is not None
    if not per_line and not rotated and x.is_contiguous():
        return tensor_amax(x, propagate_nan=propagate_nan)
    plain_amax, rotated_amax = oriented_amax(
        x, plain=not rotated, rotated=rotated, along_rows=along_rows, per_line=per_line,
        signs=0 if recipe.transform is None else recipe.transform.signs, propagate_nan=propagate_nan,
    )  # fmt: skip
    amax = rotated_amax if rotated else plain_amax
    assert amax is not None
    return amax


def quantize_both(
    x: torch.Tensor,
    recipe: Recipe,
    halves: Collection[Half],
    *,
    amaxes: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
    bits: Sequence[object],
    layout: ScaleLayout,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K), any strides, in one read: rowwise (M, K), and its transpose, columnwise (K, M).

    A transform rotates the columnwise result only; groups other than 16 take a separate launch. `amaxes`, `bits`: amax
    and random bits of each half. A half that is not among `halves` is None. Raises as `quantize` does.
    """
    check_scale(scale, 1, recipe)
    x = as_matrix(x)
    for half in halves:
        shape, words = half.shape(x.shape), half.pick(bits)
        check_rotated(x, shape[1], half.recipe(recipe))
        check_random(words, shape, recipe)
        check_contiguous(random=words)
    # The kernel chooses the scale of a square block by one amax, and two given amaxes take two launches.
    separate = recipe.candidates != "6" and recipe.block[0] > 1 and tuple(amaxes) != (None, None)
    if len(halves) == 2 and (separate or not has_fused_rotation(recipe)):
        row = quantize(x, recipe.rowwise, amax=amaxes[0], random=bits[0], layout=layout)
        alone = (Half.COLUMN,)
        column = quantize_both(x, recipe, alone, amaxes=amaxes, scale=scale, bits=bits, layout=layout)[1]
        return row, column
    if not has_fused_rotation(recipe) and Half.COLUMN in halves:
        return None, quantize(x.T, recipe, amax=amaxes[1], random=bits[1], layout=layout)
    outputs = [
        None if own is None else new_output(half.shape(x.shape), recipe, own, half.pick(bits), layout)
        for half, own in zip(Half, _amaxes(x, recipe, amaxes, halves), strict=True)
    ]
    rotation = "NO_ROTATION" if recipe.transform is None else "ROTATE_COLUMNS"
    _launch(x, recipe, *outputs, rotation=rotation, layout=layout)
    row_half, column_half = (
        None if output is None else quantized(output, half.recipe(recipe), half.shape(x.shape), layout)
        for half, output in zip(Half, outputs, strict=True)
    )
    return row_half, column_half


def _amaxes(
    x: torch.Tensor, recipe: Recipe, given: Sequence[torch.Tensor | None], halves: Collection[Half]
) -> list[torch.Tensor | None]:
    """Amax of each half, given or of the matrix; None for a half that is not wanted. One read gives both if a rotation
    lies between."""
    wanted = {half: half.pick(given) for half in halves}
    for half, amax in wanted.items():
        if amax is not None:
            check_tensor(amax, f"{half} amax", (torch.float32,), amax_shape(half.shape(x.shape), recipe))
    missing = [half for half, amax in wanted.items() if amax is None]
    if missing and recipe.transform is not None:
        own = oriented_amax(
            x, plain=Half.ROW in missing, rotated=Half.COLUMN in missing, along_rows=False,
            signs=recipe.transform.signs, propagate_nan=recipe.nan == "propagate",
        )  # fmt: skip
        wanted |= {half: half.pick(own) for half in missing}
    elif recipe.granularity == "row":
        wanted |= {half: _amax(x, recipe, along_rows=half is Half.ROW) for half in missing}
    elif missing:
        wanted |= dict.fromkeys(missing, _amax(x, recipe))
    return [wanted.get(half) for half in Half]


def quantize_grouped(
    x: torch.Tensor,
    sizes: torch.Tensor,
    recipe: Recipe,
    half: Half,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
) -> GroupedQuantized:
    """The half of sections of `x` (M, K), as `native.ops.quantize_grouped` describes it. `amax`: float32 (G,)."""
    check_scale(scale, 1, recipe)
    x = as_matrix(x)
    rows, columns = x.shape
    _check_sizes(sizes, rows, recipe, rotated=half is Half.COLUMN)
    # For columnwise sections, `_check_sizes` checks that every section has whole groups.
    check_rotated(x, half.pick((columns, 0)), recipe)
    check_random_of_sections(random, recipe)
    if not has_fused_rotation(recipe):  # every group lies in a section: one launch rotates all sections
        y = half.matrix(transform(half.matrix(x), recipe))
        plain = replace(recipe, transform=None)
        return replace(quantize_grouped(y, sizes, plain, half, amax=amax, random=random), recipe=recipe)
    count = len(sizes)
    rotated = recipe.transform is not None
    if amax is None:
        plain_amax, rotated_amax = oriented_amax(
            x, plain=not rotated, rotated=rotated, along_rows=half is Half.ROW, sizes=sizes,
            signs=0 if recipe.transform is None else recipe.transform.signs, propagate_nan=recipe.nan == "propagate",
        )  # fmt: skip
        amax = rotated_amax if rotated else plain_amax
        assert amax is not None
    check_tensor(amax, "amax", (torch.float32,), (count,))
    output = new_output((rows, columns), recipe, amax, random, LINEAR)
    if half is Half.COLUMN:  # flat, with room for a half byte and a short block at the end of every section
        output.codes = torch.empty(columns * ((rows + count) // 2 + 1), dtype=torch.uint8, device=x.device)
        output.scales = torch.empty(columns * (rows // 16 + count), dtype=torch.uint8, device=x.device)
    rotation = half.pick(("ROTATE_ROWS", "ROTATE_COLUMNS")) if rotated else "NO_ROTATION"
    _launch(x, recipe, *half.pick(((output, None), (None, output))), rotation=rotation, sizes=sizes)
    return GroupedQuantized(
        output.codes, output.scales, amax, recipe, (rows, columns), sizes, output.tensor_scale, half is Half.COLUMN
    )


def _check_sizes(sizes: torch.Tensor, rows: int, recipe: Recipe, *, rotated: bool) -> None:
    check_section_recipe(recipe)
    check_sizes_of(sizes, rows)
    if sizes.device.type != "cpu" or not rotated or recipe.transform is None:
        return
    check_rotated_sections(sizes.tolist(), recipe)
