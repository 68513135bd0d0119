"""Wrong kernels of a cache fail, and the cause names the wrong cell; right kernels of other forms pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.api.verdict import Verdict
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, PageLayoutName, logical_parts, slots_of
from tests.harness.operations.contracts.cache.kernels import Kernels
from tests.harness.operations.contracts.cache.test_sound import cache_of, program
from tests.harness.sample_backends import backend
from tests.matrix import all_cases

SIZES = {"tokens": 16, "heads": 4, "dim": 32, "v_dim": 32, "pages": 5, "page": 8, "requests": 6, "most": 2, "scales": 1}
STATIC = "fp8-static-e4m3@torchao-affine"
Method = Callable[..., Any]


def verdict(operation: str, kernel: Kernels, recipe: str = STATIC, layout: PageLayoutName = "nhd") -> Verdict:
    """The verdict on a kernel, with its causes."""
    tensors = contract_inputs(program(operation, recipe), SIZES, "normal", Draw("wrong"))
    before = cache_of(tensors, recipe, layout)
    scales = {name: tensors[name] for name in ("k_scale", "v_scale") if name in tensors}
    if operation == "kv-write":
        given = [tensors[name].view(SIZES["tokens"], SIZES["heads"], -1) for name in ("k", "v")]
        given += [before, tensors["slots"]]
    else:
        given = [before, tensors["pages"], tensors["lengths"]]
    copies = [one.copy() if one is before else one for one in given]
    result = getattr(kernel, operation.replace("-", "_"))(*copies, before.recipe, **scales)
    contract = CONTRACTS[operation]
    return narrowgauge.explain(narrowgauge.assert_result, contract, result, *given, diagnose="full", **scales)


def place(function: Callable[[int, int, int, int], tuple[int, int]]) -> dict[str, Method]:
    """Another page and offset, of page, offset, pages and tokens of a page."""

    def method(self: Kernels, slot: int, cache: Any, half: str) -> tuple[int, int] | None:
        right = Kernels.place(self, slot, cache, half)
        return None if right is None else function(*right, cache.keys.shape[0], cache.page)

    return {"place": method}


def head(function: Callable[[int, int], int]) -> dict[str, Method]:
    return {"head": lambda self, head, heads, half: function(head, heads)}


def rows(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Method]:
    """Wrong rows (tokens, heads, columns) before their quantization."""

    def method(self: Kernels, x: torch.Tensor, recipe: Any, scale: Any, half: str) -> dict[str, torch.Tensor]:
        return Kernels.quantized(self, change(x), recipe, scale, half)

    return {"quantized": method}


def parts(change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, Method]:
    """Other bytes of the parts of the rows."""

    def method(self: Kernels, x: torch.Tensor, recipe: Any, scale: Any, half: str) -> dict[str, torch.Tensor]:
        found = Kernels.quantized(self, x, recipe, scale, half)
        return {name: change(name, part) for name, part in found.items()}

    return {"quantized": method}


def scaled(change: Callable[[dict[str, Any], str], Any]) -> dict[str, Method]:
    return {"scale_of": lambda self, half, scales: change(scales, half)}


def other_reads(change: Callable[[torch.Tensor], torch.Tensor], *, of_table: bool = False) -> dict[str, Method]:
    """Another table of pages, or other bytes of both halves (pages, page, heads, bytes), in the place of those read."""

    def method(self: Kernels, cache: Any, pages: torch.Tensor, *given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        if of_table:
            return Kernels.kv_read(self, cache, change(pages), *given, **options)
        held = replace(cache, keys=change(cache.keys), values=change(cache.values))
        return Kernels.kv_read(self, held, pages, *given, **options)

    return {"kv_read": method}


def swapped(one: int, other: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Two columns exchanged."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., [one, other]] = x[..., [other, one]]
        return x

    return change


def whole_numbers(rounded: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Method]:
    """Another rounding of rows of INT8."""

    def method(self: Kernels, x: torch.Tensor, recipe: Any, scale: Any, half: str) -> dict[str, torch.Tensor]:
        found = Kernels.quantized(self, x, recipe, scale, half)
        of_rows = x.float().abs().amax(-1, keepdim=True) / 127
        codes = rounded((x.float() / of_rows).nan_to_num(0.0)).clamp(-128, 127)
        return found | {half: codes.to(torch.int8).view(torch.uint8)}

    return {"quantized": method}


def of_first_head(name: str, part: torch.Tensor) -> torch.Tensor:
    return part[:, :1].expand_as(part) if name.endswith("scales") else part


ROW, INT8_ROW = "fp8-row-e4m3", "int8-row"
WRONG: dict[str, tuple[str, str, str, dict[str, Method]]] = {
    # of serving.md
    "page and offset exchanged": ("kv-write", STATIC, "page and offset are exchanged",
                                  place(lambda n, t, pages, page: divmod(t * pages + n, page))),
    "scale of head 0 for all heads": ("kv-write", ROW, "stored scales are those of head 0", parts(of_first_head)),
    "scale inverted": ("kv-write", STATIC, "the given scale is inverted", scaled(lambda s, half: 1 / s[half])),
    "negative slot to slot 0": ("kv-write", STATIC, "a negative slot is slot 0",
                                {"place": lambda self, slot, cache, half: divmod(max(slot, 0), cache.page)}),
    "scales of the token before": ("kv-write", ROW, "scales are those of the previous token",
                                   parts(lambda name, x: x.roll(1, 0) if name.endswith("scales") else x)),
    "INT8 truncated": ("kv-write", INT8_ROW, "rounded toward zero", whole_numbers(torch.trunc)),
    "INT8 ties away from zero": ("kv-write", INT8_ROW, "rounded nearest-away", whole_numbers(
        lambda x: torch.trunc(x + torch.where(x < 0, -0.5, 0.5)))),
    "INT8 scales of head 0": ("kv-write", INT8_ROW, "stored scales are those of head 0", parts(of_first_head)),
    "reads INT8 of head 3 for head 1": ("kv-read", INT8_ROW, "head 1 of keys is that of head 3", head(
        lambda h, n: 3 if h == 1 else h)),
    # more
    "head 3 for head 1": ("kv-write", STATIC, "head 1 of k is that of head 3", rows(
        lambda x: x[:, [0, 3, 2, 3]])),
    "heads in reverse order": ("kv-write", STATIC, "the heads in reverse order", head(lambda h, n: n - 1 - h)),
    "next head": ("kv-write", STATIC, "the previous head", head(lambda h, n: (h + 1) % n)),
    "page 2 in place of page 4": ("kv-write", STATIC, "pages 2, 4 lie in pages 4, 2",
                                  place(lambda n, t, pages, page: ({2: 4, 4: 2}.get(n, n), t))),
    "next slot": ("kv-write", STATIC, "slots is the next slot",
                  place(lambda n, t, pages, page: divmod((n * page + t + 1) % (pages * page), page))),
    "offsets backwards": ("kv-write", STATIC, "offsets of a page run backwards",
                          place(lambda n, t, pages, page: (n, page - 1 - t))),
    "pages backwards": ("kv-write", STATIC, "pages run backwards", place(lambda n, t, pages, page: (pages - 1 - n, t))),
    "two columns exchanged": ("kv-write", STATIC, "columns 5, 9 of k are those of columns 9, 5", rows(swapped(5, 9))),
    "token 3 for token 7": ("kv-write", STATIC, "token 7 of k is that of token 3", rows(
        lambda x: torch.cat([x[:7], x[3:4], x[8:]]))),
    "k_scale for values": ("kv-write", STATIC, "the scale is k_scale", scaled(lambda s, half: s["keys"])),
    "scale left out": ("kv-write", STATIC, "scale is left out", scaled(lambda s, half: torch.ones(1))),
    "last token not stored": ("kv-write", STATIC, "last token of slots is not stored",
                              {"token": lambda self, token: token if token < 15 else 5}),
    "last offset of a page not stored": ("kv-write", STATIC, "stored in the last slot of a page",
        {"place": lambda self, slot, cache, half: None if slot < 0 or slot % cache.page == cache.page - 1
                  else divmod(slot, cache.page)}),
    "cache cleared": ("kv-write", STATIC, "becomes 0", {"before": lambda self, logical, name: logical.zero_()}),
    "MXFP8 codes of the next head": ("kv-write", "mxfp8-e4m3", "the next head", rows(lambda x: x.roll(-1, 1))),
    "reads head 3 for head 1": ("kv-read", STATIC, "head 1 of keys is that of head 3", head(
        lambda h, n: 3 if h == 1 else h)),
    "reads page 2 for page 4": ("kv-read", STATIC, "page 4 are read from page 2",
                                other_reads(lambda pages: pages.where(pages != 4, 2), of_table=True)),
    "reads offset 3 for offset 5": ("kv-read", STATIC, "offset 5 are read from offset 3",
                                    other_reads(lambda x: x[:, [0, 1, 2, 3, 4, 3, 6, 7]])),
    "reads column 9 for column 5": ("kv-read", STATIC, "column 5 of keys is that of column 9", other_reads(
        lambda x: x[..., [*range(5), 9, *range(6, 32)]])),
    "reads the next head": ("kv-read", ROW, "the next head", head(lambda h, n: (h + 1) % n)),
    "reads the first page alone": ("kv-read", STATIC, "the first entry of a request", {"page_of": lambda *token: 0}),
    "reads with the other scale": ("kv-read", STATIC, "the scale is v_scale", scaled(lambda s, half: s[
        "values" if half == "keys" else "keys"])),
    "reads with the inverse scale": ("kv-read", STATIC, "the given scale is inverted", scaled(lambda s, h: 1 / s[h])),
}  # fmt: skip
"""Operation, recipe, words of the cause and methods; without words the mistake is outside of the list."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_and_its_cause_is_named(name: str) -> None:
    operation, recipe, words, methods = WRONG[name]
    found = verdict(operation, type("Wrong", (Kernels,), methods)(), recipe)
    assert not found.passed
    if words:
        assert any(words in str(each["sentence"]) for each in found.explanations), found.explanations


