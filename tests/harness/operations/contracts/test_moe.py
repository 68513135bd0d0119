"""A mixture of experts that shows its end alone: right kernels of any order, wrong kernels, shown stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts.experts import moe
from narrowgauge.harness.api.assert_result import bound
from narrowgauge.harness.cases.operations import case_from_id, hold
from narrowgauge.harness.operations.contracts.results import named_results
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

CASE = "moe/mxfp8-e4m3/12x128x4x32x2/bf16/one-hot-k/w13_recipe:mxfp8-e4m3+w2_recipe:mxfp8-e4m3"
NVFP4 = CASE.replace("mxfp8-e4m3", "nvfp4")


def _of(q: Quantized, expert: int, experts: int) -> Quantized:
    rows = q.shape[0] // experts
    codes, scales = (part.reshape(experts, -1, part.shape[1])[expert] for part in (q.codes, q.scales))
    return Quantized(codes, scales, q.amax, q.recipe, (rows, q.shape[1]))


def halves(products: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of products (tokens, choices, 2F)."""
    width = {"interleaved": 1, "interleaved-8": 8}.get(gate_up, products.shape[2] // 2)
    first, second = (part.flatten(2) for part in products.unflatten(2, (-1, 2, width)).unbind(3))
    return (second, first) if gate_up == "up-gate" else (first, second)


def stages_of(
    x: torch.Tensor, w13: Quantized, w2: Quantized, ids: torch.Tensor, weights: torch.Tensor, recipe: Recipe | str,
    *, last: int | None = None, in_w13: int = 0, power: int = 1, gate_up: str = "gate-up", backwards: bool = False,
    router_weight: str = "combined", rounded: str = "result", fast_math: bool = False, order: str = "choices",
    accumulate: str = "float32", of_none: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """The stages in plain torch. `last`: choices that are added; `in_w13`: distance of the expert in w13; `power` of
    the weights; `backwards`: the last choice is added first; `of_none`: expert of a choice of none. The others are
    fields of the contract."""
    ids = torch.where(ids < 0, of_none, ids)
    experts, (tokens, choices) = w2.shape[0] // x.shape[1], ids.shape
    q, w = narrowgauge.quantize(x, recipe), (weights**power).unsqueeze(2)
    products = torch.zeros(tokens, choices, w13.shape[0] // experts, dtype=x.dtype)
    for expert in range(experts):
        y = reference.gemm(q, _of(w13, (expert + in_w13) % experts, experts), out_dtype=x.dtype)
        products = torch.where((ids == expert).unsqueeze(2), y.unsqueeze(1), products)
    gate, up = halves(products, gate_up)
    bits = gate.float()
    silu = torch.nn.functional.silu(bits)
    silu = silu.nextafter(torch.tensor(torch.inf)) if fast_math else silu
    y = (silu.to(x.dtype).float() if rounded == "both" else silu) * up.float()
    y = y * w if router_weight == "activation" else y
    a = narrowgauge.quantize((y if rounded == "none" else y.to(x.dtype)).flatten(0, 1), recipe)
    sums = torch.zeros(tokens * choices, x.shape[1])
    for expert in range(experts):
        y = reference.gemm(a, _of(w2, expert, experts), out_dtype=torch.float32)
        sums = torch.where(ids.view(-1, 1) == expert, y, sums)
    sums = sums.view(tokens, choices, -1)
    rows = (sums * w if router_weight == "product" else sums).to(x.dtype)
    terms = rows.float() * w if router_weight == "combined" else rows.float()
    output = torch.zeros(tokens, x.shape[1])
    for term in terms[:, :last].unbind(1)[:: -1 if backwards or order == "any" else 1]:
        output += term if accumulate == "float32" else term.to(x.dtype).float()
        output = output if accumulate == "float32" else output.to(x.dtype).float()
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


WRONG: dict[str, dict[str, Any]] = {
    "the last choice is left out": {"last": -1}, "each choice takes w13 of the next expert": {"in_w13": 1},
    "weights is a factor twice": {"power": 2}, "gate_up is 'up-gate'": {"gate_up": "up-gate"},
    "a choice of no expert takes expert 0": {"of_none": 0},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_kernel_is_named_by_the_end_alone(cause: str) -> None:
    with pytest.raises(AssertionError, match=f"(explained exactly by|possible cause): {re.escape(cause)}"):
        narrowgauge.check(_kernel(**WRONG[cause]), CASE)


FIELDS: dict[str, tuple[Any, ...]] = {
    "router_weight": ("combined", "activation", "product", "none"),
    "gate_up": ("gate-up", "up-gate", "interleaved", "interleaved-8"),
    "rounded": ("result", "both", "none"), "fast_math": (False, True), "order": ("any", "choices"),
    "accumulate": ("float32", "output"),
}  # fmt: skip
WIDER = {("fast_math", True), ("order", "any"), ("accumulate", "output")}
"""Values that allow the results of the second value too."""


def _witness(field: str) -> tuple[Any, ...]:
    """Inputs whose results differ by the values of a field."""
    generator = torch.Generator().manual_seed(1)
    x, w13, w2 = (torch.randn(*shape, generator=generator) for shape in ((8, 64), (3 * 64, 64), (3 * 64, 32)))
    if field == "fast_math":  # 24·7 is a tie between codes of E4M3
        x = torch.eye(8, 64)
        w13 = torch.tensor([24.0, 7.0]).repeat(3).repeat_interleave(32).unsqueeze(1).expand(-1, 64)
    quantized = [narrowgauge.quantize(w.bfloat16(), "mxfp8-e4m3") for w in (w13, w2)]
    ids = torch.randint(3, (8, 4), generator=generator)
    # A sum in bfloat16 hides the order of its terms.
    return x if field == "order" else x.bfloat16(), *quantized, ids, torch.rand(8, 4, generator=generator)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("field", FIELDS)
def test_each_value_of_a_field_changes_an_output(field: str) -> None:
    recipe, given = "mxfp8-e4m3", _witness(field)
    others = {"rounded": "none"} if field == "fast_math" else {}  # bfloat16 hides the last bits of an activation
    for value in FIELDS[field]:
        found = stages_of(*given, recipe, **others, **{field: value})
        for other in FIELDS[field]:
            program, tensors = bound(moe, given, {"recipe": recipe, field: other, **others})
            parts = judged(program, tensors, named_results(program, tensors, found))
            wrong = sum(int(part.wrong.sum()) for _, part in parts)
            assert (wrong == 0) == (other == value or (field, other) in WIDER), (value, other, wrong)


def test_exact_sums_need_scales_of_blocks() -> None:
    case = dataclasses.replace(case_from_id(NVFP4), inputs="exact-sums")
    assert "nvfp4 has a scale of the whole tensor; use 'one-hot-k'" in str(case.problem())
    families = {recipe: {case.inputs for case, _ in hold(moe).usual([recipe])} for recipe in ("nvfp4", "mxfp8-e4m3")}
    assert families["mxfp8-e4m3"] - families["nvfp4"] == {"exact-sums"}


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
