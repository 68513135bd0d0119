"""Transformer Engine as a backend: the quantizers of its Python reference, `custom_recipes`.

The reference is plain PyTorch. Without the compiled extension of the library it is loaded with stand-ins for the base
classes of its quantizers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, matrix, plain_library
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "2.20.2, and git d0067d0"
_INSTALL = 'pip install --no-deps "transformer-engine>=2.20"'
_NVFP4: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "nvfp4-2d": {"quant_tile_shape": (16, 16)},
    "nvfp4-rowscaled": {"row_scaled_nvfp4": True},
    **{
        f"nvfp4{tile}-4over6-{most}-{error}": {
            "nvfp4_use_4over6": True, "nvfp4_e4m3_max": most, "nvfp4_4over6_err_mode": error.upper(),
        } | ({"quant_tile_shape": (16, 16)} if tile else {})
        for tile in ("", "-2d") for most in (448, 256) for error in ("mae", "mse")
    },
}  # fmt: skip
"""Arguments of `NVFP4QuantizerRef` for each recipe."""
_CURRENT: dict[str, dict[str, Any]] = {
    f"fp8-current-{kind}{powers}": {"dtype": dtype, "pow_2_scales": bool(powers)}
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)) for powers in ("", "-pow2")
}  # fmt: skip
"""Arguments of `CurrentScalingQuantizerRef` for each recipe."""


class Backend:
    """Rowwise results of the reference. Its kernels store -0.0 and NaN in another way: dialect `te`."""

    calls: ClassVar = {
        "": "reference_nvfp4.NVFP4QuantizerRef(…).quantize(x)",
        **dict.fromkeys(_CURRENT, "reference_current_scaling.CurrentScalingQuantizerRef(…).quantize(x)"),
    }
    dialects: ClassVar = {
        name: "te-reference" if name in _NVFP4 and "4over6" not in name else "te" for name in (*_NVFP4, *_CURRENT)
    }
    constraints: ClassVar = {"K": 16, "usage": ["rowwise"]}
    conventions: ClassVar[dict[str, Any]] = {}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        _reference("reference_nvfp4")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, self.dialects, options)
        rows = 16 if "-2d" in name else 1
        x = matrix(x, block=16 if name in _NVFP4 else 1, rows=rows)
        if name in _CURRENT:
            module = _reference("reference_current_scaling")
            result = module.CurrentScalingQuantizerRef(columnwise=False, **_CURRENT[name]).quantize(x)
            return result.data, result.scale
        module = _reference("reference_nvfp4")
        formats = module.reference_utils.Fp4Formats
        result = module.NVFP4QuantizerRef(formats.E2M1, columnwise=False, **_NVFP4[name]).quantize(x)
        return result.data, result.scale, result.global_amax_row.view(-1)

    def gemm(self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
        """`a` (M, K), `b` (N, K): the output (M, N) of `qgemm`. Raises NotImplementedError for refused recipes."""
        if {base_name(q.recipe, self.dialects, {}) for q in (a, b)} != {"nvfp4"}:
            raise NotImplementedError(f"no product of {a.recipe} and {b.recipe}")
        if a.shape[1] % 32 or b.shape[0] % 8:
            raise NotImplementedError(f"K = {a.shape[1]}, N = {b.shape[0]}: qgemm takes K % 32 = 0 and N % 8 = 0")
        module = _reference("reference_nvfp4")
        quantizer = module.NVFP4QuantizerRef(module.reference_utils.Fp4Formats.E2M1)
        x, w = (SimpleNamespace(global_amax_row=q.amax, global_amax_col=q.amax) for q in (a, b))
        scales = {"sx": a.scales.view(torch.float8_e4m3fn), "sw": b.scales.view(torch.float8_e4m3fn)}
        result: torch.Tensor = quantizer.qgemm(
            a.codes, b.codes, None, out_dtype, **scales, qresult_x=x, qresult_w=w
        )  # fmt: skip
        return result


_GEMM_TYPE = SimpleNamespace(FPROP="fprop", DGRAD="dgrad", WGRAD="wgrad")


class _Quantizer:
    """The attributes of Transformer Engine's base class that the references use."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False


def _reference(module: str) -> Any:
    """A module of `custom_recipes`."""
    bases = {"Quantizer": _Quantizer, "QuantizedTensorStorage": object}
    return plain_library(
        f"transformer_engine.pytorch.custom_recipes.{module}", _INSTALL,
        {
            "transformer_engine.pytorch.quantized_tensor": bases,
            "transformer_engine.pytorch.custom_recipes.gemm": {"GEMMType": _GEMM_TYPE, "MMParams": object},
        },
    )  # fmt: skip
