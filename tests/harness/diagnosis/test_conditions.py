"""Conditions: values of keys on which a failure depends."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.diagnosis.search.conditions import conditions
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.judging import FurtherCases, judge
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import backend

ROWWISE = "quantize/nvfp4/1x256/fp16/normal"
BOTH = "quantize/nvfp4/129x48/bf16/normal/both"
GEMM = "gemm/nvfp4/16x2048x1/bf16xbf16-bf16/normal/tn+accumulate+bias"
Wrong = Callable[[Case, int], bool]
KERNELS: dict[str, tuple[str, Wrong, list[str]]] = {
    "one row": (ROWWISE, lambda case, _: case.shape[0] == 1, ["M = 1"]),
    "float16": (ROWWISE, lambda case, _: case.dtype_label == "fp16", ["dtype = fp16"]),
    "both conditions": (
        ROWWISE, lambda case, _: case.shape[0] < 4 and case.dtype_label == "fp16", ["M ≤ 3", "dtype = fp16"],
    ),
    "tails of tiles": (BOTH, lambda case, _: case.shape[0] % 32 > 0, ["M no multiple of 32"]),
    "both halves": (BOTH, lambda case, _: case.flags == ("both",), ["usage = both"]),
    "many columns": (GEMM, lambda case, _: case.shape[1] > 1024, ["K ≥ 1025"]),
    "one column and a bias": (
        GEMM, lambda case, _: case.shape[2] == 1 and "bias" in case.flags, ["N = 1", "bias = true"],
    ),
    "most inputs": (ROWWISE, lambda case, number: case.shape[0] == 1 and number % 8 > 0, ["M = 1"]),
    "some odd sizes": (ROWWISE, lambda case, _: case.shape[0] in (1, 17), ["M no multiple of 2"]),
    "sizes without a rule": (ROWWISE, lambda case, _: case.shape[0] in (1, 256), ["M = 1, 256"]),
    "a family at any size": (ROWWISE, lambda case, _: case.shape[0] == 1 or case.inputs == "ties", []),
    "every case": (GEMM, lambda case, _: True, []),
    "few inputs": (ROWWISE, lambda case, number: case.shape[0] == 1 and number % 2 > 0, []),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_without_which_a_kernel_is_right(kernel: str) -> None:
    name, wrong, expected = KERNELS[kernel]
    case = case_from_id(name)
    assert case is not None
    found = conditions(case, "codes", lambda case, drawn, number: not wrong(case, number))
    assert [each.sentence.removeprefix("only with ").partition(":")[0] for each in found] == expected
    assert [each.cause for each in found] == [f"when:{words.split()[0]}" for words in expected]
    assert not any(each.exact for each in found)


def test_failures_by_chance_have_no_condition() -> None:
    case, drawn = case_from_id(GEMM), random.Random(0)
    assert case is not None
    for _ in range(200):
        assert not conditions(case, "output", lambda *_: drawn.random() < 0.5)


def test_a_changed_case_without_a_result_is_no_evidence() -> None:
    case = case_from_id(ROWWISE)
    assert case is not None
    assert not conditions(case, "codes", lambda changed, *_: None if changed.shape != case.shape else False)


def test_a_dtype_is_a_condition_on_the_same_numbers() -> None:
    wide, narrow = (case_from_id(f"quantize/nvfp4/4x32/{dtype}/normal") for dtype in ("fp32", "bf16"))
    assert wide is not None
    assert narrow is not None
    further = FurtherCases(narrow, make_inputs(narrow), backend(quantize=ops.quantize), 0)
    given = further._inputs_of(wide, narrow, 3)
    assert given is not None
    assert given.x.dtype == torch.float32
    assert torch.equal(given.x, make_inputs(narrow, seed=3).x.float())
    assert further._inputs_of(narrow, wide, 3) is None  # bfloat16 does not hold the numbers


def test_a_run_names_the_condition() -> None:
    def negated_in_float16(x: torch.Tensor, recipe: object, **options: object) -> object:
        return ops.quantize(-x if x.dtype == torch.float16 else x, recipe, **options)

    case = case_from_id("quantize/mxfp8-e4m3/4x32/fp16/normal")
    assert case is not None
    record = run_case(case, backend(quantize=negated_in_float16, dequantize=ops.dequantize))
    (found,) = [entry for entry in record.explanations if entry["cause"].startswith("when:")]
    assert found["sentence"] == "only with dtype = fp16: wrong on 8 of 8 inputs, right on all 8 with dtype = fp32"


def test_a_brief_judgement_runs_one_variation() -> None:
    calls: list[str] = []

    def quantize(x: torch.Tensor, recipe: str) -> object:
        calls.append(recipe)
        return ops.quantize(x, recipe)

    case, kernel = case_from_id("quantize/mxfp8-e4m3/16x64/bf16/normal"), backend(quantize=quantize)
    for brief, count in ((False, 2), (True, 1)):
        calls.clear()
        outcome = judge(case, make_inputs(case), kernel, brief=brief)
        assert all(stage.passed for stage in outcome.stages)
        assert len(calls) == count
