"""comfy-kitchen as a backend: `quantize_nvfp4` and `quantize_mxfp8`, on the device of the input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge import adapt
from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.2.40"
_RECIPES = ("nvfp4", "mxfp8-e4m3")
_INSTALL = 'pip install "narrowgauge[comfy-kitchen]"'


class Backend:
    """The decode scale amax/2688 is an argument of the library; this adapter divides in float32."""

    dialects: ClassVar = {"nvfp4": "comfy-kitchen", "mxfp8-e4m3": "torchao-rceil"}
    constraints: ClassVar = {"K": 32, "M": 32, "usage": ["rowwise"]}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("comfy_kitchen", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Quantized:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        kitchen = library("comfy_kitchen", _INSTALL)
        name = base_name(recipe, _RECIPES, options)
        x = matrix(x, block=32, rows=32)
        if name == "mxfp8-e4m3":
            codes, scales = kitchen.quantize_mxfp8(x)
            return _linear(codes, scales, recipe, x)
        largest = amax(x)
        decode = largest / torch.tensor(2688.0, device=x.device)
        codes, scales = kitchen.quantize_nvfp4(x, decode)
        return _linear(
            codes, scales, recipe, x,
            nibbles="high-first", amax=largest, tensor_scale=decode, tensor_scale_is="decode",
        )  # fmt: skip


def _linear(codes: Any, scales: Any, recipe: Recipe, x: torch.Tensor, **conventions: Any) -> Quantized:
    """A result with its scales in the 128×4 layout, read back to linear scales."""
    swizzled = adapt.quantized(codes, scales, recipe, x.shape, layout="128x4", **conventions)
    rows, columns = x.shape[0], -(-x.shape[1] // recipe.block[1])
    tiles = swizzled.scales.view(-1, -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    linear = tiles.reshape(-1, -(-columns // 4) * 4)[:rows, :columns].contiguous()
    return Quantized(swizzled.codes, linear, swizzled.amax, recipe, swizzled.shape, swizzled.tensor_scale)
