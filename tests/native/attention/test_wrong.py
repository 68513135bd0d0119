"""Wrong kernels of caches and attention, each by one change of the source: the contracts refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.contracts.attention import SCALE
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.native.attention.attention import Options, attend
from narrowgauge.native.attention.cache import pages_of
from narrowgauge.native.runtime.sources import FOLDER, replaced
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.kv_cache import HALVES, Cache
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.cache.test_sound import NVFP4, stored
from tests.harness.operations.contracts.cache.test_sound import program as cache_program
from tests.harness.operations.contracts.test_attention import RECIPE, program
from tests.native.attention.test_attention import inputs
from tests.native.attention.test_cache import Native, sizes_of

pytestmark = pytest.mark.long

SHARED, PORTABLE, TENSOR = (f"attention/{name}" for name in ("attention.cuh", "attention.cu", "attention_tensor.cu"))
WRITE, CACHE = "attention/kv_write.cu", "attention/cache.cuh"
WRONG_ATTENTION = {
    # name: (file, text, its replacement)
    "a-key-fewer": (SHARED, "request.keys - request.count + i + 1", "request.keys - request.count + i"),
    "causal-from-the-first-key": (SHARED, "p.causal ? request.keys - request.count + i + 1", "p.causal ? i + 1"),
    "k-scale-left-out": (SHARED, " * number_or_one(p.k_scale, scale_index(p, head))", ""),
    "v-scale-left-out": (SHARED, "number_or_one(p.v_scale, scale_index(p, head / p.group)) / l", "1.0f / l"),
    "v-scale-of-k": (SHARED, "number_or_one(p.v_scale,", "number_or_one(p.k_scale,"),
    "not-divided-by-l": (SHARED, "scale_index(p, head / p.group)) / l", "scale_index(p, head / p.group))"),
    "exp-in-place-of-exp2": (SHARED, "? scale : scale * LOG2_E", "? scale : scale"),
    "lse-of-base-2": (SHARED, "(m + log2_approx(l)) * LN_2", "m + log2_approx(l)"),
    "heads-in-another-order": (PORTABLE, "head = of_token / p.group", "head = of_token % p.heads"),
    "pages-of-the-first-request": (PORTABLE, "p.pages[b * p.most_pages + key", "p.pages[key"),
    "offset-left-out": (PORTABLE, "key % p.k.page_size, head}", "0, head}"),
    "sums-not-rescaled": (PORTABLE, "sums[d] *= lower;", "sums[d] *= 1.0f;"),
    "l-not-rescaled": (PORTABLE, "l *= lower;", "l *= 1.0f;"),
    "last-key-of-a-split-left-out": (
        PORTABLE, "(keys.last < end ? keys.last : end)", "(keys.last < end ? keys.last : end - 1)",
    ),
    "splits-not-weighted": (
        PORTABLE, " * exp2_approx(p.maxima[2 * (split * all + row)] - largest)", "",
    ),
    "splits-with-unweighted-l": (PORTABLE, "of_split[1] * exp2_approx(of_split[0] - largest)", "of_split[1]"),
    "codes-behind-the-end": (TENSOR, "key_of_value(t, i) < count);", "true);"),
    "mask-of-a-key-more": (TENSOR, "of_score >= keys[half].last ||", "of_score > keys[half].last ||"),
    "values-of-another-lane": (
        TENSOR, "load_words(part.v[i][piece][value_place(lane)]", "load_words(part.v[i][piece][lane]",
    ),
    "neighbouring-elements-of-q": (TENSOR, "4 * step + 2 * i + second", "4 * step + 2 * i + 1 - second"),
    "values-of-the-next-key": (TENSOR, "bytes_of(a, b, 0x5140)", "bytes_of(b, a, 0x5140)"),
    "warps-not-weighted": (TENSOR, "shared.merged.sums[w][of_tile][d] * lower", "shared.merged.sums[w][of_tile][d]"),
    "rows-of-the-tile-above": (TENSOR, "row < rows ? row % p.group : 0", "row < rows ? (row + 1) % p.group : 0"),
}  # fmt: skip
WRONG_WRITES = {
    # name: (recipe, page layout, file, text, its replacement)
    "negative-slots-are-0": (
        RECIPE, "nhd", WRITE, "chunk.slot = p.slots[chunk.token];",
        "chunk.slot = p.slots[chunk.token] < 0 ? 0 : p.slots[chunk.token];",
    ),
    "scale-of-the-first-head": (RECIPE, "hnd", WRITE, "p.scale_of_heads ? chunk.head : 0", "0"),
    "page-and-offset-exchanged": (
        RECIPE, "nhd", CACHE,
        "return {static_cast<u32>(slot) / size, static_cast<int>(static_cast<u32>(slot) % size), head};",
        "return {static_cast<u32>(slot) % size % 4, static_cast<int>(static_cast<u32>(slot) / size), head};",
    ),
    "scale-is-inverted": (
        RECIPE, "nhd", WRITE, "TIMES_RECIPROCAL ? 1.0f / scale : scale", "TIMES_RECIPROCAL ? scale : scale",
    ),
    "pieces-of-the-row-next-to-each-other": (
        RECIPE, "x-packed", CACHE, "byte / part.chunk * part.chunk_stride", "byte / part.chunk * part.chunk",
    ),
    "divided-twice": (
        "fp8-static-e4m3@vllm-kv", "nhd", WRITE, "divide(v, scale);", "divide(v, scale), divide(v, scale);",
    ),
    "scale-by-440": ("fp8-row-e4m3@vllm-kv", "nhd", WRITE, "raised * (1.0f / 448.0f)", "raised * (1.0f / 440.0f)"),
    "amax-of-a-part-of-the-row": (
        "fp8-row-e4m3@vllm-kv", "nhd", WRITE, "apart < static_cast<int>(CHUNKS)",
        "apart < static_cast<int>(CHUNKS) / 2",
    ),
    "scales-of-values-in-another-order": (
        NVFP4, "nvfp4-page", CACHE, "((offset / 4 * 4 + block / quarter) * quarter + block % quarter)",
        "((offset / 4 * 4 + block % 4) * quarter + block / 4)",
    ),
    "scales-of-values-in-rows": (NVFP4, "nvfp4-page", CACHE, "if (part.swizzled) return", "if (false) return"),
    "nibbles-exchanged": (NVFP4, "nhd", WRITE, "code << i % 8 * 4", "code << (i % 8 ^ 1) * 4"),
    "no-smallest-scale": (NVFP4, "nhd", WRITE, "unrounded < 0x1p-6f ? 0x1p-6f : unrounded", "unrounded"),
}  # fmt: skip


def changed(file: str, text: str, replacement: str, folder: Path) -> Any:
    source = (FOLDER / file).read_text(encoding="utf-8")
    assert source.count(text) >= 1, text
    return replaced(file, source.replace(text, replacement), folder)


@pytest.mark.parametrize("name", WRONG_ATTENTION)
def test_wrong_attention_is_refused(name: str, tmp_path: Path) -> None:
    file, text, replacement = WRONG_ATTENTION[name]
    with changed(file, text, replacement, tmp_path):
        assert any(_refused(family, PATH_OF.get(file, "portable")) for family in RULES)


def _refused(family: str, path: Path) -> bool:
    given = inputs(family, "bfloat16")
    held = Cache(given["cache.keys"], given["cache.values"], None, None, find_recipe(RECIPE), "nhd", 16)
    k, v = (pages_of(held, held.recipe, half) for half in HALVES)
    starts = torch.nn.functional.pad(given["q_lengths"].cumsum(0), (1, 0)).int()
    for splits in (1,) if path == "prefill" else (1, 2):
        found = attend(
            given["q"], k, v, given["pages"].int(), given["lengths"].int(), starts=starts, scale=SCALE,
            k_scale=given["k_scale"], v_scale=given["v_scale"],
            options=Options(path=path, splits=splits),
        )  # fmt: skip
        results = dict(zip(("output", "lse"), found, strict=True))
        if any(bool(judgement.wrong.any()) for _, judgement in judged(program(), given, results)):
            return True
    return False


@pytest.mark.parametrize("name", WRONG_WRITES)
def test_wrong_writes_are_refused(name: str, tmp_path: Path) -> None:
    recipe, layout, file, text, replacement = WRONG_WRITES[name]
    steps, sizes = cache_program("kv-write", recipe), sizes_of(recipe, layout)  # type: ignore[arg-type]
    wrong = []
    with changed(file, text, replacement, tmp_path):
        for family in ("normal", "position", "subnormal"):
            tensors = contract_inputs(steps, sizes, family, Draw("wrong"))
            found = stored(steps, tensors, Native("cpu"), layout)  # type: ignore[arg-type]
            wrong += [part for part, judgement in judged(steps, tensors, found) if bool(judgement.wrong.any())]
    assert wrong
