"""`Quantized` from the tensors of another library, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from narrowgauge.adapt.conventions import AnyLayout, Layout, Nibbles, TensorScaleIs, check_choice
from narrowgauge.adapt.number_codes import (
    codes_of_numbers,
    holds_numbers,
    holds_words,
    numbers_of_exponents,
    stored_bytes,
)
from narrowgauge.adapt.own_layouts import cells_of, own_linear, own_packed
from narrowgauge.adapt.tensor_scales import amax_and_tensor_scale
from narrowgauge.adapt.tensors import tensor
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILED, TILES
from narrowgauge.spec.scale_layouts import Layout as ScaleLayoutRow


def quantized(
    codes: Any,
    scales: Any,
    recipe: str | Recipe,
    shape: Sequence[int],
    *,
    amax: Any = None,
    tensor_scale: Any = None,
    tensor_scale_is: TensorScaleIs = "amax",
    layout: AnyLayout = LINEAR,
    nibbles: Nibbles = "low-first",
    transposed: bool = False,
    true_amax: Any = None,
) -> Quantized:
    """A `Quantized` of the codes and scales of another library. `CONVENTIONS` explains all values of the arguments.

    codes: (M, K), or packed (M, ⌈K/2⌉) for elements of 4 bits, (M, 3K/4) for dense 6 bits, as bytes, words, a narrow
    dtype, or decoded values.
    scales: (M, ⌈K/block⌉) for scales of one byte, (⌈M/rows⌉, ⌈K/block⌉) for float32 scales, one number for one scale
    per tensor; in the shape of `layout`, or flat if `layout` has tiles. Bytes, words, a narrow dtype, or numbers.
    shape: (M, K) of the input, blocks along K; or (…, K), with all dimensions but the last as rows.
    amax: the amax that the library reports, float32, one number or (M,) for a recipe with an amax per row.
    tensor_scale: the reported tensor scale, of the shape of amax; `tensor_scale_is` has its meaning.
    layout, nibbles: places of scales and of 4-bit codes. `nibbles` describes the given bytes for every recipe. A layout
    may also be a `Layout` of `narrowgauge.spec.scale_layouts`, a function from linear scales to packed ones, or a
    permutation (`OwnLayout`).
    transposed: codes and scales are the transposes of the shapes above. Scales in tiles keep their shape.
    true_amax: the amax of the input, for a tensor scale of another kind than the recipe computes with.

    The result is never `transposed`. Layout 128x4 gives a result of this layout with the padding; the remaining layouts
    give linear scales, and `padding` gives the omitted bytes. Only float64 tensor scales are rounded, to float32.
    Tensors stay on their device and are copied only to change their layout.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, an unknown convention, a number that its format
    does not have, and a tensor scale that the recipe does not have or that does not determine the factor of the recipe.
    """
    recipe = find_recipe(recipe)
    check_choice("layout", layout)
    check_choice("nibbles", nibbles)
    check_choice("tensor_scale_is", tensor_scale_is)
    matrix = _matrix_shape(shape)
    own_codes = _codes(tensor(codes), recipe, matrix, nibbles, transposed=transposed).contiguous()
    given = tensor(scales)
    if not isinstance(layout, str | ScaleLayoutRow):
        raw = stored_bytes(given, recipe.scale, "scales") if holds_words(given) else given
        given, layout = own_linear(raw, layout, scales_shape(matrix, recipe)), LINEAR
        given = given.T if transposed else given
    stored = _stored_scales(given, recipe, matrix, layout, transposed=transposed)
    if own_codes.device != stored.device:
        raise ValueError(f"codes are on {own_codes.device} and scales on {stored.device}; move them to one device")
    if layout != TILES:
        stored = _unpacked_scales(stored, layout, scales_shape(matrix, recipe))
    if holds_numbers(stored) and recipe.scale is not FP32:
        stored = codes_of_numbers(stored, recipe.scale, "scales")
    own_amax, own_scale = amax_and_tensor_scale(
        recipe, matrix, own_codes.device, amax=amax, tensor_scale=tensor_scale, tensor_scale_is=tensor_scale_is,
        true_amax=true_amax,
    )  # fmt: skip
    return Quantized(own_codes, stored, own_amax, recipe, matrix, own_scale, TILES if layout == TILES else LINEAR)


def padding(
    scales: Any, recipe: str | Recipe, shape: Sequence[int], *, layout: AnyLayout, transposed: bool = False
) -> torch.Tensor:
    """The padding of the scales of a (M, K) matrix: all bytes, or numbers, that belong to no block, (N,).

    `LAYOUTS` has the right content: 0 for layout 128x4, which tensor cores read. The padding of layout `padded` may
    have any content. Arguments and errors: see `quantized`.
    """
    recipe = find_recipe(recipe)
    check_choice("layout", layout)
    matrix = _matrix_shape(shape)
    rows, columns = scales_shape(matrix, recipe)
    if not isinstance(layout, str | ScaleLayoutRow):
        return tensor(scales).flatten()[cells_of(layout, (rows, columns)).flatten() < 0]
    stored = _stored_scales(tensor(scales), recipe, matrix, layout, transposed=transposed)
    tiles = _tiles(layout)
    whole = stored.shape if tiles is None else tiles.padded_shape((rows, columns))
    linear = _unpacked_scales(stored, layout, whole)
    return torch.cat([linear[:rows, columns:].flatten(), linear[rows:].flatten()])


class Stored(NamedTuple):
    """Codes and scales in the conventions of another library: uint8, or float32 for float32 scales."""

    codes: torch.Tensor
    scales: torch.Tensor


def stored_as(
    q: Quantized, *, layout: AnyLayout = LINEAR, nibbles: Nibbles = "low-first", transposed: bool = False
) -> Stored:
    """Codes and scales of `q` in the conventions of another library, such as the operands of its GEMM.

    The inverse of `quantized` with the same arguments. Layouts with tiles have their packed shape, (⌈R/128⌉·128,
    ⌈C/4⌉·4) for linear scales (R, C) in 128x4, and padding 0; `padded` has the shape of 128x4 for bytes, and 4
    columns for float32. Raises ValueError for an unknown convention, tiles of float32 scales, and halves of a partial
    block.
    """
    check_choice("layout", layout)
    check_choice("nibbles", nibbles)
    recipe = q.recipe
    codes = q.codes.T if q.transposed else q.codes
    if recipe.element.bits == 6 and nibbles == "dense":
        _check_dense(q.shape[1])
        codes = _three_of_four(codes.contiguous())
    if recipe.element.bits == 4:
        nibbles = "low-first" if nibbles == "dense" else nibbles
        if nibbles == "halves":
            _check_halves(q.shape[1], recipe)
        codes = _packed(_unpacked(codes, q.shape[1], recipe.packing), nibbles, recipe.block[1])
    rows, columns = scales_shape(q.shape, recipe)
    scales = q.scales
    if q.scale_layout != LINEAR:
        scales = LAYOUTS[q.scale_layout].unpack(scales, (rows, columns))
    elif q.transposed:
        scales = scales.T
    tiles = _tiles(layout) if isinstance(layout, str | ScaleLayoutRow) else None
    if not isinstance(layout, str | ScaleLayoutRow):
        scales = own_packed(scales, layout)
    elif tiles is not None:
        _check_tiles(recipe, tiles, q.scales)
        scales = tiles.pack(scales)
    elif layout == "padded":
        height, width = LAYOUTS[TILES].padded_shape((rows, columns))
        scales = torch.nn.functional.pad(scales, (0, width - columns, 0, 0 if recipe.scale is FP32 else height - rows))
    if tiles is None and isinstance(layout, str | ScaleLayoutRow) and transposed:
        scales = scales.T
    return Stored((codes.T if transposed else codes).contiguous(), scales.contiguous())


# ---- codes -----------------------------------------------------------------------------------------------------------


def _codes(
    given: torch.Tensor, recipe: Recipe, shape: tuple[int, int], nibbles: Nibbles, *, transposed: bool
) -> torch.Tensor:
    """Codes as a Quantized stores them: uint8 of `codes_shape`, packed as the recipe packs them."""
    if holds_numbers(given):
        elements = _shaped(given, "codes", shape, transposed, "decoded values")
        codes = codes_of_numbers(elements, recipe.element, "codes")
        return _packed(codes, recipe.packing) if recipe.element.bits == 4 else codes
    if recipe.element.bits == 6 and nibbles == "dense":
        _check_dense(shape[1])
        packed = stored_bytes(given, recipe.element, "codes")
        packed = _shaped(packed, "codes", (shape[0], shape[1] // 4 * 3), transposed, f"dense codes of {shape}")
        return _four_of_three(packed.contiguous())
    if recipe.element.bits != 4:
        stored = stored_bytes(given, recipe.element, "codes")
        return _shaped(stored, "codes", shape, transposed, f"codes of {recipe.element.name}")
    if nibbles == "unpacked":
        return _packed(_single_codes(_shaped(given, "codes", shape, transposed, "unpacked codes")), recipe.packing)
    stored = stored_bytes(given, recipe.element, "codes")
    packed_shape = codes_shape(shape, recipe)
    if given.numel() == math.prod(shape) != math.prod(packed_shape):
        raise ValueError(
            f"codes {tuple(given.shape)} have a number for each element of {shape}; give nibbles='unpacked', or packed "
            f"codes {packed_shape}"
        )
    if nibbles == "halves":
        _check_halves(shape[1], recipe)
    packed = _shaped(stored, "codes", packed_shape, transposed, f"packed codes of {shape}")
    if nibbles == "halves":
        return _packed(_unpacked(packed, shape[1], nibbles, recipe.block[1]), recipe.packing)
    if (nibbles if nibbles != "dense" else "low-first") != recipe.packing:
        packed = (packed >> 4) | (packed << 4)
    return packed


def _check_halves(columns: int, recipe: Recipe) -> None:
    if columns % recipe.block[1]:
        raise ValueError(
            f"nibbles 'halves' needs whole blocks of {recipe.block[1]} elements, and K is {columns}; pad the rows"
        )


def _check_dense(columns: int) -> None:
    if columns % 4:
        raise ValueError(f"nibbles 'dense' packs four codes of 6 bits in three bytes, and K is {columns}; pad the rows")


def _four_of_three(packed: torch.Tensor) -> torch.Tensor:
    """Codes of 6 bits, uint8 (M, K), of bytes (M, 3K/4): the lowest bits first."""
    one, two, three = packed.view(len(packed), packed.shape[1] // 3, 3).int().unbind(2)
    word = one | (two << 8) | (three << 16)
    return torch.stack([word >> 6 * place & 0x3F for place in range(4)], 2).flatten(1).to(torch.uint8)


def _three_of_four(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `_four_of_three`."""
    parts = codes.view(len(codes), codes.shape[1] // 4, 4).int()
    word = parts[:, :, 0] | parts[:, :, 1] << 6 | parts[:, :, 2] << 12 | parts[:, :, 3] << 18
    return torch.stack([word >> 8 * place & 0xFF for place in range(3)], 2).flatten(1).to(torch.uint8)


def _single_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of 4 bits, one in a byte or integer. Raises TypeError or ValueError for anything else."""
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype == torch.bool:
        name = str(codes.dtype).removeprefix("torch.")
        raise TypeError(f"codes: {name} does not hold one code of 4 bits; give uint8, or nibbles='low-first'")
    if codes.dtype in (torch.uint16, torch.uint32, torch.uint64):
        codes = codes.to(torch.int64)
    wrong = (codes < 0) | (codes > 0xF)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"codes{list(place)} is {int(codes[place]):#x}, no code of 4 bits; for two codes in a byte give "
            "nibbles='low-first' or 'high-first'"
        )
    return codes.to(torch.uint8)


def _packed(codes: torch.Tensor, nibbles: str, block: int = 0) -> torch.Tensor:
    """Codes below 16, uint8 (M, K), two in a byte in the order `nibbles`; unchanged for `unpacked`. `halves` needs the
    number of elements of a block."""
    if nibbles == "unpacked":
        return codes
    if nibbles == "halves":
        low, high = codes.reshape(len(codes), codes.shape[1] // block, 2, block // 2).unbind(2)
        return (low | (high << 4)).flatten(1)
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    first, second = padded[:, ::2], padded[:, 1::2]
    return first | (second << 4) if nibbles == "low-first" else second | (first << 4)


def _unpacked(packed: torch.Tensor, columns: int, nibbles: str, block: int = 0) -> torch.Tensor:
    """The inverse of `_packed`: codes (M, K), K = `columns`."""
    low, high = packed & 0xF, packed >> 4
    if nibbles == "halves":
        shape = (len(packed), columns // block, block // 2)
        return torch.stack([low.reshape(shape), high.reshape(shape)], 2).flatten(1)
    pair = [low, high] if nibbles == "low-first" else [high, low]
    return torch.stack(pair, -1).flatten(1)[:, :columns]


# ---- scales ----------------------------------------------------------------------------------------------------------


def _stored_scales(
    given: torch.Tensor, recipe: Recipe, shape: tuple[int, int], layout: Layout | ScaleLayoutRow, *, transposed: bool
) -> torch.Tensor:
    """Scales in their layout with their padding, 2-D: uint8 codes, numbers of the scale format, or float32 scales."""
    if recipe.scale is not FP32:
        stored = given if holds_numbers(given) else stored_bytes(given, recipe.scale, "scales")
    elif given.dtype == torch.float8_e8m0fnu or holds_words(given):
        stored = numbers_of_exponents(stored_bytes(given, E8M0, "scales"))
    elif given.dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = given.float()
    else:
        name = str(given.dtype).removeprefix("torch.")
        raise TypeError(
            f"scales: recipe {recipe} has float32 scales, not {name}; give float32, float8_e8m0fnu "
            "or words of four E8M0 codes"
        )
    if recipe.whole and stored.numel() == 1:
        stored = stored.reshape(1, 1)
    linear = scales_shape(shape, recipe)
    tiles = _tiles(layout)
    what = f"scales of recipe {recipe} of {shape}, layout {layout if tiles is None else tiles.name},"
    if tiles is not None:
        _check_tiles(recipe, tiles, stored)
        return _tiled(stored, tiles.packed_shape(linear), what)
    if layout == "padded":
        stored = stored.T if transposed and stored.dim() == 2 else stored
        if stored.dim() != 2 or stored.shape[0] < linear[0] or stored.shape[1] < linear[1]:
            raise ValueError(f"{what} have at least shape {linear}, not {tuple(stored.shape)}")
        return stored
    sizes = {
        name: math.prod(tiled.padded_shape(linear))
        for name, tiled in TILED.items() if tiled.padding != "none" and tiled.row_padding is None
    }  # fmt: skip
    known = [name for name, size in sizes.items() if stored.numel() == size and not recipe.whole]
    remedy = f"; for scales in tiles give layout={known[0]!r}, for rows of zeros layout='padded'" if known else ""
    return _shaped(stored, "scales", linear, transposed, what, remedy)


def _tiled(stored: torch.Tensor, shape: tuple[int, int], what: str) -> torch.Tensor:
    """Scales in tiles as a matrix: flat and tiled forms are the same memory."""
    if stored.numel() != math.prod(shape):
        raise ValueError(f"{what} have {math.prod(shape)} bytes, padded {shape}; these have {tuple(stored.shape)}")
    if tuple(stored.shape) != shape and not stored.is_contiguous():
        raise ValueError(
            f"{what} in another shape than {shape} are read in the order of memory, but {tuple(stored.shape)} with "
            f"strides {stored.stride()} is not contiguous; give the tensor before permute or transpose"
        )
    return stored.reshape(shape).contiguous()


def _tiles(layout: Layout | ScaleLayoutRow) -> ScaleLayoutRow | None:
    """The layout with tiles that is named or given, or None."""
    return layout if isinstance(layout, ScaleLayoutRow) else TILED.get(layout)


def _unpacked_scales(stored: torch.Tensor, layout: Layout | ScaleLayoutRow, shape: Sequence[int]) -> torch.Tensor:
    """Scales of `_stored_scales` in linear order, cut to a `shape`."""
    if layout == "padded":
        return stored[: shape[0], : shape[1]].contiguous()
    return (layout if isinstance(layout, ScaleLayoutRow) else LAYOUTS[layout]).unpack(stored, shape)


def _check_tiles(recipe: Recipe, row: ScaleLayoutRow, scales: torch.Tensor) -> None:
    if row.by_group or row.scale not in ("", recipe.scale.name):
        of = "the transpose of these scales" if row.by_group else f"{row.scale} scales"
        raise ValueError(f"layout {row.name} holds {of}; recipe {recipe} has rows of {recipe.scale.name} scales")
    if scales.dtype != torch.uint8:
        name = str(scales.dtype).removeprefix("torch.")
        raise ValueError(
            f"layout {row.name} holds bytes, and the scales of recipe {recipe} are {name}; give layout='linear' or "
            "'padded', or bytes"
        )


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) < 2:
        raise ValueError(f"shape is (M, K) or (…, K) of the input, not {tuple(shape)}")
    return math.prod(shape[:-1]), shape[-1]


def _shaped(
    given: torch.Tensor, name: str, shape: tuple[int, int], transposed: bool, what: str, remedy: str = ""
) -> torch.Tensor:
    """A matrix of `shape` of a tensor of this shape, (…, columns) or, if `transposed`, its transpose."""
    if transposed:
        if tuple(given.shape) == shape[::-1]:
            return given.T
        raise ValueError(f"{what} have shape {shape[::-1]} if transposed; {name} have {tuple(given.shape)}{remedy}")
    if given.dim() > 2 and given.shape[-1] == shape[1]:
        given = given.flatten(0, -2)
    if tuple(given.shape) == shape:
        return given
    if tuple(given.shape) == shape[::-1]:
        remedy = "; give transposed=True if codes and scales are stored as transposes"
    raise ValueError(f"{what} have shape {shape}; {name} have {tuple(given.shape)}{remedy}")
