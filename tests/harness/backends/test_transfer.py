"""Tensors on a device for a backend on a second device: every tensor is carried, and no further value is changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.backends.module_driver import Step
from narrowgauge.harness.backends.transfer import tensors_in, to_device
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native.gpu import DEVICE, needs_gpu

META = torch.device("meta")
"""A device of every machine."""


def test_every_tensor_is_carried() -> None:
    x = torch.zeros(32, 32)
    q = reference.quantize(x, "nvfp4")
    grouped = reference.quantize_grouped(x, torch.tensor([16, 16]), find_recipe("nvfp4"))
    other = SimpleNamespace(codes=x, scales=x, amax=None, note="kept")
    value = {"a": [x, (q, None)], "grouped": grouped, "other": other, "seed": (3, 5), "rule": find_recipe("nvfp4")}
    there = to_device(value, META)
    # x; codes, scales, amax, tensor scale of q; the same and sizes of the grouped operand; codes, scales of the third.
    assert len(list(tensors_in(value))) == len(list(tensors_in(there))) == 1 + 4 + 5 + 2
    assert {tensor.device for tensor in tensors_in(there)} == {META}
    assert {tensor.device.type for tensor in tensors_in(value)} == {"cpu"}
    quantized = there["a"][1][0]
    assert (type(quantized), quantized.recipe, quantized.shape) == (type(q), q.recipe, q.shape)
    assert type(there["a"]) is list
    assert there["seed"] == (3, 5)
    assert there["rule"] is value["rule"]
    assert there["other"]["amax"] is None


def test_a_step_is_carried_whole() -> None:
    x = torch.zeros(4, 4)
    seen = {"y": [x, {"codes": x, "swizzled": False}]}
    step = Step(2, x, x, {"weight": x}, {"expert_ids": x}, {"weight": x}, seen, {"weight": None})
    there = step.at(META)
    held = [there.x, there.dy, there.parameters, there.routing, there.before, there.seen]
    assert {tensor.device for tensor in tensors_in(held)} == {META}
    assert there.number == 2
    assert there.seen["y"][1]["swizzled"] is False
    assert there.early == {"weight": None}


def test_a_backend_is_given_what_lies_where_it_runs() -> None:
    seen = []

    def transform(x, recipe, *, scale=None):
        seen.extend([x.device, scale.device])
        return torch.zeros(2, 2)

    doors = Backend.local("b", SimpleNamespace(transform=transform), device=META)
    with pytest.raises(BackendError, match="transform gave a tensor on cpu; its input is on meta"):
        doors.call("transform", torch.ones(2, 2), find_recipe("nvfp4-rht"), scale=torch.ones(1))
    assert seen == [META, META]
    there = torch.ones(2, 2, device=META)
    assert doors.call("transform", there, find_recipe("nvfp4-rht"), scale=there).device.type == "cpu"  # as given


@needs_gpu
@pytest.mark.parametrize(
    "case",
    [
        case_from_labels("quantize", "nvfp4-rht", (64, 128), "bf16", "outliers", ("both", "swizzled")),
        case_from_labels("quantize", "nvfp4-sr", (64, 128), "bf16", "normal", ("strided", "words")),
        case_from_labels(
            "gemm", "mxfp8-e4m3", (48, 160, 32), "bf16xbf16-fp32", "rounding", ("nt", "accumulate", "bias")
        ),
        case_from_labels("gemm-grouped", "nvfp4", (96, 64, 32), "bf16xbf16-fp32", "normal", ("rows:17,0,79", "padded")),
        case_from_labels("update-scale", "fp8-delayed-e4m3", (16, 3), "", "amaxes"),
        case_from_labels(
            "linear", "NVFP4BlockScaling", (2, 16, 64, 96), "bf16", "normal", ("steps:2", "accumulate", "recompute")
        ),
    ],
    ids=lambda case: case.id,
)
def test_a_case_is_the_same_wherever_it_is_judged(case, monkeypatch) -> None:
    from narrowgauge.harness.backends.backend import load_backend

    records = []
    for small in (Case.small, 0):
        monkeypatch.setattr(type(case), "small", small)
        records.append(run_case(case, load_backend("native", DEVICE), device=DEVICE).to_dict())
    # The cost of quantizing, for information, is of float64 sums, and two devices add in two orders.
    free = {name for name in records[0] if name.startswith(("seconds", "bytes"))} | {"accuracy"}
    here, there = ({n: v for n, v in r.items() if n not in free} for r in records)
    assert here == there
    assert here["verdict"] == "pass"
