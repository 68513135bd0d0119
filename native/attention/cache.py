"""Paged caches of keys and values as kernels take them, by kernels/attention/cache.cuh, and their writes and reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.native.runtime.arguments import blocks_for, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32, INT8
from narrowgauge.spec.kv_cache import HALVES, PAGE_LAYOUTS, SCALES, Cache, PageLayoutName, part_name, slots_of
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR

_WRITE = KernelStruct("attention/kv_write.cu", "KvWriteParameters")
_READ = KernelStruct("attention/kv_read.cu", "KvReadParameters")
_CHUNK, _THREADS, _LANES = 16, 256, 32
_READ_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Pages(NamedTuple):
    """Pages of keys, or of values."""

    codes: torch.Tensor
    """(pages, tokens of a page, heads, bytes), or (…, bytes/x, x); any strides."""
    scales: torch.Tensor | None
    """(pages, tokens of a page, heads, blocks), bytes or float32, any strides. None: the scale is given."""
    format: str
    """CacheFormat of the kernels."""
    swizzled: bool = False
    """Whether the scales of a head in a page lie in the order of the layout kv-v-swizzled."""

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.codes[0, 0, 0].numel() * (2 if self.format == "CACHE_NVFP4" else 1)

    def fields(self) -> dict[str, Value]:
        """Fields of the struct CachePart."""
        page, offset, head, *inner = self.codes.stride()
        scale_strides = (0, 0, 0, 0) if self.scales is None else self.scales.stride()
        return {
            "codes": self.codes, "scales": self.scales, "format": self.format, "dim": self.dim,
            "page_size": self.codes.shape[1], "chunk": self.codes.shape[-1], "page": page, "offset": offset,
            "head": head, "chunk_stride": inner[0] if len(inner) > 1 else 0, "element": inner[-1],
            "scale_page": scale_strides[0], "scale_offset": scale_strides[1], "scale_head": scale_strides[2],
            "scale_block": scale_strides[3], "swizzled": self.swizzled,
        }  # fmt: skip


def pages_of(cache: Cache, recipe: Recipe, half: str) -> Pages:
    """Keys or values of a cache. Raises NotImplementedError for a recipe that the kernels do not read."""
    scales = None if getattr(cache, part_name(half, SCALES)) is None else _logical(cache, part_name(half, SCALES))
    return Pages(_logical(cache, half), scales, _format(recipe), _swizzled(cache, part_name(half, SCALES)))


def decode_scale(recipe: Recipe, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The factor of elements times block scales, from the scale that a kernel is given."""
    encodes = recipe.tensor_scale == "given" and recipe.block_scale != "given"
    return 1 / scale if encodes and scale is not None else scale


