"""Growth of cost: measurements of ever larger matrices, and the sentence about a curve. No test asserts a time."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.tools.bench import cost_growth
from narrowgauge.harness.tools.bench.cost_growth import CostCurve, CostPoint, measure_growth
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Quantized
from tests.harness.tools.test_bench import flipped
from tests.native.gpu import needs_compiler


def curve(*seconds: float, first: int = 22) -> CostCurve:
    return CostCurve("native", [CostPoint(first + 2 * n, row, 0) for n, row in enumerate(seconds)])


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (curve(1.0, 4.0, 16.0), "time grows as elements^1.000, that of an element by +0.0 to +0.0 %: within linear"),
        (curve(1.0, 4.7), "time grows as elements^1.116, that of an element by +0.0 to +17.5 %: within linear"),
        (curve(1.0, 16.0), "time grows as elements^2.000, that of an element by +0.0 to +300.0 %: dearer than linear"),
        (curve(1.0, 2.0), "time grows as elements^0.500, that of an element by -50.0 to +0.0 %: cheaper than linear"),
        (
            curve(4.0, 8.0, 64.0),
            "time grows as elements^1.000, that of an element by -50.0 to +100.0 %: dearer than linear",
        ),
    ],
)
def test_what_is_said_of_a_curve(result: CostCurve, output: str) -> None:
    assert result.sentence() == f"native, from 2^22: {output} ± 20 %"
    result.ended = "ends before 2^30: no memory"
    assert result.sentence().endswith(f"{output} ± 20 %; ends before 2^30: no memory")


@needs_compiler
def test_ever_larger_matrices_are_quantized_by_both() -> None:
    heard: list[str] = []
    result = measure_growth("cpu", last=18, on_size=heard.append)
    assert heard == ["2^16 elements", "2^18 elements"]
    assert [(row.who, [point.exponent for point in row.points], row.ended) for row in result] == [
        ("native", [16, 18], ""), ("reference", [16, 18], ""),
    ]  # fmt: skip
    assert all(math.isfinite(point.nanoseconds) for row in result for point in row.points)
    kernels, oracle = result
    for point in kernels.points:  # its result: codes, scales, amax and tensor scale
        assert point.memory == point.elements // 2 + point.elements // 16 + 8
    assert all(point.memory > point.elements for point in oracle.points)


def test_a_curve_ends_where_a_side_raises_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.quantize

    def wrong(x: torch.Tensor, name: str) -> Quantized:
        q = right(x, name)
        return replace(q, codes=flipped(q.codes)) if x.numel() > 1 << 16 else q

    def raises(x: torch.Tensor, name: str) -> Quantized:
        raise MemoryError("too little")

    monkeypatch.setattr(cost_growth, "native", SimpleNamespace(quantize=wrong))
    monkeypatch.setattr(cost_growth, "reference", SimpleNamespace(quantize=raises))
    kernels, oracle = measure_growth("cpu", last=20)
    assert [point.exponent for point in kernels.points] == [16, 18]
    assert kernels.ended.startswith("wrong at 2^18: rowwise codes: 1 of 262 144 codes differ")
    assert kernels.wrong
    assert (oracle.points, oracle.ended) == ([], "ends before 2^16: MemoryError: too little")
    assert not oracle.wrong
