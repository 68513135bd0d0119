"""The end of kernels that make and quantize a matrix row by row: outputs, launches, and their recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from narrowgauge.native.fused.prepared import Launch, Prepared, addresses_of, keep, template
from narrowgauge.native.quantize.mx import scale_order as mx_scale_order
from narrowgauge.native.quantize.mx import up_from
from narrowgauge.native.quantize.nvfp4 import SCALE_ORDER as NVFP4_SCALE_ORDER
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime.arguments import blocks_for, check_contiguous, suffix, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value, enumerators
from narrowgauge.spec.arguments import check_amax, check_scale, chosen_layout
from narrowgauge.spec.formats import E4M3, E5M2, E8M0, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES, ScaleLayout

_HEADER = "fused/quantize_row.cuh"
_VARIANT = KernelStruct(_HEADER, "QuantizeRowVariant")
_CHUNK = 16
_BLOCKS = {
    E4M3: ((1, 16),),
    E8M0: ((1, 32),),
    FP32: (*((1, _CHUNK << n) for n in range(6)), (1, WHOLE), (WHOLE, WHOLE)),  # up to 512, those of a warp
}
"""Format of the scale to the block of elements of a scale: groups of lanes, a row, the tensor."""
_FAMILIES = {E4M3: "NVFP4", E8M0: "MX", FP32: "FP8"}
_GIVEN = {
    "block_scale": ("1/enc", "given"), "element_scale": ("x*enc", "x*(1/s)"), "zero_scale": ("saturate", "infinity"),
    "nan_code": (127, E4M3.max_code, E5M2.max_code),
}  # fmt: skip
"""Choices of recipes with a given scale: that of elements, or of codes, and a code for NaN."""
_THREADS, _WARP = 256, 32
_FLOAT, _RESERVED = 4, 3 << 10
"""Bytes of a float32, and an upper bound of the shared memory of a block without its kept vectors."""
LONGEST_ROW = 2**16
"""Columns of a row, at most: the threads of a block hold them in registers."""


@lru_cache(maxsize=256)
def row_recipe(name: str | Recipe) -> Recipe:
    """The recipe of a name. Raises ValueError for an unknown name, NotImplementedError for a recipe with stochastic
    rounding, a rotation, an amax for each row, 4over6, or blocks over several rows."""
    recipe = find_recipe(name) if isinstance(name, str) else name
    given = _GIVEN if recipe.tensor_scale == "given" else {}
    return supported(recipe, block=_BLOCKS.get(recipe.scale, ()), rounding=("nearest-even",), transform=(None,),
                     granularity=("tensor",), candidates=("6",), **given)  # fmt: skip


@lru_cache(maxsize=256)
def needs_tiles(recipe: str | Recipe) -> bool:
    """Whether a recipe of NVFP4 or MX rotates, has blocks over several rows or several candidates for a scale, which
    the kernels over tiles have (`produced.quantize_produced`). Raises ValueError for an unknown name."""
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    choices = (found.block[0], found.transform, found.candidates)
    return found.scale is not FP32 and found.rounding == "nearest-even" and choices != (1, None, "6")


def quantize_rows(
    source: str,
    struct: KernelStruct,
    fields: Mapping[str, Value],
    x: torch.Tensor,
    columns: int,
    recipe: Recipe,
    inputs: Sequence[torch.Tensor] = (),
    *,
    operands: Sequence[torch.Tensor | None],
    form: object,
    resident_threads: int = 0,
    kept: int = 0,
    paired: bool = False,
    ub: float = math.inf,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
    extra_flags: tuple[str, ...] = (),
) -> Quantized:
    """Run the kernel of `source` for the dtype of `x` (M, any), and quantize its rows of `columns` elements.

    `fields`: those of the kernel's `struct`, without `result`. `inputs`: the further matrices (M, K) and vectors (K,).
    `operands`: all tensors of the call, and `form` their `form_of`, under which the launches are kept.
    `resident_threads`: threads of a multiprocessor, if thread blocks of the kernel take whole rows and loop over rows.
    `kept`: vectors (K,) whose chunks a thread of such a kernel can keep in shared memory.
    `paired`: the kernel can give a thread a chunk of both halves of a row, and both halves have whole chunks.
    `ub`: upper bound of the amaxes that give scales. `amax`, float32 (1,), replaces the tensor's own amax; without it,
    a recipe with such an amax takes two launches.
    `scale`, float32 (1,): for a recipe with a given scale, the encode scale, or the decode scale, as its dialect says.
    `scales`: layout of the scales. Raises NotImplementedError for rows longer than `LONGEST_ROW` and for a layout other
    than linear and 128x4, and as `check_amax` and `check_scale`.
    """
    if columns > LONGEST_ROW:
        raise NotImplementedError(f"{source} has rows of up to {LONGEST_ROW} columns, and these have {columns}")
    layout = chosen_layout(scales, recipe, swizzled=False)
    if layout not in (LINEAR, TILES):
        raise NotImplementedError(f"{source} writes scales in layout {LINEAR} or {TILES}, not {layout}")
    if ub != math.inf and recipe.tensor_scale != "none":
        raise NotImplementedError(f"{source} bounds amaxes of blocks and rows, and {recipe} has a scale of the tensor")
    check_amax(amax, (1,), recipe)
    check_scale(scale, 1, recipe)
    check_contiguous(amax=amax, scale=scale)
    rows, device = x.shape[0], x.device
    shape = (rows, columns)
    calls = Prepared(
        recipe, shape, layout, device, codes_shape(shape, recipe), scales_shape(shape, recipe, layout=layout),
        torch.float32 if recipe.scale is FP32 else torch.uint8, padded=layout != LINEAR,
        encodes=recipe.tensor_scale != "none",
        amax=next((number for number, tensor in enumerate(operands) if amax is not None and tensor is amax), None),
    )  # fmt: skip
    outputs = calls.outputs()
    encode, own_amax = [*outputs[2:], None, None][:2]
    variant = _variant(recipe, swizzled=layout != LINEAR, whole_chunks=has_whole_chunks(columns, (x, *inputs)))
    grid = grid_of(rows, columns, device, resident_threads, variant, kept=kept, paired=paired)
    kernel = f"{source}_{suffix(x.dtype)}"
    flags = (f"-DELEMENT={recipe.element.name}", *variant_flags(_VARIANT, variant, device), *unit_flags(kernel, device),
             *grid.flags, *extra_flags)  # fmt: skip
    common: dict[str, Value] = {
        "rows": rows, "columns": columns, "segments": grid.segments, "variant": variant, "codes": outputs[0],
        "scales": outputs[1], "amax": own_amax if amax is None else amax, "given": scale, "encode": encode,
        "largest_element": recipe.element.max, "smallest_amax": recipe.smallest_amax, "largest_amax": ub,
        "max_product": recipe.scale_max * recipe.element.max,
        "largest_scale": torch.finfo(x.dtype if recipe.largest_scale == "input" else torch.float32).max,
    }  # fmt: skip
    amax_first = own_amax is not None and recipe.tensor_scale != "given"
    addresses = addresses_of([*operands, *outputs])
    launches = []
    for amax_alone in (True, False) if amax_first else (False,):
        output = {"amax_alone": amax_alone, "amax_out": own_amax if amax_alone or not amax_first else None}
        parameters = struct(**fields, result={**common, **output})
        launch(source, kernel, (grid.blocks,), (grid.threads,), (parameters,), device=device, extra_flags=flags,
               shared_bytes=grid.shared_bytes)  # fmt: skip
        filled = None if addresses is None else template(struct, parameters, addresses)
        if filled is not None:
            launches.append(Launch(source, kernel, grid.blocks, grid.threads, flags, grid.shared_bytes, *filled))
    if len(launches) == (2 if amax_first else 1):
        keep(form, replace(calls, launches=launches))
    return calls.result(operands, outputs)


def static_recipe(name: str | Recipe, dialects: Sequence[str]) -> Recipe:
    """The recipe of a name, with a given scale and one of the dialects of a kernel.

    Raises ValueError for a recipe that makes its scales, NotImplementedError for another dialect, and as `row_recipe`.
    """
    recipe = row_recipe(name)
    if recipe.tensor_scale != "given":
        raise ValueError(f"recipe {recipe} makes its scales; call the method without _static")
    if recipe.dialect not in dialects:
        raise NotImplementedError(f"the kernel has the formulas of {' and '.join(dialects)}, not {recipe.dialect}")
    return recipe


def has_whole_chunks(columns: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all rows begin at an address aligned to 16 bytes, with neighbours in memory, and have whole chunks."""
    return columns % _CHUNK == 0 and all(
        tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and (tensor.dim() == 1 or tensor.stride(0) % _CHUNK == 0)
        for tensor in tensors
    )


