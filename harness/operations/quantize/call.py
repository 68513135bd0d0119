"""The methods of a backend that quantize, called with checked results."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, non_default
from narrowgauge.harness.backends.results import TensorForm, as_quantized, matrix_shape, type_name
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def quantize(
    backend: Backend,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    swizzled: bool = False,
) -> Quantized:
    """Result of `quantize` as a Quantized with checked shapes and dtypes."""
    options = non_default(amax=amax, scale=scale, random=random, swizzled=swizzled)
    result = backend.call("quantize", x, recipe, **options)
    return as_quantized(result, x, recipe, swizzled=swizzled, method="quantize")


def quantize_both(
    backend: Backend,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: Random | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Results of `quantize_both`: both halves as Quantized, None for a half without a request."""
    options = non_default(amax=amax, scale=scale, random=random, swizzled=swizzled)
    options |= {name: False for name, halves in (("rowwise", rowwise), ("columnwise", columnwise)) if not halves}
    result = backend.call("quantize_both", x, recipe, **options)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise BackendError(f"quantize_both gave {type_name(result)}; it gives a rowwise and a columnwise half")
    shape = matrix_shape(x)
    quantized = []
    halves = (("rowwise", rowwise, shape, recipe.rowwise), ("columnwise", columnwise, shape[::-1], recipe))
    for half, (name, requested, half_shape, half_recipe) in zip(result, halves, strict=True):
        if (half is not None) != requested:
            raise BackendError(f"quantize_both gave {'no' if requested else 'a'} {name} half, {name}={requested}")
        layout: dict[str, Any] = {"shape": half_shape, "swizzled": swizzled}
        layout |= {"transposed": name == "columnwise" and recipe.columnwise == "in-place"}
        half_name = f"the {name} half of quantize_both"
        quantized.append(as_quantized(half, x, half_recipe, **layout, method=half_name) if requested else None)
    return quantized[0], quantized[1]


def dequantize(backend: Backend, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Result of `dequantize`, (M, K) in `dtype`."""
    return backend.results("dequantize", {"values": TensorForm(q.shape, dtype)}, q, dtype)["values"]
