"""Stages in high precision: elements inside the bound pass, elements outside are named with their place."""

from __future__ import annotations

import torch

from narrowgauge.harness.operations.stages.high_precision import bounded_stage
from narrowgauge.reference.high_precision.additions import column_sum, residual_sum
from narrowgauge.reference.high_precision.attention import attention_forward
from narrowgauge.reference.high_precision.gelu import gelu_forward
from narrowgauge.reference.high_precision.norm import norm_forward


def given(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_right_norm_passes_with_figures() -> None:
    x, gamma, beta = given(16, 64), given(64, seed=2), given(64, seed=3)
    found = torch.nn.functional.layer_norm(x.float(), (64,), gamma.float(), beta.float()).bfloat16()
    stage = bounded_stage("step 1 qkv.norm", found, norm_forward(x, gamma, beta, "layer", 1e-5), torch.bfloat16)
    assert stage.passed
    assert (stage.stage, stage.rule, stage.compared, stage.mismatches) == ("step 1 qkv.norm", "bound", 1024, 0)
    assert 0 < stage.figures["budget_max"] <= 1
    assert stage.figures["exact_share"] == 0


def test_a_wrong_element_is_named_with_its_place_and_interval() -> None:
    x, gamma = given(16, 64), given(64, seed=2)
    expected = norm_forward(x, gamma, None, "rms", 1e-5)
    found = expected.value.bfloat16()
    found[5, 7] *= 1.0625
    stage = bounded_stage("norm", found, expected, torch.bfloat16)
    assert stage.mismatches == 1
    assert "1 of 1 024 outputs differ" in stage.sentence
    assert "at row 5, column 7" in stage.sentence
    assert "1 of them outside the proved bound" in stage.sentence
    assert stage.finding is not None
    (element,) = stage.finding["elements"]
    assert (element["row"], element["column"], element["rule"]) == (5, 7, "proved interval")
    assert element["lower"] <= element["expected"] <= element["upper"]
    assert not element["lower"] <= element["actual"] <= element["upper"]


def test_what_a_bound_assumes_of_device_functions_is_said() -> None:
    x, gamma = given(16, 64), given(64, seed=2)
    q, k, v = (given(2, 3, 8, 16, seed=seed) for seed in range(3))
    for expected, function in (
        (norm_forward(x, gamma, None, "rms", 1e-5), "rsqrtf"),
        (gelu_forward(x), "tanhf"),
        (attention_forward(q, k, v), "expf"),
    ):
        found = expected.value.bfloat16()
        assumption = f"{function} within 2 ulps (CUDA C++ Programming Guide, table 17)"
        assert bounded_stage("stage", found, expected, torch.bfloat16).assumes == assumption
        stage = bounded_stage("stage", found + 1, expected, torch.bfloat16)
        assert stage.sentence.endswith(f"; the bound assumes {assumption}")
        assert stage.finding is not None
        assert stage.finding["sentence"] == stage.sentence
    assert bounded_stage("stage", x + x, residual_sum(x, x), torch.bfloat16).assumes == ""


def test_what_cannot_round_is_compared_to_the_bit() -> None:
    a, b = given(4, 8), given(4, 8, seed=2)
    expected = residual_sum(a, b)
    assert bounded_stage("h", a + b, expected, torch.bfloat16).figures["exact_share"] == 1
    off = torch.nextafter(a + b, torch.full_like(a, torch.inf))
    stage = bounded_stage("h", off, expected, torch.bfloat16)
    assert (stage.mismatches, stage.max_ulp) == (32, 1)
    assert "32 of them where no order of summation can round" in stage.sentence


def test_another_shape_or_dtype_is_wrong_as_a_whole() -> None:
    expected = column_sum(given(4, 8))
    stage = bounded_stage("dbias", torch.zeros(7).bfloat16(), expected, torch.bfloat16)
    assert stage.sentence == "dbias is (7,) torch.bfloat16, not (8,) torch.bfloat16"
    assert stage.mismatches == 7
    stage = bounded_stage("dbias", torch.zeros(8), expected, torch.bfloat16)
    assert stage.sentence == "dbias is (8,) torch.float32, not (8,) torch.bfloat16"
    empty = column_sum(torch.zeros(4, 0))
    assert bounded_stage("dbias", torch.zeros(0), empty, torch.float32).passed
