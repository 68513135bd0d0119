"""Grouped products of rows of experts in a buffer: right kernels pass, wrong ones fail and are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.gemm_grouped.deviations import wrong_arrangement
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.modules.routing import Grouping, arrange
from narrowgauge.spec.quantized import BatchedQuantized, Quantized
from narrowgauge.spec.summation import Summation
from tests.harness.sample_backends import backend
from tests.reference.contracts.golden_serving import vectors

SIZES = (3, 0, 9, 1, 4)
Rows = list[tuple[int, int]]
"""Row of the buffer and its expert."""


def case(grouping: str = "contiguous", recipe: str = "mxfp8-e4m3", **keys: Any) -> GroupedGemmCase:
    given: dict[str, Any] = {"inputs": "normal", "alignment": 8, "sections": f"rows:{','.join(map(str, SIZES))}"}
    return GroupedGemmCase(
        recipe=recipe, shape=(sum(SIZES), 128, 8), x="bf16", w="bf16", out="bf16", grouping=grouping, tier="quick",
        **given | keys,
    )  # fmt: skip


def rows_of(index: Sequence[int], grouping: str, alignment: int, experts: Sequence[int]) -> Rows:
    """Where the rows of experts lie, by the index alone."""
    if grouping == "contiguous":
        return [(row, expert) for row, expert in enumerate(index) if expert >= 0]
    if grouping == "sorted-ids":
        most = max(index, default=0)
        named = [(row, experts[place // alignment]) for place, row in enumerate(index)]
        return [(row, expert) for row, expert in named if row < most]
    starts, ends = list(index[:-1]), list(index[1:])
    if grouping == "psum":
        starts, ends = [-(-end // alignment) * alignment for end in (0, *index[:-1])], list(index)
    return [(row, expert) for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
            for row in range(start, end)]  # fmt: skip


Change = Callable[[Rows, list[Quantized]], tuple[Rows, list[Quantized]]]


def kernels(change: Change = lambda rows, b: (rows, b), scale_row: int = 0) -> dict[str, Any]:
    """gemm_contiguous and gemm_masked of the reference. `scale_row`: rows to the row with the scales."""

    def product(a: Quantized, b: Sequence[Quantized], rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        found = torch.full((a.shape[0], b[0].shape[0]), torch.nan, dtype=dtype)
        rows, matrices = change(rows, list(b))
        for expert in {expert for _, expert in rows}:
            own = [row for row, other in rows if other == expert]
            scales = [(row + scale_row) % a.shape[0] for row in own]
            amax = None if a.amax is None else a.amax[expert : expert + 1]
            q = replace(a, codes=a.codes[own], scales=a.scales[scales], amax=amax, shape=(len(own), a.shape[1]),
                        tensor_scale=None)  # fmt: skip
            found[own] = reference.gemm(q, matrices[expert], out_dtype=dtype)
        return found

    def contiguous(
        a: Quantized, b: list[Quantized], index: torch.Tensor, *, out_dtype: torch.dtype,
        grouping: str = "contiguous", alignment: int = 128, experts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        blocks = [] if experts is None else experts.tolist()
        return product(a, b, rows_of(index.tolist(), grouping, alignment, blocks), out_dtype)

    def masked(
        a: BatchedQuantized, b: list[Quantized], index: torch.Tensor, *, out_dtype: torch.dtype, expected_m: int
    ) -> torch.Tensor:
        count, most, k = a.shape
        amax = None if a.amax is None else a.amax.flatten()
        q = Quantized(a.codes.flatten(0, 1), a.scales.flatten(0, 1), amax, a.recipe, (count * most, k))
        rows = [(g * most + row, g) for g, size in enumerate(index.tolist()) for row in range(size)]
        return product(q, b, rows, out_dtype).view(count, most, -1)

    return {"gemm_contiguous": contiguous, "gemm_masked": masked}


def record_of(one: GroupedGemmCase, **doors: Any) -> Any:
    quantizers = {name: getattr(reference, name) for name in ("quantize", "quantize_grouped")}
    return run_case(one, backend(**quantizers, **doors))


@pytest.mark.parametrize(
    ("grouping", "recipe"),
    [*((grouping, "mxfp8-e4m3") for grouping in ("masked", "contiguous", "psum", "indptr", "sorted-ids")),
     ("masked", "nvfp4"), ("contiguous", "nvfp4")],
)  # fmt: skip
def test_right_kernels_pass(grouping: str, recipe: str) -> None:
    record = record_of(case(grouping, recipe), **kernels())
    assert record.verdict == "pass", record.message
    stages = {stage["stage"] for stage in record.stages}
    assert ("padding" in stages) == (grouping != "sorted-ids")


def moved(step: int) -> Change:
    return lambda rows, b: ([(row, (expert + step) % len(b)) for row, expert in rows], b)


def scales_of(step: int) -> Change:
    return lambda rows, b: (
        rows, [replace(q, scales=b[(number + step) % len(b)].scales) for number, q in enumerate(b)]
    )  # fmt: skip


def border(*, first: bool) -> Change:
    def change(rows: Rows, b: list[Quantized]) -> tuple[Rows, list[Quantized]]:
        found = []
        for number, (row, expert) in enumerate(rows):
            beside = rows[number - 1 if first else (number + 1) % len(rows)][1]
            found.append((row, (expert - 1 if first else expert + 1) % len(b) if beside != expert else expert))
        return found, b

    return change


def past_empty(rows: Rows, b: list[Quantized]) -> tuple[Rows, list[Quantized]]:
    used = sorted({expert for _, expert in rows})
    return [(row, used.index(expert)) for row, expert in rows], b


WRONG: dict[str, dict[str, Any]] = {
    "matrix-of-next-expert": {"change": moved(1)},
    "matrix-of-previous-expert": {"change": moved(-1)},
    "matrix-of-first-expert": {"change": lambda rows, b: ([(row, 0) for row, _ in rows], b)},
    "first-row-of-previous-expert": {"change": border(first=True)},
    "last-row-of-next-expert": {"change": border(first=False)},
    "empty-experts-skipped": {"change": past_empty},
    "scales-of-next-expert": {"change": scales_of(1)},
    "scales-of-previous-expert": {"change": scales_of(-1)},
}


class Always:
    """A limit of work that is never reached."""

    reached = False

    def may_try(self, elements: float) -> bool:
        return True


def named_causes(sizes: Sequence[int], **change: Any) -> list[str]:
    """Causes of the output of a changed kernel."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(sum(sizes), 128, generator=draw), torch.randn(len(sizes), 8, 128, generator=draw)
    a = reference.quantize_grouped(x, torch.tensor(sizes), "mxfp8-e4m3")
    b = [reference.quantize(matrix, "mxfp8-e4m3") for matrix in w]
    place = arrange("contiguous", sizes, 1)
    whole = Quantized(a.codes, a.scales, None, a.recipe, a.shape)
    index = torch.tensor(place.index)
    output = kernels(**change)["gemm_contiguous"](whole, b, index, out_dtype=torch.bfloat16, alignment=1)
    found = wrong_arrangement(a.sections(), b, output, Summation("blocks"), StageResult("output", "bound", 0), Always())
    return [cause for cause, _ in found]


