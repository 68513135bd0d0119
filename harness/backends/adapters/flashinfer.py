"""FlashInfer as a backend: the references in PyTorch of its trace templates.

Its kernels need sm_100 for these formats and round in another way (docs/dialects.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, matrix, plain_library
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.7.2.post1"
_INSTALL = "pip install flashinfer-python; without a GPU, with --no-deps"
_TEMPLATES = {"nvfp4": "nvfp4_quantize_trace", "mxfp4": "mxfp4_quantize_trace", "mxfp8-e4m3": "mxfp8_quantize_trace"}


class Backend:
    """The global scale is an argument; the adapter computes 2688/amax as the library's example inputs do,
    but with NaN in the amax."""

    calls: ClassVar = {"": "flashinfer.trace.templates.quantize.<format>_quantize_trace.reference(x, …)"}
    dialects: ClassVar = dict.fromkeys(_TEMPLATES, "flashinfer-trace")
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "encode"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        plain_library("flashinfer.trace.templates.quantize", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for other recipes, shapes and options."""
        name = base_name(recipe, _TEMPLATES, options)
        x = matrix(x, block=16 if name == "nvfp4" else 32)
        templates = plain_library("flashinfer.trace.templates.quantize", _INSTALL)
        reference = getattr(templates, _TEMPLATES[name]).reference
        if name != "nvfp4":
            return reference(x)
        largest = amax(x).clamp(min=1e-12)
        encode = 2688.0 / largest
        codes, scales = reference(x, encode)
        return {"codes": codes, "scales": scales, "amax": largest, "tensor_scale": encode}
