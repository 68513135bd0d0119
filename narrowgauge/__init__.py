"""Numerics tests for narrow-precision kernels: a bit-exact reference, kernels, and a harness that compares the two.

The names below load on first use: `import narrowgauge` imports neither torch nor the reference.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.spec.version import VERSION as __version__

if TYPE_CHECKING:
    from narrowgauge.reference.ops import (
        dequantize,
        gemm,
        gemm_grouped,
        gemm_quantized,
        quantize,
        quantize_both,
        quantize_grouped,
        swizzle,
        transform,
        unswizzle,
        update_scale,
    )
    from narrowgauge.spec.quantized import GroupedQuantized, Quantized
    from narrowgauge.spec.recipes import Recipe
    from narrowgauge.spec.recipes import find_recipe as recipe

__all__ = [
    "GroupedQuantized", "Quantized", "Recipe", "__version__", "dequantize", "gemm", "gemm_grouped", "gemm_quantized",
    "quantize", "quantize_both", "quantize_grouped", "recipe", "swizzle", "transform", "unswizzle", "update_scale",
]  # fmt: skip

_SPEC = {
    "GroupedQuantized": "narrowgauge.spec.quantized", "Quantized": "narrowgauge.spec.quantized",
    "Recipe": "narrowgauge.spec.recipes", "recipe": "narrowgauge.spec.recipes",
}  # fmt: skip
"""Module of each name of the vocabulary. Every other name is a method of the reference."""
_NAME_IN_MODULE = {"recipe": "find_recipe"}
"""Public names that differ from the names in their modules."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    module = import_module(_SPEC.get(name, "narrowgauge.reference.ops"))
    value: Any = getattr(module, _NAME_IN_MODULE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
