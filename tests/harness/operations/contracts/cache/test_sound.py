"""Kernels in plain loops pass, with every recipe and page layout, and the judge compares every byte of the cache."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, Cache, PageLayoutName
from narrowgauge.spec.program import Program
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.cache.kernels import Kernels

NVFP4 = "nvfp4@torchao-one-level"
RECIPES = (
    "fp8-static-e4m3", "fp8-static-e4m3@vllm-kv", "fp8-row-e4m3@vllm-kv", "int8-row", "int8-row@vllm-row", "mxfp8-e4m3",
    NVFP4,
)  # fmt: skip
SIZES = {"tokens": 11, "heads": 3, "dim": 32, "v_dim": 64, "pages": 4, "page": 5, "requests": 7, "most": 3, "scales": 1}
OTHERS = {"cache": "half", "slots": "int64", "pages": "int64", "lengths": "int64", "k_scale": "float32",
          "v_scale": "float32"}  # fmt: skip


def program(name: str, recipe: str, dtype: str = "bfloat16") -> Program:
    contract = CONTRACTS[name]
    dtypes = {tensor: OTHERS.get(tensor, dtype) for tensor in contract.tensors}
    return contract.trace(dtypes, {"recipe": recipe}, {})


def cache_of(tensors: dict[str, torch.Tensor], recipe: str, layout: PageLayoutName) -> Cache:
    """A copy of the cache among the tensors of a contract."""
    parts = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith("cache.")}
    held = {name: PAGE_LAYOUTS[layout].stored(part, name).clone() for name, part in parts.items()}
    scales = held.get("key_scales"), held.get("value_scales")
    return Cache(held["keys"], held["values"], *scales, find_recipe(recipe), layout, parts["keys"].shape[1])


def stored(
    steps: Program, tensors: dict[str, torch.Tensor], kernel: Kernels, layout: PageLayoutName
) -> dict[str, Stored]:
    """The result of a storing kernel, in the form of the judge."""
    recipe = next(step.options["recipe"] for step in steps.steps if "recipe" in step.options)
    cache = cache_of(tensors, recipe, layout)
    rows = {name: tensors[name].view(len(tensors["slots"]), tensors["cache.keys"].shape[2], -1) for name in ("k", "v")}
    given = {name: tensors[name] for name in ("k_scale", "v_scale") if name in tensors}
    kernel.kv_write(rows["k"], rows["v"], cache, tensors["slots"], cache.recipe, **given)
    after = {name: PAGE_LAYOUTS[layout].logical(part, name) for name, part in cache.parts().items()}
    names = {"keys": {"codes": "keys", "scales": "key_scales"}, "values": {"codes": "values", "scales": "value_scales"}}
    return {half: Stored({p: after[n] for p, n in own.items() if n in after}) for half, own in names.items()}


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kernel_in_plain_loops_passes(recipe: str, layout: PageLayoutName) -> None:
    sizes = {**SIZES, "scales": 3 if layout == "hnd" else 1}
    if (layout == "x-packed" and "static" not in recipe) or (layout == "nvfp4-page") != (recipe == NVFP4):
        pytest.skip("the layout has no such scales")
    if recipe == NVFP4:
        sizes |= {"v_dim": 64, "page": 8}
    steps = program("kv-write", recipe)
    tensors = contract_inputs(steps, sizes, "normal", Draw("sound"))
    shown = stored(steps, tensors, Kernels(), layout)
    parts = dict(judged(steps, tensors, shown))
    assert not [name for name, part in parts.items() if bool(part.wrong.any())]
    held = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("cache."))
    kept = sum(part.actual.numel() for name, part in parts.items() if "other" in name)
    tokens = int((tensors["slots"] >= 0).sum())
    assert kept == held * (1 - tokens / (sizes["pages"] * sizes["page"]))


def test_any_changed_byte_of_the_cache_is_wrong() -> None:
    """Every byte of a small cache, one by one: bytes of the tokens, and bytes that stay."""
    steps = program("kv-write", "fp8-static-e4m3@torchao-affine")
    sizes = {**SIZES, "dim": 2, "v_dim": 1, "heads": 2}
    tensors = contract_inputs(steps, sizes, "normal", Draw("bytes"))
    tensors["slots"][3] = tensors["slots"][4]  # a slot of two tokens is free
    right = stored(steps, tensors, Kernels(), "nhd")
    free, seen = int(tensors["slots"][3]), 0
    for page, offset, head, column in torch.cartesian_prod(
        *map(torch.arange, right["keys"].parts["codes"].shape)
    ).tolist():
        keys = right["keys"].parts["codes"].clone()
        keys[page, offset, head, column] ^= 0x11
        shown = right | {"keys": Stored({"codes": keys})}
        wrong = [(name, part) for name, part in judged(steps, tensors, shown) if bool(part.wrong.any())]
        if page * 5 + offset == free:
            assert not wrong
            continue
        ((_, part),) = wrong
        assert part.place is not None
        ((row, at),) = part.wrong.nonzero().tolist()
        found = part.place(row, at)
        assert (found["page"], found["offset"], found["head"]) == (page, offset, head)
        assert found.get("column", found.get("byte")) == column
        seen += 1
    assert seen == tensors["cache.keys"].numel() - 2 * 2


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [("fp8-static-e4m3@torchao-affine", 1), ("fp8-static-e4m3", 3), ("fp8-row-e4m3", 1), ("mxfp8-e4m3", 1), (NVFP4, 3)],
)
def test_rows_that_are_read_are_those_of_plain_loops(recipe: str, scales: int) -> None:
    steps = program("kv-read", recipe)
    tensors = contract_inputs(steps, {**SIZES, "scales": scales}, "normal", Draw("read"))
    cache = cache_of(tensors, recipe, "nhd")
    given = {name: tensors[name] for name in ("k_scale", "v_scale") if name in tensors}
    k, v = Kernels().kv_read(cache, tensors["pages"], tensors["lengths"], cache.recipe, **given)
    assert len(k) == int(tensors["lengths"].sum())
    shown = {"k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    for part in dict(judged(steps, tensors, shown)).values():
        assert part.determined == part.actual.numel()
        assert not bool(part.wrong.any())
    wrong = shown | {"k": shown["k"].roll(1, 0)}
    assert any(bool(part.wrong.any()) for _, part in judged(steps, tensors, wrong))
