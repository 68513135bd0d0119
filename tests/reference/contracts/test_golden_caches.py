"""Recorded bytes of kernels that store rows in a cache on an H200 lie inside their dialects, and outside of wrong ones.

tests/golden/serving/README.md says where the vectors come from.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from narrowgauge.contracts import CONTRACTS
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, slots_of
from tests.reference.contracts.golden_serving import Vector, vectors

TYPES = {"cache": "half", "slots": "int64", "pages": "int64", "lengths": "int64", "k_scale": "float32",
         "v_scale": "float32"}  # fmt: skip
STATIC, ROW = "fp8-static-e4m3", "fp8-row-e4m3"
FILES: Mapping[str, Mapping[str, str]] = {
    "vllm_reshape_and_cache": {"given": f"{STATIC}@vllm-kv"},
    "vllm_triton_reshape_and_cache": {"given": f"{STATIC}@vllm-triton-kv", "own": f"{ROW}@vllm-kv"},
    "conch_reshape_and_cache": {"given": f"{STATIC}@conch-kv"},
}
"""Recipes of the vectors of a file with given scales, and with scales of their own."""
APPROXIMATE = {f"{STATIC}@vllm-triton-kv", f"{STATIC}@conch-kv", f"{STATIC}@flashinfer"}
"""A product with an approximate reciprocal, whose codes the quotient has too; NaN has the code 0x7F."""
INDISTINGUISHABLE: Mapping[str, set[str]] = {
    f"{STATIC}@vllm-kv": {f"{STATIC}@torchao-affine", *APPROXIMATE},
    f"{STATIC}@vllm-triton-kv": APPROXIMATE - {f"{STATIC}@vllm-triton-kv"},
    f"{STATIC}@conch-kv": APPROXIMATE - {f"{STATIC}@conch-kv"},
    f"{ROW}@vllm-kv": set(),
}
"""Dialects with the same bytes as the own dialect."""
POISON = 0x55
"""Byte of the caches before the kernel, and -7 of scales."""


def wrong(vector: Vector, recipe: str) -> int:
    """Bytes that the contract does not accept."""
    t, layout = vector["tensors"], PAGE_LAYOUTS[vector["layout"].lower()]
    after = {"cache.keys": layout.logical(t["k_cache"], "keys"), "cache.values": layout.logical(t["v_cache"], "values")}
    if "k_scales" in t:
        after |= {f"cache.{half}_scales": t[f"{half[0]}_scales"].unsqueeze(-1) for half in ("key", "value")}
    before = {name: torch.full_like(part, POISON if part.dtype == torch.uint8 else -7) for name, part in after.items()}
    dtype = str(t["k"].dtype).removeprefix("torch.")
    contract = CONTRACTS["kv-write"]
    program = contract.trace({name: TYPES.get(name, dtype) for name in contract.tensors}, {"recipe": recipe}, {})
    given = {"k": t["k"].flatten(0, 1), "v": t["v"].flatten(0, 1), "slots": t["slots"], **before}
    given |= {name: t[name] for name in ("k_scale", "v_scale") if name in program.used}
    stored = {
        half: Stored({part: after[name] for part, name in (("codes", f"cache.{half}"),
                      ("scales", f"cache.{half.removesuffix('s')}_scales")) if name in after})
        for half in ("keys", "values")
    }  # fmt: skip
    return sum(int(part.wrong.count_nonzero()) for _, part in judged(program, given, stored))


def all_of(name: str) -> list[tuple[Vector, str]]:
    return [(vector, "own" if "k_scales" in vector["tensors"] else "given") for vector in vectors(name)]


@pytest.mark.parametrize("name", FILES)
def test_recorded_caches_lie_in_their_dialects(name: str) -> None:
    found = [wrong(vector, FILES[name][kind]) for vector, kind in all_of(name)]
    assert found == [0] * len(found)
    assert len(found) >= 7


DIALECTS = {"given": ("te", "torchao-affine", "vllm", "vllm-static", "vllm-kv", "vllm-triton-kv", "conch-kv",
                      "flashinfer", "flashinfer-cuda"),
            "own": ("te", "torchao-affine", "vllm-row", "sglang-row", "humming", "vllm", "vllm-kv")}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_other_dialect_is_refused_or_named(name: str) -> None:
    for kind, recipe in FILES[name].items():
        family, _, own = recipe.partition("@")
        some = [vector for vector, of in all_of(name) if of == kind]
        others = {d: f"{family}@{d}" if d != "te" else family for d in DIALECTS[kind] if d != own}
        fits = {other for other in others.values() if not any(wrong(vector, other) for vector in some)}
        assert fits == INDISTINGUISHABLE[recipe], recipe


def test_a_recorded_append_is_a_copy_to_the_slots_of_its_pages() -> None:
    (vector,) = vectors("flashinfer_append_paged_kv_cache")
    t, page = vector["tensors"], vector["page"]
    first = t["kv_indptr"].long()
    lengths = torch.tensor(vector["lens"])
    pages = torch.full((len(lengths), int(first.diff().max())), 0)
    for request in range(len(lengths)):
        own = t["kv_indices"][first[request] : first[request + 1]]
        pages[request, : len(own)] = own.long()
    slots = slots_of(pages, lengths, page)
    for half, rows in (("k_cache", t["k"]), ("v_cache", t["v"])):
        expected = torch.full_like(t[half], POISON)
        expected.flatten(0, 1)[slots] = rows
        assert torch.equal(t[half], expected)


def test_a_recorded_nvfp4_cache_is_read_by_its_two_scales() -> None:
    """R((e2m1·sf)·s), exactly; without a changed order of the rounding of the scales the result is unique."""
    contract = CONTRACTS["kv-read"]
    seen = [vector for vector in vectors("flashinfer_nvfp4_kv_dequantize") if "lens" in vector]
    for vector in seen:
        t, layout = vector["tensors"], PAGE_LAYOUTS[vector["layout"].lower()]
        dtype, lengths = vector["dtype"].removeprefix("torch."), torch.tensor(vector["lens"])
        options = {"dtype": dtype}
        program = contract.trace(
            {name: TYPES.get(name, dtype) for name in contract.tensors}, {"recipe": "nvfp4@torchao-one-level"}, options
        )
        given = {"pages": t["block_table"].long(), "lengths": lengths, "k_scale": t["k_scale"], "v_scale": t["v_scale"]}
        for half, name in (("k", "key"), ("v", "value")):
            given[f"cache.{name}s"] = layout.logical(t[f"{half}_codes"], f"{name}s")
            given[f"cache.{name}_scales"] = layout.logical(t[f"{half}_block_scales"], f"{name}_scales")
        shown = {}
        for half in ("k", "v"):
            rows = [t[f"out_{half}"][request, :length] for request, length in enumerate(lengths.tolist())]
            shown[half] = torch.cat(rows).flatten(0, 1)
        parts = dict(judged(program, given, shown))
        assert not any(bool(part.wrong.any()) for part in parts.values())
        assert all(part.determined == part.actual.numel() for part in parts.values())
        wrong = shown | {"k": shown["k"].roll(1, 0)}
        assert bool(dict(judged(program, given, wrong))["k"].wrong.any())
    assert len(seen) == 2
