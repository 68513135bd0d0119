"""A mixture of experts that shows its end alone: right kernels of any order, wrong kernels, stages that it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts.experts import moe
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

CASE = "moe/mxfp8-e4m3/12x128x4x32x2/bf16/one-hot-k/w13_recipe:mxfp8-e4m3+w2_recipe:mxfp8-e4m3"
NVFP4 = CASE.replace("mxfp8-e4m3", "nvfp4")


def _of(q: Quantized, expert: int, experts: int) -> Quantized:
    rows = q.shape[0] // experts
    codes, scales = (part.reshape(experts, -1, part.shape[1])[expert] for part in (q.codes, q.scales))
    return Quantized(codes, scales, q.amax, q.recipe, (rows, q.shape[1]))


def stages_of(
    x: torch.Tensor, w13: Quantized, w2: Quantized, ids: torch.Tensor, weights: torch.Tensor, recipe: Recipe,
    *, last: int | None = None, in_w13: int = 0, power: int = 1, swapped: bool = False, backwards: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The stages in plain torch. `last`: choices that are added; `in_w13`: distance of the expert in w13; `power` of
    the weights; `swapped`: gate is up; `backwards`: the last choice is added first."""
    experts, (tokens, choices) = w2.shape[0] // x.shape[1], ids.shape
    q = narrowgauge.quantize(x, recipe)
    gate_up = torch.zeros(tokens, choices, w13.shape[0] // experts, dtype=x.dtype)
    for expert in range(experts):
        y = reference.gemm(q, _of(w13, (expert + in_w13) % experts, experts), out_dtype=x.dtype)
        gate_up = torch.where((ids == expert).unsqueeze(2), y.unsqueeze(1), gate_up)
    gate, up = gate_up.chunk(2, 2)[:: -1 if swapped else 1]
    activated = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype).flatten(0, 1)
    a = narrowgauge.quantize(activated, recipe)
    rows = torch.zeros(tokens * choices, x.shape[1], dtype=x.dtype)
    for expert in range(experts):
        y = reference.gemm(a, _of(w2, expert, experts), out_dtype=x.dtype)
        rows = torch.where(ids.view(-1, 1) == expert, y, rows)
    rows = rows.view(tokens, choices, -1)
    products = (rows.float() * (weights**power).unsqueeze(2))[:, :last].unbind(1)
    output = sum(products[:: -1 if backwards else 1], torch.zeros(tokens, x.shape[1]))
    return {"output": output.to(x.dtype), "gate": gate, "up": up, "activated": a, "rows": rows}


def _kernel(**wrong: Any) -> Callable[..., torch.Tensor]:
    def moe(x: Any, w13: Any, w2: Any, expert_ids: Any, weights: Any, recipe: Recipe) -> Any:
        return stages_of(x, w13, w2, expert_ids, weights, recipe, **wrong)["output"]

    return moe


@pytest.mark.parametrize("case", [CASE, NVFP4, CASE.replace("one-hot-k", "exact-sums")])
def test_the_end_alone(case: str) -> None:
    narrowgauge.check(_kernel(backwards=True), case)
    narrowgauge.check(native.moe, case)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "nvfp4"])
def test_right_kernels_pass_every_family(recipe: str) -> None:
    for kernel in (_kernel(), _kernel(backwards=True), native.moe):
        narrowgauge.check(kernel, moe, recipe=recipe)


WRONG = {
    "choices": {"last": -1}, "next expert": {"in_w13": 1}, "weights is a factor twice": {"power": 2},
    "gate_up is 'up-gate'": {"swapped": True},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails(name: str) -> None:
    with pytest.raises(AssertionError, match="output"):
        narrowgauge.check(_kernel(**WRONG[name]), CASE)


@pytest.mark.parametrize(
    ("in_w13", "stages"),
    [
        (0, ""),
        pytest.param(1, "gate ✗, up ✗, activated.scales ✓, activated.codes ✓", marks=pytest.mark.long, id="wrong"),
    ],
)
def test_an_observer_shows_stages(in_w13: int, stages: str) -> None:
    """Each stage is judged given the stage before, so a wrong w13 is a finding of gate and up alone."""

    def fused(observer: Callable[[str, Any], None], *given: Any) -> torch.Tensor:
        found = stages_of(*given, in_w13=in_w13)
        for name, stage in found.items():
            observer(name, stage)
        return found["output"]

    def moe(x: Any, w13: Any, w2: Any, expert_ids: Any, weights: Any, recipe: Recipe) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        return {"output": fused(shown.__setitem__, x, w13, w2, expert_ids, weights, recipe), **shown}

    if stages:
        with pytest.raises(AssertionError, match=stages):
            narrowgauge.check(moe, CASE)
    else:
        narrowgauge.check(moe, CASE)
