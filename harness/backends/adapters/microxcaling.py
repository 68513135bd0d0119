"""microxcaling as a backend: `mx.mx_ops.quantize_mx_op`, whose result is decoded.

The library returns values, element times scale. This adapter divides by the scale, a power of two.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "git 7bc4195"
_INSTALL = "put a checkout of microxcaling, with its folder mx, on PYTHONPATH; no registry has the package"
_FORMATS = {
    "mxfp8-e4m3": "fp8_e4m3", "mxfp8-e5m2": "fp8_e5m2", "mxfp6-e3m2": "fp6_e3m2", "mxfp6-e2m3": "fp6_e2m3",
    "mxfp4": "fp4_e2m1",
}  # fmt: skip
"""Element format of each recipe."""


class Backend:
    """Rounding `nearest`, the default of the library, has ties away from zero; the variant `microxcaling:even` has ties
    to even, which is no dialect: `ocp` keeps the sign of -0.0 and rounds no logarithm."""

    calls: ClassVar = {"": "mx.mx_ops.quantize_mx_op(x, specs, element, axes=[-1], round=…)"}
    dialects: ClassVar = dict.fromkeys(_FORMATS, "microxcaling")
    constraints: ClassVar = {"K": 32, "dtype": ["fp32"], "usage": ["rowwise"]}
    conventions: ClassVar[dict[str, Any]] = {}

    def __init__(self, variant: str = "") -> None:
        if variant not in ("", "even"):
            raise ValueError(f"no variant {variant!r}; microxcaling has even")
        self._even = variant == "even"

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        library("mx.mx_ops", _INSTALL)

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes, dtypes and options."""
        element = _FORMATS[base_name(recipe, _FORMATS, options)]
        if x.dtype is not torch.float32:
            raise NotImplementedError(
                f"float32 only: the library computes in {x.dtype}, whose sums with 1/2 round element values twice"
            )
        x = matrix(x, block=32)
        ops = library("mx.mx_ops", _INSTALL)
        specs = library("mx.specs", _INSTALL).MxSpecs()
        specs["scale_bits"], specs["block_size"] = 8, 32
        values = ops.quantize_mx_op(x, specs, element, axes=[-1], round="even" if self._even else "nearest")
        blocks = x.view(len(x), -1, 32)
        largest = library("mx.formats", _INSTALL)._get_format_params(element)[2]
        exponents = ops._shared_exponents(blocks, axes=[2]).double() - largest
        scales = torch.exp2(exponents.masked_fill(exponents > 127, torch.nan).clamp(min=-127))
        elements = (values.double().view_as(blocks) / scales).nan_to_num_(nan=0.0)
        return elements.view(x.shape), scales.squeeze(2)