@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_kernel_is_named(cause: str) -> None:
    assert named_causes(SIZES, **WRONG[cause]) == [cause]


def test_scales_of_the_next_row_are_named() -> None:
    assert named_causes((4,), scale_row=1) == ["scales-of-next-row"]


@pytest.mark.long
def test_a_report_names_the_wrong_matrix() -> None:
    record = record_of(case(), **kernels(**WRONG["matrix-of-next-expert"]))
    assert record.verdict == "fail", record.message
    assert "matrix-of-next-expert" in [each["cause"] for each in record.explanations if each["exact"]]


def test_rows_of_no_expert_that_matter_fail() -> None:
    def contiguous(a: Quantized, b: list[Quantized], index: torch.Tensor, **options: Any) -> torch.Tensor:
        """The number of NaN bytes of the buffer decides a sign."""
        found: torch.Tensor = kernels()["gemm_contiguous"](a, b, index, **options)
        return found if bool((a.codes == 0x7F).any()) else -found

    record = record_of(case(), gemm_contiguous=contiguous)
    assert (record.verdict, record.stage) == ("fail", "padding")
    assert "outputs beside rows of zero and of NaN differ" in record.message


def test_recorded_rows_of_experts_lie_where_the_grouping_says() -> None:
    groupings: dict[str, Grouping] = {"grouped_masked": "masked", "grouped_contiguous": "indptr"}
    found = vectors("humming_grouped_masked_gemm")
    assert len(found) == 3
    for vector in found:
        given, sizes = vector["tensors"], vector["counts"]
        masked = vector["gemm"] == "grouped_masked"
        place = arrange(groupings[vector["gemm"]], sizes, len(given["x"]) // len(sizes) if masked else 1)
        assert place.index == given["layout"].tolist()
        assert place.height == len(given["x"])
        other = [row for row in range(place.height) if row not in place.rows]
        assert not given["out"][place.rows].isnan().any()
        assert not other or len(given["out"][other].unique()) == 1, "the kernel does not write rows of no expert"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grouping": "sections", "alignment": 8}, "row-alignment is that of rows in a buffer; give a grouping"),
        ({"padded": True}, "grouping is 'contiguous'; leave padded, accumulate and bias out"),
        ({"recipe": "fp8-block-128x128-e4m3-fp32"}, "cannot be multiplied|shares scales among rows"),
        ({"alignment": 0}, "row-alignment is 0; it is at least 1"),
    ],
)
def test_keys_that_exclude_one_another(keys: dict[str, Any], message: str) -> None:
    assert re.search(message, case(**keys).problem() or "")