def _variant(recipe: Recipe, *, swizzled: bool, whole_chunks: bool) -> dict[str, Value]:
    """Fields of the kernel's struct QuantizeRowVariant."""
    width = recipe.block[1]
    order = 0
    if recipe.scale is E8M0:
        order = enumerators(_HEADER, "MxScaleOrder")[mx_scale_order(recipe)]
    elif recipe.scale is E4M3:
        order = enumerators(_HEADER, "BlockScaleOrder")[NVFP4_SCALE_ORDER[recipe.block_scale]]
    return {
        "family": _FAMILIES[recipe.scale],
        "scope": "TENSOR" if recipe.whole else "ROW" if width == WHOLE else "GROUP",
        "lanes": 1 if width == WHOLE else width // _CHUNK, "scale_order": order,
        "up_from": up_from(recipe) if recipe.scale is E8M0 else 0,
        "power_of_two": recipe.scale_rounding == "down", "propagate_nan": recipe.nan == "propagate",
        "nan_is_largest": recipe.scale is FP32 and recipe.nan_code == recipe.element.max_code,
        "given_decodes": recipe.block_scale == "given",
        "swizzled": swizzled, "whole_chunks": whole_chunks,
    }  # fmt: skip


class Grid(NamedTuple):
    """Thread blocks, threads of a block, thread blocks of a row, rows of a thread block, the flags for a GPU, and the
    dynamic shared memory of a thread block."""

    blocks: int
    threads: int
    segments: int = 1
    rows: int = 1
    flags: tuple[str, ...] = ()
    shared_bytes: int = 0


