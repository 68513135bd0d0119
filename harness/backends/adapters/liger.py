"""Liger Kernel as a backend, on a GPU: norms and gated activations in Triton, made for training."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import library

TESTED_VERSION = "liger-kernel 0.8.5"
_INSTALL = "pip install liger-kernel, for a GPU"
VARIANTS = ("gemma",)
"""The casting mode of the norms; the default is llama."""


class Backend:
    """Norms with `casting_mode="llama"`: a cast before the weight; of `liger:gemma`, none. The results are new tensors:
    `in_place` concerns gradients alone."""

    calls: ClassVar = {"": "liger_kernel.transformers.functional.liger_<operation>"}
    dialects: ClassVar[dict[str, str]] = {}

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; liger has {', '.join(VARIANTS)}")
        self._mode = variant or "llama"
        norm = "liger-gemma" if variant else "liger"
        self.declares: dict[str, Any] = {
            **dict.fromkeys(("rmsnorm", "add-rmsnorm"), norm), **dict.fromkeys(("silu-mul", "gelu-mul"), "liger"),
        }  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError without a GPU."""
        library("liger_kernel.ops.rms_norm", _INSTALL)
        if device.type != "cuda":
            raise ValueError("the Triton kernels need --device cuda")

    def warm_up(self, device: torch.device) -> None:
        """Import and compile all kernels: torch._dynamo alone takes most of a minute."""
        x = torch.ones(1, 32, dtype=torch.bfloat16, device=device)
        self.rmsnorm(x, x[0])
        self.add_rmsnorm(x, x, x[0])
        self.silu_mul(x)
        self.gelu_mul(x)

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, zero_centered: bool = False
    ) -> torch.Tensor:
        """`liger_rms_norm`; zero_centered is an offset of 1."""
        y: torch.Tensor = _call("rms_norm", "LigerRMSNorm", x, weight, eps, float(zero_centered), self._mode)
        return y

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6,
        zero_centered: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """`liger_fused_add_rms_norm`."""
        offset = float(zero_centered)
        y, total = _call("fused_add_rms_norm", "LigerFusedAddRMSNorm", x, residual, weight, eps, offset, self._mode)
        return {"residual": total, "output": y}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`liger_swiglu` of the halves of the columns."""
        y: torch.Tensor = _call("swiglu", "LigerSiLUMul", *x.chunk(2, dim=1))
        return y

    def gelu_mul(self, x: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
        """`liger_geglu` of the halves of the columns. Raises NotImplementedError for GELU by erf."""
        if approximate != "tanh":
            raise NotImplementedError(f"liger has GELU by tanh, not by {approximate}")
        y: torch.Tensor = _call("geglu", "LigerGELUMul", *x.chunk(2, dim=1))
        return y


def _call(module: str, name: str, *arguments: Any) -> Any:
    """The forward pass of an autograd function of the library."""
    return getattr(library(f"liger_kernel.ops.{module}", _INSTALL), f"{name}Function").apply(*arguments)
