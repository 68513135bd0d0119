"""compressed-tensors as a backend: `calculate_qparams` of minimum and maximum, then `quantize`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.20.0"
_INSTALL = 'pip install "narrowgauge[compressed-tensors]"'
_PRESETS = {"nvfp4": ("NVFP4", 16), "mxfp4": ("MXFP4", 32), "mxfp8-e4m3": ("MXFP8", 32)}
"""Scheme and block of each recipe with blocks."""
_STRATEGIES = {"fp8-row-e4m3": "channel", "fp8-current-e4m3": "tensor"}


class Backend:
    """Weights of a scheme; the encode scale of NVFP4 is that of the weights themselves."""

    calls: ClassVar = {"": "compressed_tensors.quantization.lifecycle.forward.quantize(x, scale, zero_point, args)"}
    dialects: ClassVar = dict.fromkeys((*_PRESETS, *_STRATEGIES), ("compressed-tensors",))
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "encode"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("compressed_tensors", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, self.dialects, options)
        module = library("compressed_tensors.quantization", _INSTALL)
        utils = library("compressed_tensors.quantization.utils", _INSTALL)
        quantize = library("compressed_tensors.quantization.lifecycle.forward", _INSTALL).quantize
        x = matrix(x, block=_PRESETS.get(name, ("", 1))[1])
        if name in _STRATEGIES:
            strategy = _STRATEGIES[name]
            arguments = module.QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
            dims = (1,) if strategy == "channel" else (0, 1)
            scale, zero = utils.calculate_qparams(x.amin(dims, keepdim=True), x.amax(dims, keepdim=True), arguments)
            shaped = (scale.view(1), zero.view(1)) if scale.numel() == 1 else (scale, zero)
            return quantize(x, *shaped, arguments, dtype=torch.float8_e4m3fn), scale
        preset, block = _PRESETS[name]
        arguments = module.preset_name_to_scheme(preset, ["Linear"]).weights
        blocks = x.view(x.shape[0], -1, block)
        encode = utils.generate_gparam(x.amin(), x.amax()) if name == "nvfp4" else None
        scales, zeros = utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=encode)
        values = quantize(x, scales, zeros, arguments, global_scale=encode)
        if encode is None:
            return values.float() if name == "mxfp4" else values.to(torch.float8_e4m3fn), scales.float()
        return {
            "codes": values.float(), "scales": scales.to(torch.float8_e4m3fn), "amax": amax(x),
            "tensor_scale": encode.float().view(1),
        }  # fmt: skip