def kv_write(
    k: torch.Tensor, v: torch.Tensor, cache: Cache, slots: torch.Tensor, recipe: str | Recipe, *,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, page_layout: PageLayoutName = "nhd",
) -> Cache:  # fmt: skip
    """Quantizes keys and values (tokens, heads, columns), stores them in the slots of a cache, and returns the cache.

    `slots`: int64 (tokens,), page · (tokens of a page) + offset; a token of a negative slot is not stored. A recipe of
    INT8, or of E4M3 with a given scale, takes a single launch; all further recipes quantize first. Raises TypeError or
    ValueError for tensors of another dtype or shape, NotImplementedError as `native.quantize`, ToolchainError if
    kernels cannot be compiled.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    tokens, heads, _ = k.shape
    check_tensor(k, "k", INPUT_DTYPES, tuple(k.shape))
    check_tensor(v, "v", (k.dtype,), (tokens, heads, v.shape[2]))
    check_tensor(slots, "slots", (torch.int64,), (tokens,))
    halves = dict(zip(HALVES, ((k, k_scale), (v, v_scale)), strict=True))
    if _fused(recipe):
        rows: dict[str, _Rows] = {
            half: (x, scale, pages_of(cache, recipe, half)) for half, (x, scale) in halves.items()
        }
        _launch_write(f"kv_write_{suffix(k.dtype)}", rows, slots.contiguous(), recipe)
        return cache
    codes: dict[str, _Rows] = {}
    scales: dict[str, _Rows] = {}
    for half, (x, scale) in halves.items():
        matrix, encode = x, scale
        if recipe.tensor_scale != "given" and scale is not None:  # a factor of the scales of blocks
            matrix, encode = x.float() / scale.view(-1, 1), None
        q = quantize(matrix.reshape(tokens * heads, -1), recipe, scale=encode)
        codes[half] = q.codes.view(tokens, heads, -1), None, Pages(_logical(cache, half), None, "CACHE_FP8")
        name = part_name(half, SCALES)
        if getattr(cache, name) is not None:
            target = Pages(_logical(cache, name).view(torch.uint8), None, "CACHE_FP8", _swizzled(cache, name))
            scales[half] = q.scales.view(torch.uint8).view(tokens, heads, -1), None, target
    for parts in (codes, scales):
        if parts:
            _launch_write("kv_store", parts, slots.contiguous(), recipe)
    return cache


def kv_read(
    cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, recipe: str | Recipe, *, dtype: str = "bfloat16",
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, page_layout: PageLayoutName = "nhd",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values (Σ lengths, heads, columns) of all requests, one request behind another.

    `pages`: (requests, most pages of a request), numbers of pages; `lengths`: (requests,). `dtype`: "bfloat16" or
    "float16". Raises NotImplementedError for a recipe that the kernels do not read, ToolchainError if kernels cannot be
    compiled.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    slots = slots_of(pages, lengths, cache.page)
    parts = [pages_of(cache, recipe, half) for half in HALVES]
    heads, of = parts[0].codes.shape[2], _READ_DTYPES[dtype]
    outs = [torch.empty(len(slots), heads, part.dim, dtype=of, device=slots.device) for part in parts]
    factors = [decode_scale(recipe, scale) for scale in (k_scale, v_scale)]
    fields = [
        {"source": part.fields(), "scale": factor, "out": out}
        for part, factor, out in zip(parts, factors, outs, strict=True)
    ]
    parameters = _READ(keys=fields[0], values=fields[1], slots=slots, tokens=len(slots), heads=heads,
                       scale_of_heads=_of_heads(k_scale))  # fmt: skip
    chunks = max(blocks_for(part.dim, _CHUNK) for part in parts)
    grid = blocks_for(len(slots) * heads * chunks, _THREADS), len(HALVES)
    launch("kv_read", f"kv_read_{suffix(of)}", grid, (_THREADS,), [parameters], device=slots.device)
    return outs[0], outs[1]


_Rows = tuple[torch.Tensor, torch.Tensor | None, Pages]
"""Rows (tokens, heads, columns), their scale, and their slots."""


def _launch_write(kernel: str, parts: Mapping[str, _Rows], slots: torch.Tensor, recipe: Recipe) -> None:
    """Stores rows of both halves, or of one."""
    fields: list[dict[str, Value]] = []
    longest = page = 0
    for x, scale, target in parts.values():
        cells = target.codes
        if x.shape[2] != target.dim or x.shape[1] != cells.shape[2]:
            raise ValueError(f"rows of shape {tuple(x.shape)} are stored in a cache of {cells.shape[2]} heads and "
                             f"{target.dim} bytes of a row")  # fmt: skip
        page = cells.shape[1]
        fields.append({"rows": x, "token": x.stride(0), "head": x.stride(1), "column": x.stride(2), "scale": scale,
                       "target": target.fields()})  # fmt: skip
        longest = max(longest, blocks_for(x.shape[2], _CHUNK))
    x, scale, target = next(iter(parts.values()))
    use = {"x/s": "DIVIDE", "x*enc": "TIMES"}.get(recipe.element_scale, "TIMES_RECIPROCAL")
    tokens, heads, _ = x.shape
    if target.format in ("CACHE_FP8_TOKEN", "CACHE_INT8_TOKEN"):  # the lanes of a row are neighbours in a warp
        longest = 1 << (longest - 1).bit_length()
        if longest > _LANES:
            raise NotImplementedError(f"rows of up to {_LANES * _CHUNK} elements share a scale, not of {x.shape[2]}")
    parameters = _WRITE(keys=fields[0], values=fields[-1], slots=slots, tokens=tokens, heads=heads, chunks=longest,
                        scale_of_heads=_of_heads(scale), use=use, smallest_amax=recipe.smallest_amax)  # fmt: skip
    flags = (f"-DUSE={use}", f"-DFORMAT={target.format}", f"-DHEADS={heads}u", f"-DCHUNKS={longest}u",
             f"-DPAGE_SIZE={page}",
             f"-DALIGNED={int(kernel != 'kv_store' and _aligned(parts.values(), longest))}")  # fmt: skip
    halves = len(parts) if kernel == "kv_store" else 1  # kv_write has both halves in a thread
    launch("kv_write", kernel, (blocks_for(tokens * heads * longest, _THREADS), halves), (_THREADS,), [parameters],
           device=x.device, extra_flags=flags if x.device.type == "cuda" else ())  # fmt: skip


def _aligned(parts: Iterable[_Rows], chunks: int) -> bool:
    """Whether rows have `chunks` whole chunks, at multiples of 16 bytes in rows and of whole chunks in the cache."""
    for x, _, target in parts:
        cells, chunk = target.codes, _CHUNK // 2 if target.format == "CACHE_NVFP4" else _CHUNK
        places = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:2]))
        bytes_of_cells = (cells.data_ptr(), *cells.stride()[:-1])
        if x.stride(2) != 1 or x.shape[2] != _CHUNK * chunks or any(place % 16 for place in places):
            return False
        if cells.dim() != 4 or cells.stride(3) != 1 or any(place % chunk for place in bytes_of_cells):
            return False
    return True


def _fused(recipe: Recipe) -> bool:
    """Whether a kernel quantizes and stores at once."""
    if recipe.rounding != "nearest-even" or recipe.negative_zero != "keep" or recipe.transform is not None:
        return False
    if recipe.element is E2M1:
        return recipe.dialect == "torchao-one-level"
    if recipe.element is INT8:
        return recipe.block == (1, WHOLE) and recipe.dialect in ("te", "vllm-row")
    if recipe.element is not E4M3 or recipe.scale is not FP32:
        return False
    given = recipe.tensor_scale == "given" and recipe.nan_code == E4M3.nan_code
    return given or (recipe.block == (1, WHOLE) and recipe.dialect == "vllm-kv")


def _format(recipe: Recipe) -> str:
    if recipe.scale is FP32 and recipe.element is E4M3 and recipe.tensor_scale == "given":
        return "CACHE_FP8"
    if recipe.scale is FP32 and recipe.element is E4M3 and recipe.block[1] == WHOLE:
        return "CACHE_FP8_TOKEN"
    if recipe.scale is FP32 and recipe.element is INT8 and recipe.block[1] == WHOLE:
        return "CACHE_INT8_TOKEN"
    if recipe.scale is E4M3 and recipe.element is E2M1:
        return "CACHE_NVFP4"
    if recipe.scale is E8M0 and recipe.element is E4M3 and recipe.block == (1, 32):
        return "CACHE_MXFP8"
    raise NotImplementedError(f"kernels read caches of FP8, INT8, NVFP4 and MXFP8, not of {recipe}")


def _of_heads(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.numel() > 1


def _swizzled(cache: Cache, part: str) -> bool:
    return part == "value_scales" and PAGE_LAYOUTS[cache.layout].value_scales != LINEAR


def _logical(cache: Cache, part: str) -> torch.Tensor:
    """A tensor of the cache as (pages, tokens of a page, heads, …), the last axis maybe in two: a view of memory."""
    stored: torch.Tensor = getattr(cache, part)
    if _swizzled(cache, part):
        return stored.transpose(1, 2)
    layout = PAGE_LAYOUTS[cache.layout]
    order = layout.keys if part.startswith("key") else layout.values
    digits = [digit.partition(":")[0] for digit in order.split()]
    return stored.permute([digits.index(digit) for digit in "nthdx" if digit in digits])
