"""FlashInfer as a backend: the references in PyTorch of its trace templates; on a GPU its norms and activations.

Its kernels of quantization need sm_100 for these formats and round in another way (docs/dialects.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix, on_gpu, plain_library
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.7.2.post1"
_INSTALL = "pip install flashinfer-python; without a GPU, with --no-deps"
_TEMPLATES = {"nvfp4": "nvfp4_quantize_trace", "mxfp4": "mxfp4_quantize_trace", "mxfp8-e4m3": "mxfp8_quantize_trace"}


class Backend:
    """The global scale is an argument; the adapter computes 2688/amax as the library's example inputs do,
    but with NaN in the amax."""

    calls: ClassVar = {"": "flashinfer.trace.templates.quantize.<format>_quantize_trace.reference(x, …)"}
    dialects: ClassVar = dict.fromkeys(_TEMPLATES, "flashinfer-trace")
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "encode"}
    declares: ClassVar = {
        **dict.fromkeys(("rmsnorm", "add-rmsnorm"), "flashinfer-norm"),
        **dict.fromkeys(("silu-mul", "gelu-mul"), "flashinfer-activation"),
    }

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        plain_library("flashinfer.trace.templates.quantize", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, _TEMPLATES, options)
        x = matrix(x, block=16 if name == "nvfp4" else 32)
        templates = plain_library("flashinfer.trace.templates.quantize", _INSTALL)
        reference = getattr(templates, _TEMPLATES[name]).reference
        if name != "nvfp4":
            return reference(x)
        largest = amax(x).clamp(min=1e-12)
        encode = 2688.0 / largest
        codes, scales = reference(x, encode)
        return {"codes": codes, "scales": scales, "amax": largest, "tensor_scale": encode}

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, zero_centered: bool = False
    ) -> torch.Tensor:
        """`rmsnorm` and `gemma_rmsnorm`, on a GPU."""
        y: torch.Tensor = _kernel(x, "norm", "gemma_rmsnorm" if zero_centered else "rmsnorm")(x, weight, eps)
        return y

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6,
        zero_centered: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """`fused_add_rmsnorm` and `gemma_fused_add_rmsnorm`, on a GPU, which write into copies of their operands."""
        output, total = x.clone(), residual.clone()
        name = "gemma_fused_add_rmsnorm" if zero_centered else "fused_add_rmsnorm"
        _kernel(x, "norm", name)(output, total, weight, eps)
        return {"residual": total, "output": output}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu_and_mul`, on a GPU."""
        y: torch.Tensor = _kernel(x, "activation", "silu_and_mul")(x)
        return y

    def gelu_mul(self, x: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
        """`gelu_tanh_and_mul` and `gelu_and_mul`, on a GPU."""
        y: torch.Tensor = _kernel(x, "activation", {"tanh": "gelu_tanh_and_mul", "erf": "gelu_and_mul"}[approximate])(x)
        return y


def _kernel(x: torch.Tensor, module: str, name: str) -> Any:
    on_gpu(x, "FlashInfer")
    return getattr(library(f"flashinfer.{module}", _INSTALL), name)
