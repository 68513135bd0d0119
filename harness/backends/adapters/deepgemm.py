"""DeepGEMM as a backend: the casts of `deep_gemm.utils.math`, on the device of the input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge import adapt
from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "git 54e2261"
_INSTALL = "pip install sgl-deep-gemm, or build DeepGEMM from its repository; both need a GPU machine"
_CASTS = {
    "fp8-block-1x128-e4m3-pow2": ("per_token_cast_to_fp8", True, 128),
    "fp8-block-128x128-e4m3-pow2": ("per_block_cast_to_fp8", True, 128),
    "fp8-block-1x128-e4m3-fp32": ("per_token_cast_to_fp8", False, 128),
    "fp8-block-128x128-e4m3-fp32": ("per_block_cast_to_fp8", False, 128),
    "mxfp8-e4m3": ("per_token_cast_to_fp8", True, 32),
    "mxfp4": ("per_token_cast_to_fp4", True, 32),
}  # fmt: skip
"""Function, powers of two, and block of each recipe."""


class Backend:
    """The casts that make the operands of its GEMMs."""

    dialects: ClassVar = dict.fromkeys(_CASTS, "deepgemm")
    constraints: ClassVar = {"K": 128, "usage": ["rowwise"]}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("deep_gemm.utils.math", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Quantized:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        function, powers, block = _CASTS[base_name(recipe, _CASTS, options)]
        x = matrix(x, block=block)
        math = library("deep_gemm.utils.math", _INSTALL)
        codes, scales = getattr(math, function)(x, powers, gran_k=block)
        return adapt.quantized(codes, scales, recipe, x.shape)
