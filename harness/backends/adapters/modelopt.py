"""nvidia-modelopt as a backend: `NVFP4QTensor`, `MXFP4QTensor`, `MXFP8QTensor` and `FP8QTensor`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.47.0"
_INSTALL = 'pip install "narrowgauge[modelopt]"'
_FP8: dict[str, dict[str, Any]] = {
    "fp8-block-1x128-e4m3-fp32": {"block_sizes": {-1: 128}}, "fp8-row-e4m3": {"axis": 0}, "fp8-current-e4m3": {},
}  # fmt: skip
"""Arguments of `FP8QTensor.quantize`."""


class Backend:
    """Quantizers without calibration: amaxes are those of the input."""

    calls: ClassVar = {
        "nvfp4": "NVFP4QTensor.quantize(x, 16)",
        "mxfp4": "MXFP4QTensor.quantize(x, 32)",
        "mxfp8-e4m3": "MXFP8QTensor.quantize(x)",
        "": "FP8QTensor.quantize(x, …)",
    }
    dialects: ClassVar = dict.fromkeys(("nvfp4", "mxfp4", "mxfp8-e4m3", *_FP8), ("modelopt",))
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "decode"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("modelopt.torch.quantization.qtensor", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, self.dialects, options)
        types = library("modelopt.torch.quantization.qtensor", _INSTALL)
        x = matrix(x, block={"nvfp4": 16, "fp8-block-1x128-e4m3-fp32": 128}.get(name, 32))
        if name == "nvfp4":
            result, scales, decode = types.NVFP4QTensor.quantize(x, 16)
            return {
                "codes": result._quantized_data, "scales": scales, "amax": amax(x), "tensor_scale": decode.view(1),
            }  # fmt: skip
        if name in _FP8:
            fp8 = library("modelopt.torch.quantization.qtensor.fp8_tensor", _INSTALL).FP8QTensor
            result, scales = fp8.quantize(x, **_FP8[name])
        else:
            mxfp4 = name == "mxfp4"
            result, scales = types.MXFP4QTensor.quantize(x, 32) if mxfp4 else types.MXFP8QTensor.quantize(x)
            scales = scales.reshape(x.shape[0], -1)
        return result._quantized_data, scales