class AtOnce(Kernels):
    """Stores all tokens of a half at once, in the order of memory of the cache, and reads by slots."""

    def kv_write(self, k, v, cache, slots, recipe, *, k_scale=None, v_scale=None):
        scales, stored = {"keys": k_scale, "values": v_scale}, slots >= 0
        for half, x in (("values", v), ("keys", k)):
            for name, rows in self.quantized(x, recipe, scales[half], half).items():
                part = cache.parts()[name]
                logical = PAGE_LAYOUTS[cache.layout].logical(part, name).contiguous()
                logical.flatten(0, 1)[slots[stored]] = rows[stored]
                part.copy_(PAGE_LAYOUTS[cache.layout].stored(logical, name))
        return cache

    def kv_read(self, cache, pages, lengths, recipe, *, dtype="bfloat16", k_scale=None, v_scale=None):
        scales, found = {"keys": k_scale, "values": v_scale}, []
        index = slots_of(pages, lengths, cache.page)
        for half in ("keys", "values"):
            held = {name: part for name, part in logical_parts(cache).items() if name[:3] == half[:3]}
            rows = {name: part.flatten(0, 1)[index] for name, part in held.items()}
            found.append(self.decoded(rows, half, recipe, scales[half], getattr(torch, dtype)))
        return tuple(found)


