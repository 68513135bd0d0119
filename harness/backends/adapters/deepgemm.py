"""DeepGEMM as a backend: the casts of `deep_gemm.utils.math`, on the device of the input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, matrix, plain_library
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "git 54e2261 on a CPU, sgl-deep-gemm 0.2.0 on an H200"
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
    """The casts that make the operands of its GEMMs. `deepgemm:packed` asks for four E8M0 scales in a word."""

    calls: ClassVar = {"": "deep_gemm.utils.math.per_token_cast_to_fp8, per_block_cast_to_fp8 or per_token_cast_to_fp4"}
    dialects: ClassVar = dict.fromkeys(_CASTS, "deepgemm")
    constraints: ClassVar = {"K": 128, "usage": ["rowwise"]}

    def __init__(self, variant: str = "") -> None:
        if variant not in ("", "packed"):
            raise ValueError(f"no variant {variant!r}; deepgemm has packed")
        self._packed = variant == "packed"
        self.conventions = {"layout": "padded" if self._packed else "linear"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        plain_library("deep_gemm.utils.math", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        function, powers, block = _CASTS[base_name(recipe, _CASTS, options)]
        x = matrix(x, block=block)
        packed = {"use_packed_ue8m0": True} if self._packed else {}
        if packed and ("token" not in function or not powers or x.shape[1] // block % 4):
            raise NotImplementedError(f"no packed scales for {recipe} of shape {tuple(x.shape)}")
        math = plain_library("deep_gemm.utils.math", _INSTALL)
        return getattr(math, function)(x, powers, gran_k=block, **packed)
