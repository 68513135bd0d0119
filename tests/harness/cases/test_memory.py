"""The memory of a case, and the memory of a GPU that a process keeps between cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases import cost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import shortage
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from tests.harness.sample_backends import backend
from tests.native.gpu import DEVICE, needs_gpu

CASE = case_from_labels("quantize", "nvfp4", (4, 16), "bf16", "normal")
LARGE = replace(CASE, shape=(1 << 15, 1 << 15))


@needs_gpu
def test_what_a_large_case_left_is_free_before_the_next() -> None:
    native = load_backend("reference", DEVICE)
    large = torch.empty(2 * cost.KEPT, dtype=torch.uint8, device=DEVICE)
    del large
    assert torch.cuda.memory_reserved() > cost.KEPT
    assert run_case(CASE, native, device=DEVICE).verdict == "pass"
    assert torch.cuda.memory_reserved() < cost.KEPT


@needs_gpu
@pytest.mark.parametrize(
    "case",
    [
        case_from_labels("quantize", "nvfp4", (8192, 4096), "fp32", "normal", ("both",)),
        case_from_labels("quantize", "nvfp4", (8192, 4096), "fp32", "normal", ("columnwise",)),
        case_from_labels("quantize", "fp8-block-128x128-e4m3-pow2", (8192, 4096), "fp32", "normal", ("both",)),
        case_from_labels("gemm", "nvfp4", (4096, 256, 4096), "bf16xbf16-fp32", "normal", ("tn", "accumulate")),
        case_from_labels("gemm", "fp8-block-1x128-e4m3-pow2", (4096, 128, 4096), "bf16xbf16-bf16", "normal", ("tn",)),
        case_from_labels("linear", "MXFP8BlockScaling", (4, 128, 1024, 4096), "bf16", "normal", ("bias",)),
    ],
    ids=lambda case: case.id,
)
def test_no_case_takes_more_of_a_gpu_than_is_said(case: Case) -> None:
    record = run_case(case, load_backend("native", DEVICE), device=DEVICE)
    assert record.verdict == "pass"
    assert record.bytes_peak is not None
    assert record.bytes_peak <= case.memory


def nothing_runs(**_):
    raise AssertionError("the case began")


@pytest.mark.parametrize(("device", "where"), [("cpu", "this machine"), ("cuda", "the GPU")])
def test_a_case_that_does_not_fit_says_so_before_it_starts(device, where, monkeypatch) -> None:
    monkeypatch.setattr(cost, "room", lambda home: 12_345_000_000)
    monkeypatch.setattr("narrowgauge.harness.running.runner.make_case_inputs", nothing_runs)
    monkeypatch.setattr("narrowgauge.harness.running.runner._give_back_memory", lambda device: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 0)
    record = run_case(LARGE, backend(quantize=nothing_runs), device=device)
    assert record.verdict == "error"  # no run and no gate passes with an error
    assert record.message == (
        f"does not fit: 32768x32768 needs about 45.1 GB, and {where} has 12.3 GB free; fewer processes (-n), nothing "
        "else beside them, or a smaller shape"
    )


def test_a_case_that_fits_says_nothing(monkeypatch) -> None:
    monkeypatch.setattr(cost, "room", lambda home: LARGE.memory)
    assert shortage(LARGE, "cpu") == ""
    monkeypatch.setattr(cost, "room", lambda home: LARGE.memory - 1)
    assert shortage(LARGE, "cpu")
    monkeypatch.setattr(cost, "room", nothing_runs)
    assert shortage(CASE, "cpu") == ""  # a small case asks for no memory


def test_what_is_needed_grows_with_operands_outputs_and_steps() -> None:
    assert replace(CASE, shape=(8, 16)).memory == 2 * CASE.memory
    assert replace(CASE, usage="both").memory > CASE.memory
    gemm = case_from_labels("gemm", "nvfp4", (64, 32, 16), "bf16xbf16-fp32", "normal", ("tn",))
    element, output = 66, 360
    assert gemm.memory == element * 32 * (64 + 16) + output * 64 * 16
    grouped = case_from_labels("gemm-grouped", "nvfp4", (64, 32, 16), "bf16xbf16-fp32", "normal", ("even:4",))
    assert grouped.memory == element * 32 * (64 + 4 * 16) + output * 64 * 16
    linear = case_from_labels("linear", "MXFP8BlockScaling", (2, 32, 64, 96), "bf16", "normal", ("steps:3",))
    element, output = 110, 250
    assert linear.memory == 3 * element * (64 * (64 + 96) + 64 * 96) + output * 64 * 96
    step = replace(linear, steps=1)
    assert step.memory < linear.memory
    layer = case_from_labels("transformer-layer", linear.training, linear.shape, "bf16", "normal", ("heads:4",))
    assert layer.memory > step.memory
    assert case_from_labels("grouped-linear", linear.training, (64, 64, 96), "bf16", "normal", ("even:4",)).memory > 0
