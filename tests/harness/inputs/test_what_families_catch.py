"""Wrong kernels that a single family, value or number of sections catches: the kernels pass the remaining cases of
their rows."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.judging import judge
from narrowgauge.native import ops as native
from narrowgauge.native.modules import layer_norm_linear
from narrowgauge.reference import modules
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Half

WORD = 1 << 32


def finite_c(a: Any, b: Any, c: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """NaN and infinities of c count as 0."""
    return reference.gemm(a, b, c=None if c is None else c.nan_to_num(0.0, 0.0, 0.0), **options)


def saturating_bias(a: Any, b: Any, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Infinities of the bias count as the largest number."""
    limits = torch.finfo(torch.float32 if bias is None else bias.dtype)
    clamped = None if bias is None else bias.clamp(limits.min, limits.max)
    return reference.gemm(a, b, bias=clamped, **options)


def low_word_counts(x: torch.Tensor, recipe: Any, random: Any = None, **options: Any) -> Any:
    """The offset of the columnwise half has no carry into its high word."""
    seed, offset = random
    rowwise, columnwise = reference.quantize_both(x, recipe, random=random, **options)
    if columnwise is not None and (offset + 1) % WORD == 0:
        columnwise = reference.quantize(x.T.contiguous(), recipe, random=(seed, offset & -WORD))
    return rowwise, columnwise


def first_64_weights(a: Any, b: Any, **options: Any) -> torch.Tensor:
    """The tables of the kernel have 64 sections: further ones take the last weight."""
    return reference.gemm_grouped(a, [b[min(number, 63)] for number in range(len(b))], **options)


def other_order_for_a_given_amax(x: torch.Tensor, recipe: Any, amax: Any = None, **options: Any) -> Any:
    """The path for a given amax has the order of operations of another library."""
    other = recipe if amax is None else "nvfp4@te-2.8"
    return replace(reference.quantize(x, other, amax=amax, **options), recipe=reference.find_recipe(recipe))


def one_pass(layer: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    """The variance is mean(x²) − mean²."""
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    y = (x - mean) * torch.rsqrt(variance + layer.eps) * gamma
    return y if beta is None else y + beta


def unshifted(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """A softmax that subtracts no maximum."""
    powers = scores.exp()
    return powers / powers.sum(dim, keepdim=True)


def amax_of_whole_rows(x: torch.Tensor, recipe: Any, **options: Any) -> Any:
    """The amax is that of the rows in whole groups of 16."""
    return reference.quantize(x, recipe, amax=x[: len(x) // 16 * 16].float().abs().amax().view(1))


class Twice(modules.Linear):
    """The weights of the gradient of x are the decoded weights of the forward."""

    def operand(self, x: torch.Tensor, recipe: Any, scale: Any, **options: Any) -> Any:
        if options.get("half") is Half.COLUMN:
            x = reference.dequantize(super().operand(x, recipe, scale)).to(x.dtype)
        return super().operand(x, recipe, scale, **options)


LINEAR = "linear/MXFP8BlockScaling/1x32x64x64/bf16"
GEMM = "gemm/mxfp8-e4m3/16x64x24/bf16xbf16-fp32"
GROUPED = "gemm-grouped/mxfp8-e4m3/96x32x8/bf16xbf16-bf16/normal"
BOTH = "quantize/nvfp4-sr/32x64/bf16/normal/both"
NVFP4 = "quantize/nvfp4/17x144/bf16"
NORM = "layernorm-linear/MXFP8BlockScaling/1x8x64x32/fp32"
LAYER = "transformer-layer/MXFP8BlockScaling/1x16x32x32/bf16"
DOORS: dict[str, dict[str, Any]] = {
    "finite c": {"gemm": finite_c},
    "saturating bias": {"gemm": saturating_bias},
    "32-bit offset": {"quantize_both": low_word_counts, "quantize": reference.quantize},
    "64 sections": {"gemm_grouped": first_64_weights},
    "given amax": {"quantize": other_order_for_a_given_amax},
    "one pass": {"LayerNormLinear": native.LayerNormLinear},
    "no maximum": {"TransformerLayer": native.TransformerLayer},
    "amax of whole rows": {"quantize": amax_of_whole_rows},
    "twice": {"Linear": Twice},
}
ROWS = {
    "finite c": (
        f"{GEMM}/special-addends/tn+accumulate",
        [f"{GEMM}/{f}/tn+accumulate" for f in ("normal", "nan", "inf")],
    ),
    "saturating bias": (f"{GEMM}/special-addends/tn+bias", [f"{GEMM}/{f}/tn+bias" for f in ("normal", "nan", "inf")]),
    "32-bit offset": (f"{BOTH}+edges", [BOTH]),
    "64 sections": (f"{GROUPED}/middle:96", [f"{GROUPED}/even:32"]),
    "given amax": (f"{NVFP4}/e4m3-ties/amax", [f"{NVFP4}/{f}/amax" for f in ("normal", "zeros", "nan")]),
    "one pass": (f"{NORM}/far-mean", [f"{NORM}/{f}" for f in ("normal", "outliers", "normal-1e-3")]),
    "amax of whole rows": (f"{NVFP4}/rising", [f"{NVFP4}/{f}" for f in ("normal", "outliers", "position")]),
    "twice": (f"{LINEAR}/low-columns", [f"{LINEAR}/normal"]),
    "no maximum": (f"{LAYER}/beyond-exp/heads:2", [f"{LAYER}/{f}/heads:2" for f in ("normal", "peaked")]),
}
"""The case that catches a kernel of `DOORS`, and passing cases."""


def wrong_stages(name: str, backend: Backend) -> list[str]:
    case = case_from_id(name)
    assert case is not None, name
    outcome = judge(case, make_inputs(case), backend)
    return [stage.stage for stage in outcome.stages if not stage.passed]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kernel", ROWS)
def test_one_case_alone_catches_the_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caught, others = ROWS[kernel]
    assert wrong_stages(caught, Backend.local("native", native)) == []
    if kernel == "one pass":
        monkeypatch.setattr(layer_norm_linear, "_normalise", one_pass)
    if kernel == "no maximum":
        monkeypatch.setattr(torch.Tensor, "softmax", unshifted)
    wrong = Backend.local("wrong", SimpleNamespace(**DOORS[kernel]))
    assert wrong_stages(caught, wrong)
    assert {name: wrong_stages(name, wrong) for name in others} == {name: [] for name in others}


def test_an_amax_of_a_few_elements_more_is_caught() -> None:
    """In one run the memory beside an input holds NaN, in the other a large number: fmax leaves NaN out."""

    def quantize(x: torch.Tensor, recipe: Any, **options: Any) -> Any:
        count = x.numel() + 8
        memory = (ctypes.c_uint8 * (count * x.itemsize)).from_address(x.data_ptr())
        wide = torch.frombuffer(memory, dtype=x.dtype, count=count).float()
        return reference.quantize(x, recipe, amax=wide.abs().nan_to_num(nan=0.0).amax().view(1))

    name = "quantize/fp8-current-e4m3/8x32/{}/normal"
    for dtype in ("bf16", "fp16", "fp32"):
        assert wrong_stages(name.format(dtype), Backend.local("wrong", SimpleNamespace(quantize=quantize)))
