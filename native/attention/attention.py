"""Attention of queries over a paged, quantized cache, by kernels/attention/attention.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.native.attention.cache import Pages, decode_scale, pages_of
from narrowgauge.native.gemm.wgmma import multiprocessors
from narrowgauge.native.runtime.arguments import blocks_for, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.kv_cache import HALVES, Cache, PageLayoutName
from narrowgauge.spec.recipes import Recipe, find_recipe

_PARAMETERS = KernelStruct("attention/attention.cuh", "AttentionParameters")
_MERGE = KernelStruct("attention/attention.cu", "MergeParameters")
_WARPS, _RESIDENT = 2, 6
"""Of a block of tensor cores, and blocks of a multiprocessor. On an H200, 32 requests of 8192 tokens, 8 heads of the
cache and 64 of q: 0.91 of the rate of a bare read of an FP8 cache; 0.89 with 4 warps and 3 blocks."""
_ROWS, _TILE_KEYS, _STAGES = 16, 32, 2
_KEYS, _THREADS = _TILE_KEYS * _WARPS, 32 * _WARPS
_CHUNK, _MOST_CHUNKS, _PAGE = 64, 4, 16
_LONGEST_STRIDE = 2**31 - 1
SCALE = 0.08664339756999316
"""fl(ln 2)/8, the default of the contract."""
_PORTABLE_THREADS = 32


def attention(
    q: torch.Tensor, cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, q_lengths: torch.Tensor,
    recipe: str | Recipe, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    page_layout: PageLayoutName = "nhd", scale: float = SCALE, causal: bool = True, window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale · q · kᵀ) · v of rows `q` (queries, q_heads, dim), bfloat16 or float16, over a cache.

    Request b has q_lengths[b] rows, one request behind another, and lengths[b] tokens in the cache, whose pages are
    pages[b]. causal: the last row of a request sees all its tokens, and each row before it one token less. window: a
    row sees so many of its last tokens; 0: all. softcap: logits s are softcap · tanh(s / softcap); 0: they stay.
    Returns (queries, q_heads, v_dim) of the dtype of `q`, and (queries, q_heads) float32, ln of the sum of
    exponentials. Raises TypeError for another dtype, NotImplementedError for a recipe that the kernels do not read,
    ToolchainError if kernels cannot be compiled.
    """
    options = Options(window=window, softcap=softcap)
    return _attention(q, cache, pages, lengths, q_lengths, recipe, k_scale, v_scale, scale, causal, options)