class Backwards(Kernels):
    """Stores the last token first, as threads may."""

    def token(self, token: int) -> int:
        return SIZES["tokens"] - 1 - token

    def quantized(self, x, recipe, scale, half):
        return {name: part.flip(0) for name, part in Kernels.quantized(self, x, recipe, scale, half).items()}


class NewMemory(Kernels):
    """Leaves its argument as it is, and returns tensors by name."""

    def kv_write(self, k, v, cache, *arguments, **scales):
        return logical_parts(Kernels.kv_write(self, k, v, cache.copy(), *arguments, **scales))


class ByPages(Kernels):
    """Copies whole pages, with all other bytes."""

    def before(self, logical: torch.Tensor, name: str) -> None:
        logical.copy_(logical.clone())


RIGHT = [
    (kernel, operation, recipe, layout)
    for kernel, operation in ((AtOnce, "kv-write"), (Backwards, "kv-write"), (NewMemory, "kv-write"),
                              (ByPages, "kv-write"), (AtOnce, "kv-read"))
    for recipe, layout in ((STATIC, "nhd"), (ROW, "hnd"), ("fp8-static-e4m3@vllm-kv", "x-packed"))
    if (kernel, layout) != (NewMemory, "x-packed")
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "operation", "recipe", "layout"), RIGHT)
def test_right_kernels_of_other_forms_pass(
    kernel: type[Kernels], operation: str, recipe: str, layout: PageLayoutName
) -> None:
    found = verdict(operation, kernel(), recipe, layout)
    assert found.passed, found


class OfWhatWasThere(Kernels):
    """Stores zeros if the first byte of the cache is large, as a kernel does that reads its output."""

    def kv_write(self, k, v, cache, *arguments, **scales):
        large = not bool(cache.keys.flatten()[0] & 0x80)
        return Kernels.kv_write(self, 0 * k if large else k, v, cache, *arguments, **scales)


def test_bytes_that_depend_on_the_bytes_before_are_named() -> None:
    shape = tuple(SIZES[axis] for axis in ("tokens", "heads", "dim", "v_dim", "pages", "page", "scales"))
    case = next(
        case for case in all_cases() if case.operation == "kv-write" and case.recipe == "fp8-static-e4m3@vllm-kv"
    )
    record = run_case(replace(case, shape=shape, inputs="normal"), backend(kv_write=OfWhatWasThere().kv_write))
    assert record.verdict == "fail"
    assert "prefill-dependent" in [each["cause"] for each in record.explanations]
