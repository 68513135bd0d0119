"""Attention of queries over a paged, quantized cache, by kernels/attention/attention.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.native.attention.cache import Pages, decode_scale, pages_of
from narrowgauge.native.gemm.wgmma import multiprocessors
from narrowgauge.native.runtime.arguments import blocks_for, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.kv_cache import HALVES, Cache, PageLayoutName
from narrowgauge.spec.recipes import Recipe, find_recipe

_PARAMETERS = KernelStruct("attention/attention.cuh", "AttentionParameters")
_PREFILL = KernelStruct("attention/attention_prefill.cu", "PrefillParameters")
_MERGE = KernelStruct("attention/attention.cu", "MergeParameters")
_WARPS, _BLOCK_HEADS = 2, (4, 2, 1)
"""Warps of a head of the cache, and heads that may share a block of the kernel of tensor cores."""
_RESIDENT = {("CACHE_FP8", 1): 8, ("CACHE_FP8", 2): 6, ("CACHE_NVFP4", 1): 8, ("CACHE_NVFP4", 2): 4}
"""Heads of the cache that a multiprocessor has registers for at once, by the format and the tiles of 8 rows."""
_SHARED_MEMORY, _RESERVED = 228 * 1024, 1024
"""Bytes of a multiprocessor of Hopper, and bytes of a block taken by the driver."""
_ROW_TILE, _MOST_ROW_TILES, _TILE_KEYS, _STAGES = 8, 2, 32, 2
_KEYS, _THREADS = _TILE_KEYS * _WARPS, 32 * _WARPS
_CHUNK, _MOST_CHUNKS, _PAGE, _ALIGNMENT = 64, 4, 16, 16
_LONGEST_STRIDE = 2**31 - 1
SCALE = 0.08664339756999316
"""fl(ln 2)/8, the default of the contract."""
_PORTABLE_THREADS = 32
_PREFILL_ROWS = _PREFILL_KEYS = 128
_FEWEST_ROWS = 256
"""Rows of a head of the cache and a request from which on the path "prefill" is faster, on average. On an H200, 8192
keys and 8 heads of q for a head of the cache: 256 rows take 0.76 of the time of the path "decode", 128 rows 1.42."""
_PREFILL_DIMS = (64, 128, 192), (64, 128)
"""Head dimensions of keys, and of values."""
_MOST_TILES = 1 << 30
"""Bytes of decoded keys and values, at most."""
PathName = Literal["portable", "decode", "prefill"]
"""Kernels of the sources attention, attention_tensor and attention_prefill."""


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
    exponentials. Raises TypeError for a wrong dtype, NotImplementedError for a recipe without a kernel,
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
    """Largest number of keys of a row; 0: all."""
    softcap: float = 0.0
    """0: none."""
    sinks: torch.Tensor | None = None
    """(q_heads,) float32: a logit of each head without a value."""
    q_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    """(1,) float32. With it, the result is codes of E4M3 of the result over this scale."""
    splits: int | None = None
    """Largest number of parts of the keys of a request, a thread block per part. None: by the number of thread
    blocks."""
    path: PathName | None = None
    """None: on a GPU "prefill" for many rows of a request and "decode" for few, if these kernels read the cache."""
    weights: Literal["input", "e4m3"] = "input"
    """Dtype of the weights of the second product, of the path "prefill": that of q, or codes of E4M3 of 2⁸·p."""
    lag: float = 0.0
    """The running maximum of the path "prefill" grows only by more than the lag, in base 2."""


def attend(
    q: torch.Tensor, k: Pages, v: Pages, pages: torch.Tensor, lengths: torch.Tensor, *, starts: torch.Tensor | None,
    scale: float, causal: bool = True, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    options: Options = Options(),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of pages that `starts`, int32 (requests + 1,), divides rows of `q` for; None: equally many rows.

    Raises ValueError for options unknown to the path.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, all_heads, _ = q.shape
    device, heads = q.device, k.codes.shape[2]
    dtype = q.dtype if options.out_scale is None else torch.uint8
    out = torch.empty((tokens, all_heads, v.dim), dtype=dtype, device=device)
    lse = torch.empty((tokens, all_heads), dtype=torch.float32, device=device)
    if not out.numel():
        return out, lse
    path = options.path or _path_of(q, k, v, pages)
    _check(options, path, k, v)
    if path == "prefill" and any(n % 8 for n in (*q.stride()[:2], q.data_ptr() // 2)):
        q = q.contiguous()
    fields: dict[str, Value] = {
        "q": q, "token_stride": q.stride(0), "head_stride": q.stride(1), "k": k.fields(), "v": v.fields(),
        "pages": pages, "lengths": lengths, "starts": starts, "q_scale": options.q_scale, "k_scale": k_scale,
        "v_scale": v_scale, "sinks": options.sinks, "out_scale": options.out_scale,
        "scale_of_heads": k_scale is not None and k_scale.numel() > 1, "causal": causal, "window": options.window,
        "scale": scale, "softcap": options.softcap, "batch": len(lengths), "tokens": tokens, "heads": heads,
        "group": all_heads // heads, "most_pages": pages.shape[1], "out": out, "lse": lse,
    }  # fmt: skip
    call = _Call(fields, q, k, v, pages, starts, options)
    {"portable": _portable, "decode": _decode, "prefill": _prefill}[path](call)
    return out, lse


@dataclass(frozen=True)
class _Call:
    """Arguments of the kernels of a path."""

    fields: dict[str, Value]
    """Fields of AttentionParameters without splits and tiles."""
    q: torch.Tensor
    k: Pages
    v: Pages
    pages: torch.Tensor
    starts: torch.Tensor | None
    options: Options

    @property
    def most_keys(self) -> int:
        """Keys of a request, at most."""
        return self.pages.shape[1] * self.k.codes.shape[1]

    @property
    def group(self) -> int:
        """Heads of q that share a head of the cache."""
        return self.q.shape[1] // self.k.codes.shape[2]

    def row_tiles(self, rows: int) -> tuple[int, int]:
        """Tiles of `rows` rows: of a request if all requests have equally many rows, and at most of all requests."""
        tokens, batch = self.q.shape[0], len(self.pages)
        of_request = blocks_for(tokens // batch * self.group, rows)
        every = batch * of_request if self.starts is None else blocks_for(tokens * self.group, rows) + batch
        return of_request, every

    def flags(self) -> tuple[str, ...]:
        """Flags of the kernels with tensor cores."""
        flags: tuple[str, ...] = (
            f"-DKEY_DIM={self.k.dim}",
            f"-DVALUE_DIM={self.v.dim}",
            f"-DCACHE_NIBBLES={int(self.k.format == 'CACHE_NVFP4')}",
        )
        return (*flags, f"-DHAS_SOFTCAP={int(self.options.softcap > 0)}") if self.q.device.type == "cuda" else flags

    def parameters(self, splits: int, keys: int, row_tiles: int = 0, *, merged: bool) -> StructValue:
        """AttentionParameters of splits of `keys` keys. `merged`: whether attention_merge adds the splits."""
        count, (tokens, all_heads, _) = splits if merged else 0, self.q.shape
        sums, maxima = (
            torch.empty(count * tokens * all_heads * dims, dtype=torch.float32, device=self.q.device)
            for dims in (self.v.dim, 2)
        )
        return _PARAMETERS(
            **self.fields, row_tiles=row_tiles, splits=splits, keys_per_split=keys, sums=sums, maxima=maxima
        )

    def merge(self, parameters: StructValue) -> None:
        """Adds the results of the splits."""
        rows, kernel = self.q.shape[0] * self.q.shape[1], f"attention_merge_{suffix(self.q.dtype)}"
        launch("attention", kernel, (blocks_for(rows, 4),), (128,), [parameters], device=self.q.device)


def _split(most: int, splits: int) -> tuple[int, int]:
    """Splits of at most `most` keys, and keys of each: multiples of `_KEYS`."""
    keys = max(blocks_for(blocks_for(most, splits), _KEYS), 1) * _KEYS
    return max(1, blocks_for(most, keys)), keys


def _portable(call: _Call) -> None:
    splits, keys = _split(call.most_keys, call.options.splits or 1)
    parameters = call.parameters(splits, keys, merged=True)
    rows, kernel = call.q.shape[0] * call.q.shape[1], f"attention_{suffix(call.q.dtype)}"
    launch("attention", kernel, (blocks_for(rows, _PORTABLE_THREADS), splits), (_PORTABLE_THREADS,), [parameters],
           device=call.q.device)  # fmt: skip
    call.merge(parameters)


def _decode(call: _Call) -> None:
    device, heads = call.q.device, call.k.codes.shape[2]
    few = call.q.shape[0] // len(call.pages) * call.group <= _ROW_TILE  # rows of a request, on average
    row_tiles = 1 if few else _MOST_ROW_TILES
    of_request, tiles = call.row_tiles(_ROW_TILE * row_tiles)
    flags, several, shared, resident = (*call.flags(), f"-DROW_TILES={row_tiles}"), 1, 0, 1
    if device.type == "cuda":
        shared = _shared_bytes(call.k, call.v, row_tiles)
        several, resident = _blocks(heads, shared, _resident(call.k, call.v, row_tiles))
        flags = (*flags, *_strides(call.k, call.v), f"-DBLOCK_HEADS={several}", f"-DRESIDENT_BLOCKS={resident}")
    splits = call.options.splits or _splits(heads * tiles, call.most_keys, several * resident, device)
    splits, keys = _split(call.most_keys, splits)
    parameters = call.parameters(splits, keys, of_request, merged=splits > 1)
    launch("attention_tensor", f"attention_tensor_{suffix(call.q.dtype)}", (splits, heads // several, tiles),
           (several * _THREADS,), [parameters], device=device, extra_flags=flags,
           shared_bytes=several * shared)  # fmt: skip
    if splits > 1:
        call.merge(parameters)


def _strides(k: Pages, v: Pages) -> tuple[str, ...]:
    """Flags of the places of a token in a page."""
    strides = {"KEY_STRIDE": k.codes.stride(1), "VALUE_STRIDE": v.codes.stride(1)}
    for name, part in (("KEY", k), ("VALUE", v)):
        strides[f"{name}_SCALE_STRIDE"] = 0 if part.scales is None else part.scales.stride(1)
    return (f"-DPAGE_SIZE={k.codes.shape[1]}", f"-DSWIZZLED={int(v.swizzled)}",
            *(f"-D{name}={stride}u" for name, stride in strides.items()))  # fmt: skip


def _prefill(call: _Call) -> None:
    device, heads, batch = call.q.device, call.k.codes.shape[2], len(call.pages)
    of_request, tiles = call.row_tiles(_PREFILL_ROWS)
    key_tiles = blocks_for(call.most_keys, _PREFILL_KEYS)
    k_tiles, v_tiles = (
        torch.empty(batch * heads * key_tiles * _tile_bytes(part), dtype=torch.uint8, device=device)
        for part in (call.k, call.v)
    )
    parameters = [
        call.parameters(1, 0, of_request, merged=False),
        _PREFILL(k_tiles=k_tiles, v_tiles=v_tiles, key_tiles=key_tiles, row_tiles=tiles, lag=call.options.lag),
    ]
    flags = (*call.flags(), f"-DWEIGHTS_E4M3={int(call.options.weights == 'e4m3')}")
    # sizeof(PrefillShared): a tile of q, two stages, barriers up to the alignment of the struct; and this alignment.
    stages = 2 * (_tile_bytes(call.k) + _tile_bytes(call.v))
    shared = _PREFILL_ROWS * call.k.dim * 2 + stages + 2 * 1024 if device.type == "cuda" else 0
    launch("attention_prefill", f"attention_pack_{suffix(call.q.dtype)}", (key_tiles, heads, batch), (256,), parameters,
           device=device, extra_flags=flags)  # fmt: skip
    blocks = min(tiles * heads, multiprocessors(device))
    launch("attention_prefill", f"attention_prefill_{suffix(call.q.dtype)}", (blocks,), (384,), parameters,
           device=device, extra_flags=flags, shared_bytes=shared)  # fmt: skip


def _tile_bytes(part: Pages) -> int:
    """Bytes of 128 decoded keys or values of a head."""
    return _PREFILL_KEYS * part.dim * 2


def _path_of(q: torch.Tensor, k: Pages, v: Pages, pages: torch.Tensor) -> PathName:
    if q.device.type != "cuda" or not takes(k, v):
        return "portable"
    batch, heads, keys = len(pages), k.codes.shape[2], pages.shape[1] * k.codes.shape[1]
    fits = batch * heads * blocks_for(keys, _PREFILL_KEYS) * (_tile_bytes(k) + _tile_bytes(v)) <= _MOST_TILES
    many = q.shape[0] * q.shape[1] >= batch * heads * _FEWEST_ROWS
    return "prefill" if fits and many and takes(k, v, "prefill") else "decode"


def _check(options: Options, path: PathName, k: Pages, v: Pages) -> None:
    """Raises ValueError for a cache and for options not supported by the path."""
    if not takes(k, v, path):
        raise ValueError(
            f"the path {path!r} does not read a {k.format} with heads of {k.dim} and {v.dim} elements on "
            f"{k.codes.device}; leave the path out"
        )
    if path != "prefill" and (options.weights != "input" or options.lag):
        raise ValueError(
            f"weights {options.weights!r} and lag {options.lag:g} are options of the path 'prefill', not of {path!r}"
        )
    if options.lag < 0 or (options.lag and options.weights == "e4m3"):
        raise ValueError(
            f"lag {options.lag:g} with weights {options.weights!r}: a lag is at least 0, and 0 for e4m3, because 2⁸·p "
            "would exceed 448"
        )
    if path == "prefill" and options.splits not in (None, 1):
        raise ValueError(f"splits {options.splits}: the path 'prefill' has a single one; leave splits out")


def merge_attention(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, *, base: str = "e"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two sets of keys from that over each, (queries, q_heads, v_dim), and their log-sum-exps.

    `base` of these: "e" or "2". A log-sum-exp of +∞ counts as −∞: no key. Raises TypeError or ValueError for tensors of
    a wrong dtype or shape.
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


def takes(k: Pages, v: Pages, path: PathName = "decode") -> bool:
    """Whether a path reads the format, sizes and alignment of a cache, and the device has its instructions."""
    if path == "portable":
        return True
    if path == "prefill":
        device = k.codes.device
        hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)
        if not hopper or k.dim not in _PREFILL_DIMS[0] or v.dim not in _PREFILL_DIMS[1]:
            return False
    if k.format not in ("CACHE_FP8", "CACHE_NVFP4") or v.format != k.format or k.codes.shape[1] % _PAGE:
        return False
    for part in (k, v):
        if part.dim % _CHUNK or part.dim > _CHUNK * _MOST_CHUNKS or part.codes.dim() != 4 or part.codes.stride(3) != 1:
            return False
        page, *inner = part.codes.stride()[:3]
        if page > _LONGEST_STRIDE or any(stride % _ALIGNMENT for stride in (page, *inner)):
            return False
        if part.codes.data_ptr() % _ALIGNMENT or (part.scales is not None and not _has_scale_words(part)):
            return False
    return True


def _has_scale_words(part: Pages) -> bool:
    """Whether the block scales of a head lie in aligned words of four."""
    assert part.scales is not None
    strides = part.scales.stride()
    words = (strides[0], strides[2]) if part.swizzled else strides[:3]
    return (part.swizzled or strides[3] == 1) and not any(n % 4 for n in (*words, part.scales.data_ptr()))


def _resident(k: Pages, v: Pages, row_tiles: int) -> int:
    """Heads of the cache within the registers of a multiprocessor."""
    return 2 if max(k.dim, v.dim) > 128 else _RESIDENT[k.format, row_tiles]


def _blocks(heads: int, shared_bytes: int, most: int) -> tuple[int, int]:
    """Heads of the cache per block, and blocks of a multiprocessor at once: two or more, for as many
    heads as possible. `shared_bytes`: of a head. On an H200, 16 heads of q for a head of an NVFP4 cache take 165 µs
    with two blocks of two heads, and 241 µs with a block of four."""

    def resident(several: int) -> int:
        return min(most // several, _SHARED_MEMORY // (several * shared_bytes + _RESERVED))

    several = max(
        (n for n in _BLOCK_HEADS if heads % n == 0 and n <= most), key=lambda n: (n * resident(n), resident(n) > 1, n)
    )
    return several, max(1, resident(several))


def _splits(blocks: int, keys: int, resident: int, device: torch.device) -> int:
    return max(1, min(blocks_for(keys, 4 * _KEYS), multiprocessors(device) * resident // max(blocks, 1)))


def _shared_bytes(k: Pages, v: Pages, row_tiles: int) -> int:
    """sizeof(Shared)."""
    bytes_of_key = (k.dim + v.dim) * 9 // 16 if k.format == "CACHE_NVFP4" else k.dim + v.dim
    stages = _TILE_KEYS * _STAGES * _WARPS * bytes_of_key
    return max(stages, _WARPS * _ROW_TILE * row_tiles * (v.dim + 4 + 2) * 4)