def attention_sinks(
    q: torch.Tensor, cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, q_lengths: torch.Tensor,
    sinks: torch.Tensor, recipe: str | Recipe, *, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, page_layout: PageLayoutName = "nhd", scale: float = SCALE,
    causal: bool = True, window: int = 0, softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` with a further logit of each head, `sinks` (q_heads,) float32, that has a weight and no value."""
    check_tensor(sinks, "sinks", (torch.float32,), (q.shape[1],))
    options = Options(window=window, softcap=softcap, sinks=sinks.contiguous())
    return _attention(q, cache, pages, lengths, q_lengths, recipe, k_scale, v_scale, scale, causal, options)


def _attention(
    q: torch.Tensor, cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, q_lengths: torch.Tensor,
    recipe: str | Recipe, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, scale: float, causal: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    check_tensor(q, "q", (torch.bfloat16, torch.float16), tuple(q.shape))
    k, v = (pages_of(cache, recipe, half) for half in HALVES)
    starts = torch.nn.functional.pad(q_lengths.cumsum(0), (1, 0)).int()
    return attend(
        q, k, v, pages.int().contiguous(), lengths.int().contiguous(), starts=starts, scale=scale, causal=causal,
        k_scale=decode_scale(recipe, k_scale), v_scale=decode_scale(recipe, v_scale), options=options,
    )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Further options of `attend`."""

    window: int = 0
    """Keys that a row sees, at most; 0: all."""
    softcap: float = 0.0
    """0: none."""
    sinks: torch.Tensor | None = None
    """(q_heads,) float32: a logit of each head without a value."""
    q_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    """(1,) float32. With it, the result is codes of E4M3 of the result over this scale."""
    splits: int | None = None
    """Parts of the keys of a request that thread blocks take, at most. None: by the number of thread blocks."""
    tensor_cores: bool | None = None
    """None: on a GPU, for a cache that `takes` accepts."""


def attend(
    q: torch.Tensor, k: Pages, v: Pages, pages: torch.Tensor, lengths: torch.Tensor, *, starts: torch.Tensor | None,
    scale: float, causal: bool = True, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    options: Options = Options(),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of pages that `starts`, int32 (requests + 1,), divides rows of `q` for; None: equally many rows."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, all_heads, _ = q.shape
    device, heads = q.device, k.codes.shape[2]
    group, rows = all_heads // heads, tokens * all_heads
    dtype = q.dtype if options.out_scale is None else torch.uint8
    out = torch.empty((tokens, all_heads, v.dim), dtype=dtype, device=device)
    lse = torch.empty((tokens, all_heads), dtype=torch.float32, device=device)
    if not rows:
        return out, lse
    tensor_cores = options.tensor_cores
    if tensor_cores is None:
        tensor_cores = device.type == "cuda" and takes(k, v)
    batch, most = len(lengths), pages.shape[1] * k.codes.shape[1]
    tiles_of_request = blocks_for(tokens // batch * group, _ROWS)
    tiles = batch * tiles_of_request if starts is None else blocks_for(tokens * group, _ROWS) + batch
    splits = options.splits or (_splits(heads * tiles, most, device) if tensor_cores else 1)
    keys = max(blocks_for(blocks_for(most, splits), _KEYS), 1) * _KEYS
    splits = max(1, blocks_for(most, keys))
    merged = splits > 1 or not tensor_cores
    sums = torch.empty(splits * rows * v.dim if merged else 0, dtype=torch.float32, device=device)
    maxima = torch.empty(splits * rows * 2 if merged else 0, dtype=torch.float32, device=device)
    parameters = _PARAMETERS(
        q=q, token_stride=q.stride(0), head_stride=q.stride(1), k=k.fields(), v=v.fields(), pages=pages,
        lengths=lengths, starts=starts, q_scale=options.q_scale, k_scale=k_scale, v_scale=v_scale, sinks=options.sinks,
        out_scale=options.out_scale, scale_of_heads=k_scale is not None and k_scale.numel() > 1, causal=causal,
        window=options.window, scale=scale, softcap=options.softcap, batch=batch, tokens=tokens, heads=heads,
        group=group, most_pages=pages.shape[1], row_tiles=tiles_of_request, splits=splits, keys_per_split=keys,
        out=out, lse=lse, sums=sums, maxima=maxima,
    )  # fmt: skip
    kernel = suffix(q.dtype)
    if tensor_cores:
        flags: tuple[str, ...] = (
            f"-DKEY_DIM={k.dim}",
            f"-DVALUE_DIM={v.dim}",
            f"-DCACHE_NIBBLES={int(k.format == 'CACHE_NVFP4')}",
        )
        shared = 0
        if device.type == "cuda":
            flags += (f"-DHAS_SOFTCAP={int(options.softcap > 0)}", f"-DPAGE_SIZE={k.codes.shape[1]}")
            shared = _shared_bytes(k, v)
        launch("attention_tensor", f"attention_tensor_{kernel}", (splits, heads, tiles), (_THREADS,), [parameters],
               device=device, extra_flags=flags, shared_bytes=shared)  # fmt: skip
    else:
        launch("attention", f"attention_{kernel}", (blocks_for(rows, _PORTABLE_THREADS), splits), (_PORTABLE_THREADS,),
               [parameters], device=device)  # fmt: skip
    if merged:
        launch("attention", f"attention_merge_{kernel}", (blocks_for(rows, 4),), (128,), [parameters], device=device)
    return out, lse


def merge_attention(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, *, base: str = "e"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two sets of keys from that over each, (queries, q_heads, v_dim), and their log-sum-exps.

    `base` of these: "e" or "2". A log-sum-exp of +∞ counts as −∞: no key. Raises TypeError or ValueError for tensors of
    another dtype or shape.
    """
    check_tensor(o_a, "o_a", (torch.bfloat16, torch.float16), tuple(o_a.shape))
    check_tensor(o_b, "o_b", (o_a.dtype,), tuple(o_a.shape))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(lse, name, (torch.float32,), tuple(o_a.shape[:2]))
    out = torch.empty(o_a.shape, dtype=o_a.dtype, device=o_a.device)
    lse = torch.empty(lse_a.shape, device=lse_a.device)
    if out.numel():
        rows = lse.numel()
        parameters = _MERGE(out_a=o_a.contiguous(), out_b=o_b.contiguous(), lse_a=lse_a.contiguous(),
                            lse_b=lse_b.contiguous(), out=out, lse=lse, rows=rows, dims=out.shape[-1],
                            base_2=base == "2")  # fmt: skip
        launch("attention", f"merge_results_{suffix(out.dtype)}", (blocks_for(rows, 4),), (128,), [parameters],
               device=out.device)  # fmt: skip
    return out, lse


def takes(k: Pages, v: Pages) -> bool:
    """Whether the kernel with tensor cores has the format, sizes and alignment of a cache."""
    alignment = {"CACHE_FP8": 16, "CACHE_NVFP4": 8}.get(k.format)
    if alignment is None or v.format != k.format or k.codes.shape[1] % _PAGE:
        return False
    for part in (k, v):
        if part.dim % _CHUNK or part.dim > _CHUNK * _MOST_CHUNKS or part.codes.dim() != 4 or part.codes.stride(3) != 1:
            return False
        page, *inner = part.codes.stride()[:3]
        if page > _LONGEST_STRIDE or any(stride % alignment for stride in (page, *inner)):
            return False
        if part.codes.data_ptr() % alignment or (part.scales is not None and not _has_scale_words(part)):
            return False
    return True


def _has_scale_words(part: Pages) -> bool:
    """Whether the block scales of a head lie in aligned words of four."""
    assert part.scales is not None
    strides = part.scales.stride()
    words = (strides[0], strides[2]) if part.swizzled else strides[:3]
    return (part.swizzled or strides[3] == 1) and not any(n % 4 for n in (*words, part.scales.data_ptr()))


def _splits(blocks: int, keys: int, device: torch.device) -> int:
    return max(1, min(blocks_for(keys, 4 * _KEYS), multiprocessors(device) * _RESIDENT // max(blocks, 1)))


def _shared_bytes(k: Pages, v: Pages) -> int:
    """sizeof(Shared)."""
    bytes_of_key = (k.dim + v.dim) * 9 // 16 if k.format == "CACHE_NVFP4" else k.dim + v.dim
    stages = _TILE_KEYS * _STAGES * _WARPS * bytes_of_key
    return 32 * k.dim + max(stages, _WARPS * _ROWS * (v.dim + 4 + 2) * 4)
