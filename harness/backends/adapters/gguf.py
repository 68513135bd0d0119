"""gguf as a backend: `MXFP4.quantize_blocks` of its Python package, on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge import adapt
from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.19.0"
_INSTALL = 'pip install "narrowgauge[gguf]"'


class Backend:
    """A block of 32 elements has 17 bytes: the scale, then element i low and element i + 16 high."""

    dialects: ClassVar = {"mxfp4": "gguf"}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}

    def check(self, device: torch.device) -> None:
        """Raise an error if the library is missing or `device` is not the CPU."""
        library("gguf", _INSTALL)
        if device.type != "cpu":
            raise ValueError(f"device {device}: gguf quantizes on the CPU; use --device cpu")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Quantized:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        base_name(recipe, self.dialects, options)
        x = matrix(x, block=32)
        blocks = library("gguf", _INSTALL).quants.MXFP4.quantize_blocks(x.float().numpy().reshape(-1, 32))
        stored = torch.from_numpy(blocks)
        codes = torch.cat([stored[:, 1:] & 0xF, stored[:, 1:] >> 4], 1).reshape(x.shape)
        return adapt.quantized(codes, stored[:, 0].reshape(x.shape[0], -1), recipe, x.shape, nibbles="unpacked")
