"""comfy-kitchen as a backend: `quantize_nvfp4` and `quantize_mxfp8`, on the device of the input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.2.40"
_RECIPES = ("nvfp4", "mxfp8-e4m3")
_INSTALL = 'pip install "narrowgauge[comfy-kitchen]"'


class Backend:
    """The decode scale amax/2688 is an argument of the library; this adapter divides in float32."""

    calls: ClassVar = {
        "nvfp4": "comfy_kitchen.quantize_nvfp4(x, amax / 2688)",
        "mxfp8-e4m3": "comfy_kitchen.quantize_mxfp8(x)",
    }
    dialects: ClassVar = {"nvfp4": "comfy-kitchen", "mxfp8-e4m3": "torchao-rceil"}
    constraints: ClassVar = {"K": 32, "M": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"nibbles": "high-first", "layout": "128x4", "tensor_scale_is": "decode"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("comfy_kitchen", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        kitchen = library("comfy_kitchen", _INSTALL)
        name = base_name(recipe, _RECIPES, options)
        x = matrix(x, block=32, rows=32)
        if name == "mxfp8-e4m3":
            return kitchen.quantize_mxfp8(x)
        largest = amax(x)
        decode = largest / torch.tensor(2688.0, device=x.device)
        codes, scales = kitchen.quantize_nvfp4(x, decode)
        return {"codes": codes, "scales": scales, "amax": largest, "tensor_scale": decode}
