"""Conch as a backend, on a GPU: its Triton GEMM of FP8 operands with a scale for each tensor or each row, its norms and
SiLU."""

from __future__ import annotations

from typing import ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, library
from narrowgauge.spec.quantized import Quantized

TESTED_VERSION = "conch-triton-kernels 1.3"
_INSTALL = 'pip install "conch-triton-kernels[cuda]", for a GPU'
_RECIPES = ("fp8-current-e4m3", "fp8-row-e4m3")


class Backend:
    """`scaled_gemm`, in tiles of 128x64x64 without masks for K and N."""

    calls: ClassVar = {"": "conch.ops.quantization.gemm.scaled_gemm"}
    dialects: ClassVar = dict.fromkeys(_RECIPES, "te")
    constraints: ClassVar = {"K": 64, "N": 64, "layout": ["tn"]}
    declares: ClassVar = {
        "gemm": "probe-13", "accumulator": "truncating", "silu-mul": "conch-activation",
        **dict.fromkeys(("rmsnorm", "add-rmsnorm"), "conch"),
    }  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError without a GPU."""
        library("conch.ops.quantization.gemm", _INSTALL)
        if device.type != "cuda":
            raise ValueError("the Triton kernels need --device cuda")

    def gemm(self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
        """`a` (M, K), `b` (N, K): the output (M, N). Raises NotImplementedError for other recipes."""
        if base_name(a.recipe, _RECIPES, {}) != base_name(b.recipe, _RECIPES, {}):
            raise NotImplementedError(f"the adapter takes operands of one recipe, not {a.recipe} and {b.recipe}")
        left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))
        scales = (q.scales.view(-1, 1) for q in (a, b))
        module = library("conch.ops.quantization.gemm", _INSTALL)
        output: torch.Tensor = module.scaled_gemm(left, right.T, *scales, out_dtype)
        return output

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        """`rms_norm`."""
        output: torch.Tensor = library("conch.ops.normalization.rms_norm", _INSTALL).rms_norm(x, weight, eps)
        return output

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
    ) -> dict[str, torch.Tensor]:
        """`fused_add_rms_norm`, which writes into copies of its operands."""
        module = library("conch.ops.normalization.rms_norm", _INSTALL)
        output, total = module.fused_add_rms_norm(x.clone(), residual.clone(), weight, eps)
        return {"residual": total, "output": output}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu_and_mul`."""
        output: torch.Tensor = library("conch.ops.activation.silu_and_mul", _INSTALL).silu_and_mul(x)
        return output
