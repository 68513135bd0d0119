"""torch as a backend: `torch._scaled_mm` on FP8 operands with a scale for each tensor or each row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name
from narrowgauge.spec.quantized import Quantized

TESTED_VERSION = "2.13.0 on a CPU, 2.11 on an H200"
_RECIPES = ("fp8-current-e4m3", "fp8-row-e4m3")


class Backend:
    """On a CPU torch decodes both operands to float32 first. On a GPU the order is that of cuBLAS or CUTLASS."""

    dialects: ClassVar = dict.fromkeys(_RECIPES, "te")
    constraints: ClassVar = {"K": 16, "N": 16, "out": ["bf16", "fp32"], "layout": ["tn"]}
    declares: ClassVar[dict[str, str]] = {"operands": "decoded-float32"}

    def check(self, device: torch.device) -> None:
        """Tensor cores add with a truncating accumulator; a GPU decodes no operand first."""
        if device.type == "cuda":
            self.declares = {"accumulator": "truncating"}  # type: ignore[misc]

    def gemm(self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
        """`a` (M, K), `b` (N, K): the output (M, N). Raises NotImplementedError for other recipes and for row scales
        with float32 outputs on a GPU."""
        name = base_name(a.recipe, _RECIPES, {})
        if base_name(b.recipe, _RECIPES, {}) != name:
            raise NotImplementedError(f"torch._scaled_mm takes operands of one recipe, not {a.recipe} and {b.recipe}")
        scales: Any = (a.scales, b.scales.T.contiguous()) if "row" in name else (a.scales.view(()), b.scales.view(()))
        if "row" in name and out_dtype is not torch.bfloat16 and a.codes.is_cuda:
            raise NotImplementedError("torch._scaled_mm with row scales gives bfloat16 on a GPU")
        fp8 = torch.float8_e4m3fn
        operands = a.codes.view(fp8), b.codes.view(fp8).T
        return torch._scaled_mm(*operands, scale_a=scales[0], scale_b=scales[1], out_dtype=out_dtype)