def grid_of(
    rows: int,
    columns: int,
    device: torch.device,
    resident_threads: int,
    variant: Mapping[str, Value],
    *,
    kept: int = 0,
    paired: bool = False,
) -> Grid:
    """Grid of a kernel for rows. `variant`: the scope of a scale, and the lanes of a group. `kept`: as of
    `quantize_rows`."""
    if device.type != "cuda":
        return Grid(max(rows, 1), _WARP)
    chunks, half, lanes = blocks_for(columns, _CHUNK), columns // 2 // _CHUNK, variant["lanes"]
    assert isinstance(lanes, int)
    whole_rows = resident_threads > 0 or variant["scope"] == "ROW"
    pairs = half if paired and half % lanes == 0 and (half <= _THREADS or not whole_rows) else 0
    segments = 1 if whole_rows else blocks_for(pairs or chunks, _THREADS)
    most = _THREADS if chunks <= 2 * _THREADS else 2 * _THREADS
    of_thread = 2 if pairs else max(2, blocks_for(chunks, most)) if whole_rows else 1
    threads = max(blocks_for(chunks, segments * of_thread), lanes)
    flags = [f"-DROW_CHUNKS={of_thread}"]
    if resident_threads and rows and variant.get("whole_chunks") and threads % _WARP == 0:
        flags.append(f"-DROW_FULL={int(threads > _WARP and columns == threads * of_thread * _CHUNK)}")
    if pairs:
        flags.append("-DPAIRED")
    blocks, rows_of_block = max(rows, 1) * segments, 1
    if threads <= _WARP:  # several rows in a block
        row_lanes = 1 << (threads - 1).bit_length()
        flags.append(f"-DROW_LANES={row_lanes}")
        rows_of_block, threads = _THREADS // row_lanes, _THREADS
        blocks = blocks_for(blocks, rows_of_block)
    threads = blocks_for(threads, _WARP) * _WARP
    bound = 1 << (threads - 1).bit_length()  # a power of two: each bound is compiled
    flags.append(f"-DROW_THREADS={bound}")
    shared_bytes = 0
    if resident_threads:
        multiprocessors, shared_memory = _multiprocessors(device)
        flags.append(f"-DRESIDENT={max(1, resident_threads // bound) if of_thread <= 2 else 1}")
        resident = max(1, resident_threads // (threads if kept else bound)) if of_thread <= 2 else 1
        several, blocks = blocks > multiprocessors * resident, min(blocks, multiprocessors * resident)
        shared_bytes = kept * of_thread * _CHUNK * _FLOAT * threads
        if several and kept and resident * (shared_bytes + _RESERVED) <= shared_memory:
            flags += ["-DKEPT=1", f"-DBLOCK_THREADS={threads}"]
        else:
            shared_bytes = 0
    return Grid(blocks, threads, segments, rows_of_block, tuple(flags), shared_bytes)


@cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and the shared memory of each in bytes."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor
