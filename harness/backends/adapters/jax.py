"""JAX as a backend: the quantizer of `jax.nn.scaled_dot_general`, compiled by XLA for a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.10.2"
_MODES = {"nvfp4": ("nvfp4", 16), "mxfp8-e4m3": ("mxfp8", 32)}
"""Mode and block of each recipe."""
_INSTALL = 'pip install "narrowgauge[jax]"'


class Backend:
    """XLA flushes subnormal numbers on a CPU (docs/dialects.md)."""

    calls: ClassVar = {"": "jax._src.cudnn.scaled_matmul_stablehlo.quantize(x, config)"}
    dialects: ClassVar = {"nvfp4": "jax", "mxfp8-e4m3": "te"}
    declares: ClassVar = {"subnormals": "flushed"}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"nibbles": "unpacked"}

    def check(self, device: torch.device) -> None:
        """Raise an error if JAX is missing or `device` is not the CPU."""
        library("jax", _INSTALL)
        if device.type != "cpu":
            raise ValueError(f"device {device}: this adapter runs JAX on the CPU; use --device cpu")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        mode, block = _MODES[base_name(recipe, _MODES, options)]
        x = matrix(x, block=block)
        largest = amax(x) if mode == "nvfp4" else None
        decode = None if largest is None else largest / torch.tensor(2688.0)
        array = library("jax.numpy", _INSTALL).from_dlpack
        codes, scales = _compiled(mode)(array(x), None if decode is None else array(decode)[0])
        return codes, scales, largest


@cache
def _compiled(mode: str) -> Any:
    """The quantizer of a mode, of an array and its global scale. With a constant scale, XLA would reorder the
    operations."""
    jax = library("jax", _INSTALL)
    quantize = library("jax._src.cudnn.scaled_matmul_stablehlo", _INSTALL).quantize
    return jax.jit(lambda x, decode: quantize(x, jax.nn.get_scaled_dot_general_config(mode, decode)))
