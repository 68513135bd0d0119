"""Rule 3 on a sum in a foreign order: torch's bfloat16 matmul, on tensor cores if the machine has a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.operations import OPERATIONS, case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.recipes import Hadamard, find_recipe
from tests.harness.sample_backends import backend
from tests.native.gpu import DEVICE, needs_gpu

DEVICES = ["cpu", pytest.param(DEVICE, marks=needs_gpu)]


def matrix(rotation: Hadamard) -> torch.Tensor:
    """R = diag(σ)·H·c, bfloat16 (group, group)."""
    h = torch.ones(1, 1)
    while len(h) < rotation.group:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return (signs(rotation).unsqueeze(1) * h * coefficient(rotation.group)).bfloat16()


def transform(x: torch.Tensor, recipe: Any) -> torch.Tensor:
    r = matrix(recipe.transform).to(x.device)
    return (x.reshape(-1, len(r)) @ r).view(x.shape)


def quantize(x: torch.Tensor, recipe: Any, **options: Any) -> Any:
    rotated = transform(x, recipe)
    q = reference.quantize(rotated, recipe.rowwise, **options)
    return q.codes, q.scales, q.amax


@pytest.mark.sampled(12)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nvfp4-rht", "nvfp4-rht-nosign", "nvfp4-rht2", "nvfp4-rht128"])
@pytest.mark.parametrize("operation", ["transform", "quantize"])
def test_a_matmul_passes_in_whatever_order_it_sums(operation: str, name: str, device: str) -> None:
    excused = 0.0
    for family in OPERATIONS["transform"].families():
        if device == "cpu" and (family == "subnormal" or family.startswith("amax-2m12")):
            continue  # the bfloat16 instructions of certain CPUs flush subnormal numbers: the next test
        case = case_from_labels(operation, name, (256, 512), "bf16", family)
        record = run_case(case, backend(transform=transform, quantize=quantize), device=device)
        assert (record.verdict, record.message) == ("pass", ""), case.id
        assert record.excused_share is not None
        excused = max(excused, record.excused_share)
    assert excused < 0.1


def test_a_matmul_that_flushes_subnormal_numbers_fails() -> None:
    def flushing(x: torch.Tensor, recipe: Any) -> torch.Tensor:
        return transform(torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0.0, x), recipe)

    record = run_case(
        case_from_labels("transform", "nvfp4-rht", (64, 128), "bf16", "subnormal"), backend(transform=flushing)
    )
    assert (record.verdict, record.stage) == ("fail", "output")


@pytest.mark.parametrize("device", DEVICES)
def test_a_matmul_that_leaves_the_signs_out_fails(device: str) -> None:
    def unsigned(x: torch.Tensor, recipe: Any) -> torch.Tensor:
        return transform(x, find_recipe("nvfp4-rht-nosign"))

    case = case_from_labels("transform", "nvfp4-rht", (256, 512), "bf16", "normal")
    record = run_case(case, backend(transform=unsigned), device=device)
    assert (record.verdict, record.stage) == ("fail", "output")
