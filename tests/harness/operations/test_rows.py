"""The stage `rows`: operations whose rows are independent, with right kernels and with kernels that look at M."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.report.text import rows_alone
from narrowgauge.reference import ops as reference
from tests.harness.operation_cases import REFERENCE, grouped_case, half_long, quantize_case, run, stages
from tests.harness.operations.contracts.attention_kernels import Attention
from tests.harness.operations.contracts.serving_kernels import Kernels
from tests.harness.sample_backends import backend

Doors = Mapping[str, Any]
INVARIANT = {"declares": {"batch": "invariant"}}
BUTTERFLY = {"declares": {"transform": "butterfly"}}
FUNCTIONS = {name: REFERENCE[name] for name in ("quantize", "quantize_both", "quantize_grouped", "dequantize")}
PRODUCTS = {name: REFERENCE[name] for name in ("gemm", "gemm_grouped")}
GEMM = "gemm/{}/48x256x32/bf16xbf16-fp32/normal/tn"
GROUPED = "gemm-grouped/{}/96x64x32/bf16xbf16-fp32/normal/ragged:5"
ATTENTION = "attention/fp8-static-e4m3@vllm/4x4x64x6x16x2x64x3x2/bf16/one-hot"
WEIGHTS = "weight-only-gemm/nvfp4/17x64x24/bf16/normal"


class Serving(Kernels):
    """Products with sums in the same order for every M."""

    def product(self, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (a.float().unsqueeze(1) * w.float()).cumsum(2)[..., -1]


def rows_of(case: Any, **doors: Any) -> tuple[dict[str, Any] | None, Any]:
    """The stage `rows`, or None, and the record."""
    record = run(case, **doors)
    return stages(record).get("rows"), record


def _case(text: str) -> Any:
    if "/" in text:
        return case_from_id(text)
    operation, recipe, *flags = text.split()
    made = {"quantize": quantize_case, "sections": grouped_case}[operation]
    shape = (256, 256) if "128x128" in recipe else (96, 64)
    return made(recipe, *flags, shape=shape, inputs="position")


RIGHT: dict[str, tuple[str, Doors]] = {
    "a tensor amax": ("quantize nvfp4", FUNCTIONS),
    "blocks of 16 rows": ("quantize nvfp4-2d", FUNCTIONS),
    "blocks of 32 rows": ("quantize mxfp8-2d", FUNCTIONS),
    "blocks of 128 rows": ("quantize fp8-block-128x128-e4m3-fp32", FUNCTIONS),
    "MX": ("quantize mxfp8-e4m3", FUNCTIONS),
    "FP6": ("quantize mxfp6-e2m3", FUNCTIONS),
    "a scale of the tensor": ("quantize fp8-current-e4m3", FUNCTIONS),
    "a given scale": ("quantize fp8-delayed-e4m3", FUNCTIONS),
    "an amax of rows": ("quantize nvfp4-rowscaled", FUNCTIONS),
    "scales of rows": ("quantize fp8-row-e4m3", FUNCTIONS),
    "4over6": ("quantize nvfp4-4over6-448-mse", FUNCTIONS),
    "the transpose": ("quantize mxfp4 columnwise", FUNCTIONS),
    "a rotation in a declared order": ("quantize nvfp4-rht", FUNCTIONS | BUTTERFLY),
    "a rotation": ("transform/nvfp4-rht/96x64/bf16/position", {"transform": REFERENCE["transform"]} | BUTTERFLY),
    "without dequantize": ("quantize nvfp4", {"quantize": reference.quantize}),
    "refuses M below 48": ("quantize mxfp4", {"quantize": lambda x, recipe: _least(x, 48, recipe)}),
    "sections": ("sections nvfp4 ragged:4", FUNCTIONS),
    "sections of the transpose": ("sections mxfp8-e4m3 ragged:4 columnwise", FUNCTIONS),
    "a product": (GEMM.format("nvfp4"), PRODUCTS | INVARIANT),
    "a product of rows": (GEMM.format("fp8-row-e4m3"), PRODUCTS | INVARIANT),
    "a product with addends": (GEMM.format("mxfp8-e4m3") + "+accumulate+bias", PRODUCTS | INVARIANT),
    "a product of sections": (GROUPED.format("nvfp4"), PRODUCTS | INVARIANT),
    "sections with addends": (GROUPED.format("mxfp8-e4m3") + "+bias", PRODUCTS | INVARIANT),
    "a product of a contract": (WEIGHTS, {"weight_only_gemm": Serving().weight_only_gemm} | INVARIANT),
    "attention": (ATTENTION, {"attention": Attention().attention} | INVARIANT),
}


def _least(x: torch.Tensor, least: int, recipe: Any) -> Any:
    if len(x) < least:
        raise NotImplementedError("too few rows")
    return reference.quantize(x, recipe)


@pytest.mark.parametrize("name", half_long(RIGHT))
def test_right_kernels_pass(name: str) -> None:
    case, doors = RIGHT[name]
    found, record = rows_of(_case(case), **doors)
    assert (record.verdict, record.message) == ("pass", "")
    assert found is not None
    assert found["compared"] > 6
    assert not found["sentence"]


def _without_amax(x: torch.Tensor, recipe: Any) -> Any:
    return reference.quantize(x, recipe)


ABSENT: dict[str, tuple[str, Doors]] = {
    "random bits follow the place": ("quantize nvfp4-sr", FUNCTIONS),
    "the rotation has a free order": ("quantize nvfp4-rht", FUNCTIONS),
    "another family": ("quantize/mxfp4/96x64/bf16/normal", FUNCTIONS),
    "both halves": ("quantize mxfp8-e4m3 both", FUNCTIONS),
    "strided rows": ("quantize mxfp4 strided", FUNCTIONS),
    "swizzled scales": ("quantize mxfp8-e4m3 swizzled", FUNCTIONS),
    "one row": ("quantize/mxfp4/1x64/bf16/position", FUNCTIONS),
    "no amax is taken": ("quantize nvfp4", {"quantize": _without_amax}),
    "scales of several rows in sections": (
        GROUPED.format("fp8-block-128x128-e4m3-fp32"),
        PRODUCTS | INVARIANT,
    ),
    "a product without a declaration": (GEMM.format("nvfp4"), PRODUCTS),
    "attention without a declaration": (ATTENTION, {"attention": Attention().attention}),
}


@pytest.mark.parametrize("name", ABSENT)
def test_rows_that_depend_by_contract_have_no_stage(name: str) -> None:
    case, doors = ABSENT[name]
    found, record = rows_of(_case(case), **doors)
    assert (record.verdict, found) == ("pass", None)


# ---- wrong kernels ---------------------------------------------------------------------------------------------------


def _spoilt(q: Any, part: str = "codes", row: int | slice = 0) -> Any:
    changed = getattr(q, part).clone()
    changed.view(torch.uint8)[row] ^= 1
    return replace(q, **{part: changed})


def _quantize(wrong: Callable[[torch.Tensor], bool], part: str = "codes", row: int | slice = 0) -> Doors:
    """A quantizer that is wrong for a few shapes or contents of x."""

    def quantize(x: torch.Tensor, recipe: Any, **options: Any) -> Any:
        q = reference.quantize(x, recipe, **options)
        return _spoilt(q, part, row) if wrong(x) else q

    return FUNCTIONS | {"quantize": quantize}


def _own_amax(x: torch.Tensor, recipe: Any, amax: torch.Tensor | None = None) -> Any:
    return reference.quantize(x, recipe)


def _dequantize(q: Any, dtype: torch.dtype) -> torch.Tensor:
    return reference.dequantize(q, dtype) * (1 if q.shape[0] > 8 else 2)


def _gemm(change: Callable[[torch.Tensor], torch.Tensor]) -> Doors:
    """A product whose change stays inside of its interval: a different order of summation would give the same."""
    return {"gemm": lambda a, b, **options: change(reference.gemm(a, b, **options))} | INVARIANT


def _last_bit(y: torch.Tensor, rows: int | slice = slice(None)) -> torch.Tensor:
    y = y.clone()
    y.view(torch.int32)[rows] ^= 1
    return y


def _next_row(a: Any, b: Any, **options: Any) -> torch.Tensor:
    y = reference.gemm(a, b, **options)
    return y + (a.codes.roll(-1, 0).view(torch.uint8) == 0).all(1, keepdim=True)


def _grouped(a: Any, b: Any, **options: Any) -> torch.Tensor:
    y = reference.gemm_grouped(a, b, **options)
    return y if len(b) > 2 else _last_bit(y)


def _sections(x: torch.Tensor, sizes: torch.Tensor, recipe: Any, **options: Any) -> Any:
    q = reference.quantize_grouped(x, sizes, recipe, **options)
    return q if len(sizes) > 1 else _spoilt(q)


def _transform(x: torch.Tensor, recipe: Any) -> torch.Tensor:
    return reference.transform(x, recipe) * (1 if len(x) > 1 else 2)


class _Split(Attention):
    def attention(self, q: Any, cache: Any, pages: Any, *rest: Any, **options: Any) -> Any:
        out, lse = super().attention(q, cache, pages, *rest, **options)
        return out, lse if len(pages) > 1 else torch.nextafter(lse, lse * 2)


def _weights(a: torch.Tensor, b: Any) -> torch.Tensor:
    y = Serving().unrounded(a, b)
    return (y if len(a) > 7 else y * (1 + 2.0**-8)).to(a.dtype)


WRONG: dict[str, tuple[str, Doors, str]] = {
    "codes at M = 1": ("quantize mxfp4", _quantize(lambda x: len(x) == 1), "codes .* M = 1; .* From M = 2 on"),
    "codes below M = 9": ("quantize mxfp4", _quantize(lambda x: len(x) < 9), "From M = 9 on: another path"),
    "codes below M = 33": ("quantize mxfp8-e4m3", _quantize(lambda x: len(x) < 33), "From M = 33 on"),
    "codes at odd M": ("quantize mxfp4", _quantize(lambda x: len(x) % 2 == 1), "equal bytes: M = 1, M = 3"),
    "scales at M = 2": ("quantize mxfp4", _quantize(lambda x: len(x) == 2, "scales"), "of scales .* M = 2"),
    "scales of rows": ("quantize fp8-row-e4m3", _quantize(lambda x: len(x) < 4, "scales"), "of scales .* M = 1"),
    "all rows at M = 7": ("quantize mxfp4", _quantize(lambda x: len(x) == 7, row=slice(None)), "7 of 7 rows"),
    "values below M = 9": ("quantize mxfp4", FUNCTIONS | {"dequantize": _dequantize}, "of values .* From M = 9 on"),
    "beside NaN": ("quantize mxfp4", _quantize(lambda x: bool(x.isnan().any())), "beside rows of NaN"),
    "beside zeros": ("quantize mxfp4", _quantize(lambda x: not bool(x[1].any())), "beside rows of zeros"),
    "large numbers": ("quantize mxfp4", _quantize(lambda x: bool((x > 1e38).any())), "the largest number"),
    "an amax of its own": ("quantize nvfp4", FUNCTIONS | {"quantize": _own_amax}, "of (scales|codes) have other"),
    "a block at M = 16": ("quantize nvfp4-2d", _quantize(lambda x: len(x) == 16), "blocks of 16 rows .* M = 16;"),
    "the transpose": ("quantize mxfp4 columnwise", _quantize(lambda x: len(x) == 1), "codes .* with M = 1"),
    "a rotation at M = 1": (
        "transform/nvfp4-rht/96x64/bf16/position", {"transform": _transform} | BUTTERFLY, "output .* M = 1",
    ),
    "a single section": ("sections mxfp4 ragged:4", {"quantize_grouped": _sections}, "with 1 section; .* 2 sections"),
    "a product at M = 1": (GEMM.format("nvfp4"), _gemm(lambda y: _last_bit(y) if len(y) == 1 else y), "From M = 2"),
    "a product below M = 17": (
        GEMM.format("mxfp8-e4m3"), _gemm(lambda y: y if len(y) > 16 else _last_bit(y)), "From M = 17 on",
    ),
    "the last row of a product": (
        GEMM.format("mxfp8-e4m3") + "+bias", _gemm(lambda y: _last_bit(y, -1)), "rows of output have other bytes",
    ),
    "codes of other rows": (
        GEMM.format("mxfp8-e4m3"), {"gemm": _next_row} | INVARIANT, "output have other bytes beside rows of zeros",
    ),
    "few sections": (
        GROUPED.format("mxfp8-e4m3"), {"gemm_grouped": _grouped} | INVARIANT, "From 3 sections on: other bytes",
    ),
    "a weight-only product": (WEIGHTS, {"weight_only_gemm": _weights} | INVARIANT, "From M = 8 on"),
    "attention of one request": (ATTENTION, {"attention": _Split().attention} | INVARIANT, "of lse .* From 2 requests"),
}  # fmt: skip


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", half_long(WRONG))
def test_wrong_kernels_fail(name: str) -> None:
    case, doors, words = WRONG[name]
    found, record = rows_of(_case(case), **doors)
    assert found is not None
    assert re.search(words, found["sentence"]), found["sentence"]
    assert record.verdict == "fail"
    if record.stage == "rows":
        assert [entry["cause"] for entry in record.explanations] == ["rows-dependent"]


def test_the_report_has_a_sentence() -> None:
    case = _case("quantize mxfp4")
    right, wrong = (run(case, **doors).to_dict() for doors in (FUNCTIONS, _quantize(lambda x: len(x) < 9)))
    assert rows_alone([]) == ""
    assert rows_alone([right]).startswith("Rows by themselves: 750 rows of 1 case have the same bytes")
    said = rows_alone([right, wrong, wrong])
    assert said.startswith("Rows that depend on other rows: quantize/mxfp4/96x64/bf16/position: ")
    assert said.count("From M = 9 on: another path") == 1


def test_an_unknown_declaration_names_the_value() -> None:
    with pytest.raises(Exception, match="invariant"):
        backend(gemm=reference.gemm, declares={"batch": "always"})
    assert isinstance(backend(gemm=reference.gemm, **INVARIANT), Backend)
