"""gguf as a backend: `MXFP4.quantize_blocks` of its Python package, on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy
import torch

from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.19.0"
_INSTALL = 'pip install "narrowgauge[gguf]"'


class Backend:
    """A block of 32 elements has 17 bytes: the scale, then 16 bytes of codes."""

    calls: ClassVar = {"": "gguf.quants.MXFP4.quantize_blocks(x.numpy().reshape(-1, 32))"}
    dialects: ClassVar = {"mxfp4": "gguf"}
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"nibbles": "halves"}

    def check(self, device: torch.device) -> None:
        """Raise an error if the library is missing or `device` is not the CPU."""
        library("gguf", _INSTALL)
        if device.type != "cpu":
            raise ValueError(f"device {device}: gguf quantizes on the CPU; use --device cpu")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        base_name(recipe, self.dialects, options)
        x = matrix(x, block=32)
        quants = library("gguf", _INSTALL).quants
        with numpy.errstate(all="ignore"):  # it warns of every infinity and NaN
            blocks = quants.MXFP4.quantize_blocks(x.float().numpy().reshape(-1, 32))
        stored = torch.from_numpy(blocks).view(len(x), -1, 17)
        return stored[:, :, 1:].flatten(1), stored[:, :, 0]
