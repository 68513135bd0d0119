"""Attention kernels over a paged cache, judged by the contract and by sums in float64."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, get_args

import pytest
import torch

from narrowgauge.contracts.attention import SCALE
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.native.attention.attention import Options, PathName, attend, merge_attention, takes
from narrowgauge.native.attention.cache import Pages, pages_of
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.kv_cache import HALVES, Cache
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.cache.test_sound import NVFP4
from tests.harness.operations.contracts.test_attention import RECIPE, program
from tests.native.devices import ON_EVERY_DEVICE

BF16, FP16 = torch.bfloat16, torch.float16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PATHS = get_args(PathName)
Result = tuple[torch.Tensor, torch.Tensor]
TOKENS = "fp8-row-e4m3@vllm-kv"
SIZES = {
    "queries": 3, "q_heads": 4, "dim": 64, "pages": 20, "page": 16, "heads": 2, "v_dim": 64, "requests": 2, "most": 9,
}  # fmt: skip
"""Of two heads, and of more keys than one split has."""


@cache
def inputs(family: str, dtype: str, rows: int = SIZES["queries"]) -> dict[str, torch.Tensor]:
    return contract_inputs(program(dtype), {**SIZES, "queries": rows}, family, Draw("native"))


def on(device: Any, *tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def results(
    given: dict[str, torch.Tensor], device: str, options: Options, recipe: str = RECIPE
) -> dict[str, torch.Tensor]:
    """Of a path, on inputs of the contract."""
    names = ("q", "pages", "lengths", "q_lengths", "k_scale", "v_scale")
    q, pages, lengths, counts, k_scale, v_scale = on(device, *(given.get(name) for name in names))
    parts = ("keys", "values", "key_scales", "value_scales")
    held = Cache(*on(device, *(given.get(f"cache.{part}") for part in parts)), find_recipe(recipe), "nhd", 16)
    k, v = (pages_of(held, held.recipe, half) for half in HALVES)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    found = attend(q, k, v, pages.int(), lengths.int(), starts=starts, scale=SCALE, k_scale=k_scale, v_scale=v_scale,
                   options=options)  # fmt: skip
    return dict(zip(("output", "lse"), on("cpu", *found), strict=True))


def wrong_parts(
    given: dict[str, torch.Tensor], found: dict[str, torch.Tensor], dtype: str, recipe: str = RECIPE, **fields: str
) -> list[str]:
    """Results that the contract with these fields refuses. With declared weights the contract judges every family."""
    steps = program(dtype, recipe=recipe, l="exact", exponential="accurate", **fields)
    return [part for part, judgement in judged(steps, given, found) if bool(judgement.wrong.any())]


WEIGHTS = {"portable": "float32", "decode": "float16", "prefill": "input"}
"""Dtype of the weights of each path."""


@pytest.mark.sampled(30)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", RULES)
def test_contract(family: str, path: PathName, dtype: str, device: str) -> None:
    given = inputs(family, dtype)
    for splits in (1,) if path == "prefill" else (1, 2):
        found = results(given, device, Options(path=path, splits=splits))
        assert not wrong_parts(given, found, dtype, p=WEIGHTS[path]), splits


@pytest.mark.sampled(8)
@ON_EVERY_DEVICE
@pytest.mark.parametrize(
    ("recipe", "path"), [("mxfp8-e4m3", "portable"), (TOKENS, "portable"), *((NVFP4, path) for path in PATHS)]
)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "one-hot-ends" else pytest.mark.long) for name in RULES]
)
def test_recipes_with_scales_of_blocks(family: str, recipe: str, path: PathName, device: str) -> None:
    steps = program("bfloat16", recipe=recipe, p=WEIGHTS[path])
    given = contract_inputs(steps, SIZES, family, Draw("blocks"))
    found = results(given, device, Options(path=path), recipe)
    assert not wrong_parts(given, found, "bfloat16", recipe, p=WEIGHTS[path])
    judgement = dict(judged(program("bfloat16", recipe=recipe), given, found))["output"]
    if family not in ("normal", "pinned"):
        assert judgement.determined >= 0.75 * judgement.actual.numel()  # as of FP8


BORDERS = [
    # (rows, tokens of a page, pages of a request): keys at, below and above the borders of tiles
    pytest.param(*shape, marks=() if shape in ((15, 16, 5), (33, 16, 9)) else pytest.mark.long)
    for shape in [(rows, 16, most) for rows in (15, 16, 17, 31, 33) for most in (2, 5, 8, 9)]
    + [(129, 16, 16), (64, 64, 3)]
]
"""With 4 heads of q for a head of the cache, 15 to 17 and 31 to 33 rows are at the borders of 64 and of 128."""


@pytest.mark.sampled(4)
@ON_EVERY_DEVICE
@pytest.mark.parametrize(("rows", "page", "most"), BORDERS)
def test_borders_of_the_tiles_of_prefill(rows: int, page: int, most: int, device: str) -> None:
    """Requests end 3, 0, page - 1, page and 1 keys before the end of their last page."""
    sizes = {**SIZES, "queries": rows, "heads": 1, "requests": 5, "page": page, "most": most, "pages": 5 * most}
    for family in ("one-hot-ends", "geometric"):
        given = contract_inputs(program("bfloat16"), sizes, family, Draw("borders"))
        for weights, lag, p in (("input", 0.0, "input"), ("input", 8.0, "input"), ("e4m3", 0.0, "e4m3")):
            found = results(given, device, Options(path="prefill", weights=weights, lag=lag))  # type: ignore[arg-type]
            assert not wrong_parts(given, found, "bfloat16", p=p), (family, weights, lag)


@ON_EVERY_DEVICE
def test_a_row_of_prefill_depends_on_no_other_row_or_page(device: str) -> None:
    """Bytes of the rows alone, of pages in another order, and beside further requests."""
    given = contract_inputs(program("bfloat16"), {**SIZES, "queries": 19}, "normal", Draw("rows"))
    options = Options(path="prefill")
    whole, (first, second) = results(given, device, options), given["q_lengths"].tolist()
    order = torch.arange(len(given["cache.keys"])).flip(0)
    turned = {**given, "pages": (len(order) - 1) - given["pages"]}
    turned |= {name: given[name][order] for name in ("cache.keys", "cache.values")}
    last = {**given, **{name: given[name][1:] for name in ("pages", "lengths", "q_lengths")}, "q": given["q"][first:]}
    row = {**last, "q": last["q"][-1:], "q_lengths": torch.ones(1, dtype=torch.int64)}
    for name in ("output", "lse"):
        assert torch.equal(results(turned, device, options)[name], whole[name])
        assert torch.equal(results(last, device, options)[name], whole[name][first:])
        assert torch.equal(results(row, device, options)[name], whole[name][-1:])
    assert second


def cache_of(
    name: str, used: torch.Tensor, heads: int, dim: int, seed: int
) -> tuple[Pages, torch.Tensor]:  # fmt: skip
    """Pages of a format, and their numbers in float64. `used` (pages, page): cells that are not hold NaN."""
    (pages, page), unused = used.shape, ~used
    draw = torch.Generator().manual_seed(seed)
    if name == "CACHE_FP8":
        codes = torch.randn(pages, page, heads, dim, generator=draw).to(torch.float8_e4m3fn)
        codes.view(torch.uint8)[unused] = 0x7F
        return Pages(codes.view(torch.uint8), None, name), codes.double()
    codes = torch.randint(0, 256, (pages, page, heads, dim // 2), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(pages, page, heads, dim // 16, generator=draw) + 0.25).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[unused] = 0x7F
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    numbers = torch.where(nibbles > 7, -1.0, 1.0) * E2M1[nibbles % 8] * scales.double().repeat_interleave(16, -1)
    if name == "swizzled":  # digits T, s, r, t of the layout kv-v-swizzled
        columns = dim // 16
        digits = scales.permute(0, 2, 1, 3).reshape(pages, heads, page // 4, 4, 4, columns // 4)
        packed = digits.permute(0, 1, 2, 4, 5, 3).reshape(pages, heads, page, columns)
        return Pages(codes, packed.permute(0, 2, 1, 3).view(torch.uint8), "CACHE_NVFP4", True), numbers
    return Pages(codes, scales.view(torch.uint8), name), numbers


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: list[int], counts: list[int],
    scale: float, causal: bool, options: Options,
) -> Result:  # fmt: skip
    """Attention in float64, row by row."""
    group, page = q.shape[1] // k.shape[2], k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    row = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        places = torch.arange(length)
        pages = table[request][places // page].long()
        keys, values = (x[pages, places % page].repeat_interleave(group, 1) for x in (k, v))
        for query in range(count):
            last = length - count + query + 1 if causal else length
            first = max(0, last - options.window) if options.window else 0
            s = torch.einsum("hd,khd->hk", q[row].double(), keys[first:last]) * scale
            s = options.softcap * torch.tanh(s / options.softcap) if options.softcap else s
            if options.sinks is not None:
                s = torch.cat([s, options.sinks.double()[:, None]], 1)
            if s.shape[1]:
                lse[row] = torch.logsumexp(s, 1)
                weights = torch.softmax(s, 1)[:, : last - first]
                out[row] = torch.einsum("hk,khd->hd", weights, values[first:last])
            row += 1
    return out, lse


SINKS = torch.linspace(-1, 1, 16)
SHAPES = {
    # name: (format of k, of v, dims, heads, group, page, lengths, rows of requests, causal, options)
    "decode": ("CACHE_FP8", "CACHE_FP8", (64, 64), 2, 4, 16, [37, 5, 128], [1, 1, 1], True, Options()),
    "group 8": ("CACHE_FP8", "CACHE_FP8", (128, 128), 2, 8, 64, [65, 64], [1, 1], True, Options()),
    "group 1": ("CACHE_FP8", "CACHE_FP8", (64, 128), 3, 1, 16, [1, 33], [1, 1], True, Options()),
    "group 16": ("CACHE_FP8", "CACHE_FP8", (128, 64), 1, 16, 16, [40], [2], True, Options()),
    "prefill": ("CACHE_FP8", "CACHE_FP8", (64, 64), 1, 3, 32, [40, 17, 3], [40, 0, 3], True, Options()),
    "ragged window": ("CACHE_FP8", "CACHE_FP8", (64, 64), 2, 2, 16, [70, 33], [5, 2], True, Options(window=20)),
    "no mask": ("CACHE_FP8", "CACHE_FP8", (64, 64), 1, 2, 16, [70, 33], [3, 2], False, Options(splits=2)),
    "sinks": ("CACHE_FP8", "CACHE_FP8", (64, 64), 2, 4, 16, [70, 1], [1, 1], True, Options(sinks=SINKS[:8])),
    "sinks, splits": (
        "CACHE_FP8", "CACHE_FP8", (64, 64), 1, 4, 16, [150], [1], True, Options(sinks=SINKS[:4], splits=2),
    ),
    "softcap": ("CACHE_FP8", "CACHE_FP8", (64, 64), 2, 2, 16, [50, 20], [1, 1], True, Options(softcap=2.0)),
    "no keys": ("CACHE_FP8", "CACHE_FP8", (64, 64), 1, 2, 16, [0, 9], [1, 1], True, Options()),
    "dims 192 and 256": ("CACHE_FP8", "CACHE_FP8", (192, 256), 1, 4, 16, [50], [1], True, Options()),
    "nvfp4": ("CACHE_NVFP4", "CACHE_NVFP4", (128, 128), 2, 4, 16, [37, 5, 70], [1, 1, 2], True, Options()),
    "nvfp4, swizzled": ("CACHE_NVFP4", "swizzled", (128, 128), 2, 3, 16, [70, 33], [3, 2], True, Options(splits=2)),
    "nvfp4, 64 and 128": ("CACHE_NVFP4", "swizzled", (64, 128), 1, 3, 16, [70, 33], [3, 2], True, Options()),
    "nvfp4, 64": ("CACHE_NVFP4", "CACHE_NVFP4", (128, 64), 1, 8, 32, [70, 33], [3, 0], False, Options()),
    "nvfp4, 192": ("CACHE_NVFP4", "swizzled", (192, 192), 1, 2, 16, [33], [1], True, Options()),
}  # fmt: skip
"""Cases of kernels with tensor cores and without."""
SLOW = ("nvfp4, 64 and 128", "group 1", "dims 192 and 256", "nvfp4, 192", "group 16", "nvfp4, 64", "group 8")


@pytest.mark.sampled(55)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in SHAPES]
)
def test_sums_in_float64(name: str, path: PathName, dtype: torch.dtype, device: str) -> None:
    k_format, v_format, (k_dim, v_dim), heads, group, page, lengths, counts, causal, options = SHAPES[name]
    most = max(1, *(-(-length // page) for length in lengths))
    draw = torch.Generator().manual_seed(3)
    table = torch.randperm(len(lengths) * most, generator=draw).reshape(-1, most).int()
    used = torch.zeros(len(lengths) * most, page, dtype=torch.bool)
    used[table.long()] = (torch.arange(most * page) < torch.tensor(lengths)[:, None]).view(-1, most, page)
    k, k_numbers = cache_of(k_format, used, heads, k_dim, 1)
    v, v_numbers = cache_of(v_format, used, heads, v_dim, 2)
    q = torch.randn(sum(counts), heads * group, k_dim, generator=draw).to(dtype)
    starts = None if len(set(counts)) == 1 else torch.tensor([0, *counts]).cumsum(0).int()
    k, v = (Pages(*on(device, part.codes, part.scales), part.format, part.swizzled) for part in (k, v))
    if not takes(k, v, path):
        assert path == "prefill"
        assert v_dim > 128
        pytest.skip("the path has no such heads")
    splits = None if path == "prefill" else options.splits
    chosen = Options(options.window, options.softcap, *on(device, options.sinks), splits=splits, path=path)
    at = on(device, q, table, torch.tensor(lengths).int(), starts)
    found = attend(at[0], k, v, at[1], at[2], starts=at[3], scale=k_dim**-0.5, causal=causal, options=chosen)
    right = expected(q, k_numbers, v_numbers, table, lengths, counts, k_dim**-0.5, causal, options)
    out, lse = on("cpu", *found)
    # A weight of float16 is off by 2^-11, the result by half an ulp; a wrong key or element is off by far more.
    assert (out.double() - right[0]).abs().max() <= 2.0**-7 * right[0].abs().max()
    assert (lse - right[1]).nan_to_num(0.0).abs().max() <= 1e-5
    assert (lse.isinf() == right[1].isinf()).all()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("path", PATHS)
def test_pages_before_a_window_are_not_read(path: PathName, device: str) -> None:
    """Three rows of 300 keys see the last 20 to 22: the numbers of 17 pages are out of range."""
    used = torch.zeros(20, 16, dtype=torch.bool)
    used.view(-1)[272:300] = True
    (k, numbers), (v, values) = (cache_of("CACHE_FP8", used, 1, 64, seed) for seed in (1, 2))
    q = torch.randn(3, 4, 64, dtype=BF16, generator=torch.Generator().manual_seed(1))
    table, lengths = torch.arange(20).int().view(1, -1), torch.tensor([300]).int()
    right = expected(q, numbers, values, table, [300], [3], 0.125, True, Options(window=20))
    table[0, :17] = 1 << 30
    pages = [Pages(part.codes.to(device), None, part.format) for part in (k, v)]
    found = attend(*on(device, q), *pages, *on(device, table, lengths), starts=None, scale=0.125,
                   options=Options(window=20, path=path))  # fmt: skip
    out, lse = on("cpu", *found)
    assert (out.double() - right[0]).abs().max() <= 2.0**-7 * right[0].abs().max()
    assert (lse - right[1]).abs().max() <= 1e-5


@ON_EVERY_DEVICE
def test_codes_of_a_result(device: str) -> None:
    k, _ = cache_of("CACHE_FP8", torch.ones(2, 16, dtype=torch.bool), 1, 64, 1)
    q = torch.randn(1, 4, 64, dtype=BF16, generator=torch.Generator().manual_seed(1))
    table, length, scale = torch.tensor([[0, 1]]).int(), torch.tensor([25]).int(), torch.tensor([0.125])
    pages = Pages(k.codes.to(device), None, k.format)
    for path in PATHS:
        plain, codes = (
            attend(*on(device, q), pages, pages, *on(device, table, length), starts=None, scale=0.125,
                   options=Options(out_scale=out_scale, path=path))[0].cpu()
            for out_scale in (None, scale.to(device))
        )  # fmt: skip
        numbers = codes.view(torch.float8_e4m3fn).float() * 0.125
        assert ((numbers - plain.float()).abs() <= 2.0**-4 * plain.float().abs() + 2.0**-10).all()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_merge_of_two_sets_of_keys(dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randn(3, 2, 48, generator=draw).to(dtype) for _ in range(2))
    lse_a, lse_b = torch.randn(3, 2, generator=draw), torch.randn(3, 2, generator=draw)
    lse_a[0, 0], lse_b[0, 1], lse_a[2, 1], lse_b[2, 1] = -math.inf, math.inf, -math.inf, math.inf
    out, lse = on("cpu", *merge_attention(*on(device, a, lse_a, b, lse_b)))
    usable = torch.stack([lse_a, lse_b]).double()
    usable[usable == math.inf] = -math.inf
    right = torch.logsumexp(usable, 0)
    weights = (usable - right).exp().nan_to_num(0.0)[..., None]
    merged = weights[0] * a.double() + weights[1] * b.double()
    assert (out.double() - merged).abs().max() <= 2.0**-7 * merged.abs().max()
    assert (lse - right).nan_to_num(0.0).abs().max() <= 1e-5
    assert lse[2, 1] == -math.inf
    assert torch.equal(out[0, 0], b[0, 0])
    assert torch.equal(out[0, 1], a[0, 1])


@pytest.mark.parametrize(
    ("dim", "options", "words"),
    [
        (64, {"path": "decode", "lag": 8.0}, ("lag 8", "'prefill'", "'decode'")),
        (64, {"weights": "e4m3", "path": "portable"}, ("'e4m3'", "'prefill'")),
        (64, {"path": "prefill", "weights": "e4m3", "lag": 8.0}, ("lag 8", "'e4m3'", "448")),
        (64, {"path": "prefill", "lag": -1.0}, ("lag -1", "at least 0")),
        (64, {"path": "prefill", "splits": 2}, ("splits 2", "leave splits out")),
        (256, {"path": "prefill"}, ("'prefill'", "256", "leave the path out")),
    ],
)
def test_options_that_a_path_does_not_have(dim: int, options: dict[str, Any], words: tuple[str, ...]) -> None:
    k, _ = cache_of("CACHE_FP8", torch.ones(2, 16, dtype=torch.bool), 1, dim, 1)
    table, length = torch.tensor([[0, 1]]).int(), torch.tensor([25]).int()
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        attend(torch.zeros(1, 4, dim), k, k, table, length, starts=None, scale=0.125, options=Options(**options))
    assert all(word in str(error.value) for word in words)


def test_a_cache_that_tensor_cores_do_not_take() -> None:
    k, _ = cache_of("CACHE_FP8", torch.ones(2, 16, dtype=torch.bool), 1, 64, 1)
    assert not takes(k, Pages(k.codes[..., :48], None, k.format))
    assert not takes(Pages(k.codes[:, :8], None, k.format), k)
    assert not takes(Pages(k.codes.view(torch.int16).view(torch.uint8)[..., ::2], None, k.format), k)
    assert not takes(k, Pages(k.codes, k.codes, "CACHE_MXFP8"))
