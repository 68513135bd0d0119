"""Results of any memory layout are judged: a wrong result fails with its cause, and the next method gets the layout."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.quantized import gemm_quantized
from narrowgauge.spec.recipe import Recipe
from tests.harness.operation_cases import gemm_case, grouped_case, quantize_case, swizzle_case
from tests.harness.product_cases import padded_case, quantized_case
from tests.harness.sample_backends import backend


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().T if x.dim() == 2 else x


def sliced(x: torch.Tensor) -> torch.Tensor:
    room = x.new_zeros(x.shape[0] + 1, *(2 * n + 3 for n in x.shape[1:]))[1:]
    view = room[:, 1 : 1 + 2 * x.shape[1] : 2] if x.dim() == 2 else room
    return view.copy_(x)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Equal rows share memory, and an extent of 1 has the stride 0."""
    return x[:1].expand(x.shape) if len(x) and bool((x == x[:1]).all()) else x


LAYOUTS = {"column-major": column_major, "sliced": sliced, "expanded": expanded}
METHODS = {name: getattr(reference, name) for name in (
    "quantize", "quantize_both", "quantize_grouped", "dequantize", "transform", "swizzle", "unswizzle", "gemm",
    "gemm_grouped", "update_scale", "pad_sections", "unpad_sections", "pack_scales", "unpack_scales",
)} | {"gemm_quantized": gemm_quantized}  # fmt: skip


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A result with all its tensors changed, except for the sizes of sections."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype == torch.int64 else change(value)
    if isinstance(value, tuple):
        return tuple(mapped(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, Recipe):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(value)})
    return value


def wrong(x: torch.Tensor) -> torch.Tensor:
    """Every seventh number in memory is changed."""
    changed = x.clone()
    part = changed.view(-1)[::7]
    part.copy_(part ^ 1 if x.dtype == torch.uint8 else part * 1.5 + 1)
    return changed


def methods(change: Callable[[torch.Tensor], torch.Tensor], broken: str = "") -> dict[str, Any]:
    """The methods of the reference with a different layout of their results. The methods in `broken` are wrong."""

    def door(name: str) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Any:
            found = METHODS[name](*arguments, **options)
            return mapped(mapped(found, wrong) if name == broken else found, change)

        return method

    return {name: door(name) for name in METHODS}


CASES = [
    (gemm_case("nvfp4", "tn"), "gemm"),
    (gemm_case("mxfp8-e4m3", "nt", "accumulate", "bias"), "gemm"),
    (gemm_case("nvfp4", "tn", shape=(16, 64, 1)), "gemm"),
    (gemm_case("nvfp4", "tn", shape=(1, 64, 16)), "gemm"),
    (gemm_case("fp8-block-1x128-e4m3-pow2", "tn", shape=(48, 160, 32)), "gemm"),
    (gemm_case("mxfp8-e4m3", "ragged:3", operation="gemm-grouped", shape=(99, 64, 32)), "gemm_grouped"),
    (gemm_case("nvfp4", "end:4", operation="gemm-grouped", shape=(64, 64, 32)), "gemm_grouped"),
    (padded_case("mxfp8-e4m3"), "gemm_grouped"),
    (padded_case("mxfp8-e4m3"), "pad_sections"),
    (padded_case("mxfp8-e4m3", sections="middle:4", shape=(96, 128, 32)), "unpad_sections"),
    (quantized_case("nvfp4", "nvfp4"), "gemm_quantized"),
    (case_from_labels("transform", "nvfp4-rht", (48, 64), "bf16", "normal"), "transform"),
    (swizzle_case(), "unswizzle"),
    (quantize_case("nvfp4"), "quantize"),
    (quantize_case("nvfp4"), "dequantize"),
    (quantize_case("nvfp4", "swizzled", shape=(130, 96)), "quantize"),
    (quantize_case("mxfp8-2d", "both"), "quantize_both"),
    (quantize_case("fp8-current-e4m3", "both", shape=(1, 64)), "quantize_both"),
    (quantize_case("fp8-block-128x128-e4m3-pow2", "both", shape=(130, 140)), "quantize_both"),
    (grouped_case("nvfp4-2d", "front:4", shape=(96, 64)), "quantize_grouped"),
]


# `make test` has each case in one layout, and each layout with a third of the cases.
TURNS = [
    pytest.param(case, broken, layout, id=f"{case.id}-{broken}-{layout}", marks=marks)
    for number, (case, broken) in enumerate(CASES)
    for turn, layout in enumerate(LAYOUTS)
    for marks in [() if turn == number % len(LAYOUTS) else pytest.mark.long]
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("case", "broken", "layout"), TURNS)
def test_any_layout_has_the_diagnosis_of_contiguous_memory(case, broken, layout):
    right = run_case(case, backend(**methods(LAYOUTS[layout])))
    assert (right.verdict, right.message) == ("pass", "")
    found, plain = (run_case(case, backend(**methods(change, broken))) for change in (LAYOUTS[layout], lambda x: x))
    assert found.verdict == plain.verdict == "fail"
    for column in ("stages", "findings", "explanations"):
        assert getattr(found, column) == getattr(plain, column)
    assert all(explanation["cause"] != "no-diagnosis" for explanation in found.explanations)


@pytest.mark.parametrize(
    ("case", "second"),
    [
        (quantize_case("nvfp4-2d"), "dequantize"), (quantize_case("fp8-current-e4m3"), "dequantize"),
        (gemm_case("mxfp8-2d", "tn"), "gemm"), (gemm_case("mxfp8-e4m3", "nn"), "gemm"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_method_gets_the_strides_of_a_result(case, second, layout):
    given, change = [], LAYOUTS[layout]

    def method(*operands, **options):
        given.extend([q.codes, q.scales] for q in operands if is_dataclass(q))
        return METHODS[second](*operands, **options)

    record = run_case(case, backend(**methods(change) | {second: method}))
    assert (record.verdict, record.message) == ("pass", "")
    for tensors in given:
        assert all(t.stride() == change(t.contiguous()).stride() for t in tensors)
