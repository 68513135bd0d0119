"""MLX as a backend: `mlx.core.quantize` and `mlx.core.dequantize`, on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge import adapt
from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.32.4"
_MODES = {"nvfp4": ("nvfp4", 16), "mxfp4": ("mxfp4", 32), "mxfp8-e4m3": ("mxfp8", 32)}
"""Mode and block of each recipe."""
_INSTALL = 'pip install "narrowgauge[mlx]"'


class Backend:
    """Quantizers of MLX. NVFP4 has a global scale in dialect `mlx` and with the variant `mlx:global`, else none."""

    calls: ClassVar = {"": "mlx.core.quantize(x, mode=…)"}
    dialects: ClassVar = {"nvfp4": ("mlx-one-level", "mlx"), "mxfp4": "mlx", "mxfp8-e4m3": "mlx"}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar[dict[str, Any]] = {}

    def __init__(self, variant: str = "") -> None:
        if variant not in ("", "global"):
            raise ValueError(f"no variant {variant!r}; mlx has global")
        self._global = variant == "global"

    def check(self, device: torch.device) -> None:
        """Raise an error if MLX is missing or `device` is not the CPU."""
        library("mlx.core", _INSTALL)
        if device.type != "cpu":
            raise ValueError(f"device {device}: this adapter runs MLX on the CPU; use --device cpu")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K) in the mode of `recipe`. Raises NotImplementedError for refused recipes, shapes and options."""
        mode, block = _MODES[base_name(recipe, _MODES, options)]
        x = matrix(x, block=block)
        mx = library("mlx.core", _INSTALL)
        if mode == "nvfp4" and (recipe.dialect == "mlx" or self._global):
            largest = amax(x)
            return *mx.quantize(mx.array(x), mode=mode, global_scale=mx.array(largest)[0])[:2], largest
        return mx.quantize(mx.array(x), mode=mode)[:2]

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """Values of `q` in `dtype`. With a global scale MLX multiplies by s·(amax/2688), which no recipe has."""
        if q.amax is not None:
            raise NotImplementedError("no recipe decodes with s*(amax/2688), as MLX does with a global scale")
        mode, _ = _MODES[base_name(q.recipe, _MODES, {})]
        mx = library("mlx.core", _INSTALL)
        words = mx.array(q.codes.contiguous().view(torch.int32)).view(mx.uint32)
        return adapt.tensor(mx.dequantize(words, mx.array(q.scales), mode=mode, dtype=getattr(mx, str(dtype)[6:])))
