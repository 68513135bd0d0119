"""The methods of a backend that quantize, called with checked results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, non_default
from narrowgauge.harness.backends.results import TensorForm, as_quantized, matrix_shape, type_name
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES, ScaleLayout


def _layout(layout: ScaleLayout) -> dict[str, Any]:
    """The argument that asks a method for a layout of scales. A method without it does not support the case."""
    return {"swizzled": True} if layout == TILES else {} if layout == LINEAR else {"scales": layout}


def quantize(
    backend: Backend,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    layout: ScaleLayout = LINEAR,
) -> Quantized:
    """Result of `quantize` as a Quantized with checked shapes and dtypes."""
    options = non_default(amax=amax, scale=scale, random=random, **_layout(layout))
    result = backend.call("quantize", x, recipe, **options)
    return as_quantized(result, x, recipe, layout=layout, method="quantize")


def quantize_halves(
    backend: Backend,
    halves: Sequence[Half],
    x: torch.Tensor,
    recipe: Recipe,
    *,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: Random | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    layout: ScaleLayout = LINEAR,
) -> list[Quantized]:
    """Results of `quantize_both` for some halves, in the order of Half, with checked shapes and dtypes."""
    options = non_default(amax=amax, scale=scale, random=random, **_layout(layout))
    options |= {half.value: False for half in Half if half not in halves}
    result = backend.call("quantize_both", x, recipe, **options)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise BackendError(f"quantize_both gave {type_name(result)}; it gives a rowwise and a columnwise half")
    quantized = []
    for half in Half:
        found, requested = half.pick(result), half in halves
        if (found is not None) != requested:
            raise BackendError(f"quantize_both gave {'no' if requested else 'a'} {half} half, {half}={requested}")
        if requested:
            shape, transposed = half.shape(matrix_shape(x)), half.transposed(recipe)
            quantized.append(
                as_quantized(
                    found, x, half.recipe(recipe), shape=shape, layout=layout, transposed=transposed,
                    method=f"the {half} half of quantize_both",
                )
            )  # fmt: skip
    return quantized


def dequantize(backend: Backend, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Result of `dequantize`, (M, K) in `dtype`."""
    return backend.results("dequantize", {"values": TensorForm(q.shape, dtype)}, q, dtype)["values"]
