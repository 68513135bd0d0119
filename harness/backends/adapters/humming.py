"""Humming as a backend: the kernel that quantizes the activations of its GEMMs, compiled at run time for a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "humming-kernels 0.1.19"
_INSTALL = "pip install humming-kernels[cu13], for a GPU"
_MODES: dict[str, dict[str, Any]] = {
    "fp8-row-e4m3": {"quant_mode": "dynamic_token"},
    "fp8-block-1x128-e4m3-fp32": {"quant_mode": "dynamic_group", "quant_group_size": 128},
    "mxfp8-e4m3": {"quant_mode": "dynamic_group", "quant_group_size": 32, "group_scale_dtype": "float8e8m0"},
}
"""Arguments of `process_input` for each recipe."""


class Backend:
    """`process_input` of FP8. It stores four E8M0 scales in a word."""

    calls: ClassVar = {"": 'humming.ops.process_input(x, quant_mode=…, quant_dtype="float8e4m3", quant_group_size=…)'}
    dialects: ClassVar = dict.fromkeys(_MODES, "humming")
    constraints: ClassVar = {"K": 128, "usage": ["rowwise"]}
    conventions: ClassVar[dict[str, str]] = {}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError without a GPU."""
        library("humming", _INSTALL)
        if device.type != "cuda":
            raise ValueError("the kernels need --device cuda")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        name = base_name(recipe, _MODES, options)
        x = matrix(x, block=128)
        codes, groups, rows = library("humming.ops", _INSTALL).process_input(
            x, quant_dtype="float8e4m3", **_MODES[name]
        )
        if name == "fp8-row-e4m3":
            return codes, rows
        return codes, groups.view(torch.uint8) if name == "mxfp8-e4m3" else groups
