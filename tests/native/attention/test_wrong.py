"""Wrong kernels of caches and attention, each by one change of the source: the contracts refuse them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.causes.changes import changes
from narrowgauge.harness.operations.contracts.causes.moved import moved_changes
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.native.attention.attention import Options, PathName
from narrowgauge.native.runtime.sources import FOLDER, replaced
from narrowgauge.reference.contracts.evaluate import judged
from tests.harness.operations.contracts.attention_kernels import WRONG
from tests.harness.operations.contracts.cache.test_sound import NVFP4, stored
from tests.harness.operations.contracts.cache.test_sound import program as cache_program
from tests.harness.operations.contracts.test_attention import RECIPE, UNNAMED, gives
from tests.native.attention.test_attention import SIZES, WEIGHTS, inputs, program, results, wrong_parts
from tests.native.attention.test_cache import Native, sizes_of

pytestmark = pytest.mark.long

SHARED, PORTABLE, TENSOR, PREFILL = (
    f"attention/{name}" for name in ("attention.cuh", "attention.cu", "attention_tensor.cu", "attention_prefill.cu")
)
PATH_OF: dict[str, PathName] = {TENSOR: "decode", PREFILL: "prefill"}
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
    "codes-behind-the-end": (TENSOR, "key_of_value(t, row) < count);", "true);"),
    "mask-of-a-key-more": (TENSOR, "of_score >= seen.last ||", "of_score > seen.last ||"),
    "weights-not-transposed": (TENSOR, "ptx::movmatrix_m8n8_trans(rounded_pair", "(rounded_pair"),
    "maximum-of-a-lane": (
        TENSOR, "largest[r][i] = fmaxf(largest[r][i], __shfl_xor_sync(0xFFFFFFFFu, largest[r][i], distance));", "",
    ),
    "sums-of-one-row-not-rescaled": (TENSOR, "sum[2 + i] *= lower;", ""),
    "values-copied-for-the-lane-beside": (TENSOR, "value_place(4 * copied_column(g) + t)", "value_place(lane)"),
    "values-of-another-lane": (
        TENSOR, "load_words(part.v[i][piece][value_place(lane)]", "load_words(part.v[i][piece][lane]",
    ),
    "neighbouring-elements-of-q": (TENSOR, "4 * step + 2 * i + second", "4 * step + 2 * i + 1 - second"),
    "values-of-the-next-key": (TENSOR, "bytes_of(a, b, 0x5140)", "bytes_of(b, a, 0x5140)"),
    "warps-not-weighted": (TENSOR, "shared.merged.sums[w][of_tile][d] * lower", "shared.merged.sums[w][of_tile][d]"),
    "prefill: last-key-left-out": (PREFILL, "first + key >= length) return;", "first + key + 1 >= length) return;"),
    "prefill: mask-of-a-key-more": (PREFILL, "of_score >= rows.keys[half].last", "of_score > rows.keys[half].last"),
    "prefill: tiles-with-the-end-not-masked": (PREFILL, "key + KEYS > range.of_all.last", "key > range.of_all.last"),
    "prefill: sums-not-rescaled": (PREFILL, "sums[i] *= rows.lower[i / 2 % 2]", "sums[i] *= 1.0f"),
    "prefill: sums-rescaled-by-the-other-row": (PREFILL, "rows.lower[i / 2 % 2]", "rows.lower[1 - i / 2 % 2]"),
    "prefill: l-not-rescaled": (PREFILL, "rows.l[half] * rows.lower[half] + l", "rows.l[half] + l"),
    "prefill: l-of-a-lane": (PREFILL, "l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);", ""),
    "prefill: maximum-of-half-a-row": (
        PREFILL, "largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));", "",
    ),
    "prefill: values-of-the-tile-before": (PREFILL, "weights, shared.v[before]", "weights, shared.v[stage]"),
    "prefill: last-tile-of-values-left-out": (
        PREFILL, "multiply_values<T>(sums, weights, shared.v[done % STAGES]);", "",
    ),
    "prefill: second-half-of-values-of-the-first": (PREFILL, "weights[i], v[i], 0", "weights[i], v[0], 0"),
    "prefill: weights-of-the-other-half": (PREFILL, "weights[i], v[i], 0", "weights[1 - i], v[i], 0"),
    "prefill: q-of-the-other-warpgroup": (
        PREFILL, "multiply_keys<T>(s, shared.q[warpgroup]", "multiply_keys<T>(s, shared.q[0]",
    ),
    "prefill: offset-left-out": (PREFILL, "static_cast<int>(place % size), head}", "0, head}"),
    "prefill: pages-of-the-first-request": (PREFILL, "p.pages + static_cast<i64>(request) * p.most_pages", "p.pages"),
    "prefill: heads-of-q-in-another-order": (
        PREFILL, "(head * p.group + row % p.group) *", "(row % p.group * p.heads + head) *",
    ),
    "prefill: values-not-transposed-in-pairs": (
        PREFILL, "rounded_pair<T>(numbers[2 * i][j], numbers[2 * i + 1][j])",
        "rounded_pair<T>(numbers[2 * i + 1][j], numbers[2 * i][j])",
    ),
    "prefill: sign-of-a-negative-factor": (PREFILL, "factor == 0.0f ? 0x1p-126f : fabsf(factor)", "-fabsf(factor)"),
    "rows-of-the-tile-above": (
        TENSOR, "of_lane < rows ? of_lane % p.group : 0", "of_lane < rows ? (of_lane + 1) % p.group : 0",
    ),
}  # fmt: skip
NAMED_PREFILL = {
    # name: (words of the cause, sizes, family)
    "last-key-left-out": ("last token of a request is read as zeros", {}, "geometric"),
    "mask-of-a-key-more": ("rows see 1 more key, zeros", {}, "geometric"),
    "tiles-with-the-end-not-masked": ("all keys of their last tile of 128", {"most": 5, "pages": 12}, "geometric"),
    "sums-not-rescaled": ("not rescaled", {}, "geometric"),
    "l-not-rescaled": ("not rescaled", {}, "geometric"),
    "maximum-of-half-a-row": ("their half of each 8 keys", {"most": 5, "pages": 12}, "geometric"),
    "values-of-the-tile-before": ("values of the next tile", {}, "geometric"),
    "last-tile-of-values-left-out": ("values of the last tile of 128", {"dim": 192}, "equal"),
    "second-half-of-values-of-the-first": ("keys 64 to 127 of each 128", {}, "geometric"),
    "weights-of-the-other-half": ("keys 64 apart", {}, "geometric"),
    "q-of-the-other-warpgroup": ("rows 64 to 127 of each 128", {"dim": 192}, "geometric"),
    "offset-left-out": ("first slot of its page", {}, "geometric"),
    "pages-of-the-first-request": ("pages is that of", {}, "one-hot-ends"),
    "heads-of-q-in-another-order": ("2 apart", {"heads": 2}, "geometric"),
    "values-not-transposed-in-pairs": ("keys 1 apart", {}, "geometric"),
    "sign-of-a-negative-factor": ("other sign", {"queries": 2, "q_heads": 8, "most": 8, "pages": 18}, "normal"),
}
"""Wrong prefill kernels with a change of the contract that gives their results. The tile of keys has 128. No structured
input shows rows of q that are 64 apart if 16 patterns of logits repeat, as with 64 dimensions."""
UNNAMED_PREFILL = {
    "sums-rescaled-by-the-other-row": "a factor of each row and tile comes from the row 8 places away",
    "l-of-a-lane": "columns of a row have sums of different keys",
}
"""Wrong prefill kernels without such a change, by the reason."""
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
        "fp8-static-e4m3@vllm-kv", "nhd", WRITE, "v[i] * rest);", "v[i] * rest) * above;",
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
def test_wrong_attention_is_refused(name: str, tmp_path: PathName) -> None:
    file, text, replacement = WRONG_ATTENTION[name]
    with changed(file, text, replacement, tmp_path):
        assert any(_refused(family, PATH_OF.get(file, "portable")) for family in RULES)


def _refused(family: str, path: PathName) -> bool:
    given = inputs(family, "bfloat16", 75 if path == "prefill" else 3)  # rows of both warpgroups
    every = [Options(path=path, splits=splits) for splits in ((1,) if path == "prefill" else (1, 2))]
    return any(wrong_parts(given, results(given, "cpu", options), "bfloat16", p=WEIGHTS[path]) for options in every)


def test_nine_of_ten_wrong_kernels_are_named() -> None:
    """With the kernels of tests/harness/operations/contracts/attention_kernels.py."""
    prefill = {name.removeprefix("prefill: ") for name, (file, *_) in WRONG_ATTENTION.items() if file == PREFILL}
    assert prefill == NAMED_PREFILL.keys() | UNNAMED_PREFILL.keys()
    assert len(NAMED_PREFILL) + len(WRONG) - len(UNNAMED) >= 0.9 * (len(prefill) + len(WRONG))


@pytest.mark.parametrize("name", NAMED_PREFILL)
def test_a_single_change_gives_the_results_of_wrong_prefill(name: str, tmp_path: Path) -> None:
    words, sizes, family = NAMED_PREFILL[name]
    file, text, replacement = WRONG_ATTENTION[f"prefill: {name}"]
    given = contract_inputs(program("bfloat16"), {**SIZES, "queries": 34, "heads": 1, **sizes}, family, Draw("native"))
    if family == "normal":  # a row whose keys are a whole tile: a mask gives NaN
        given |= {part: given[part][1:] for part in ("q", "pages", "lengths", "q_lengths")}
    with changed(file, text, replacement, tmp_path):
        shown = results(given, "cpu", Options(path="prefill"))
    steps = program("bfloat16", recipe=RECIPE, l="exact", exponential="accurate", p="input")
    assert not any(bool(result.isnan().any()) for result in shown.values())
    assert any(bool(part.wrong.any()) for _, part in judged(steps, given, shown))
    every = itertools.chain(changes(steps), moved_changes(steps, given, shown))
    assert any(words in change.sentence and gives(change.program, given, shown) for change in every)


@pytest.mark.parametrize("name", WRONG_WRITES)
def test_wrong_writes_are_refused(name: str, tmp_path: PathName) -> None:
    recipe, layout, file, text, replacement = WRONG_WRITES[name]
    steps, sizes = cache_program("kv-write", recipe), sizes_of(recipe, layout)  # type: ignore[arg-type]
    wrong = []
    with changed(file, text, replacement, tmp_path):
        for family in ("normal", "position", "subnormal"):
            tensors = contract_inputs(steps, sizes, family, Draw("wrong"))
            found = stored(steps, tensors, Native("cpu"), layout)  # type: ignore[arg-type]
            wrong += [part for part, judgement in judged(steps, tensors, found) if bool(judgement.wrong.any())]
    assert wrong
