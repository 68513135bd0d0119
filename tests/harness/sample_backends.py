"""Backends for the tests of the harness: the reference's methods, with changed results."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Hadamard, find_recipe

QUANTIZE = case_from_labels("quantize", "nvfp4", (32, 48), "bf16", "normal")
GEMM = case_from_labels("gemm", "nvfp4", (16, 64, 24), "bf16xbf16-fp32", "normal", ("tn",))


def backend(**doors: Any) -> Backend:
    """A backend with exactly these methods."""
    return Backend.local("wrong", SimpleNamespace(**doors))


def quantize(change: Callable[[Quantized], object]) -> Callable[..., Any]:
    """A quantize with `change` of the reference's result, or the result itself if the change is None."""

    def door(x, recipe, **options):
        q = reference.quantize(x, recipe, **options)
        changed = change(q)
        return q if changed is None else changed

    return door


def gemm(change: Callable[[Any], object]) -> Callable[..., Any]:
    """A gemm with `change` of the reference's output, or the output itself if the change is None."""

    def door(a, b, **options):
        out = reference.gemm(a, b, **options)
        changed = change(out)
        return out if changed is None else changed

    return door


def without_amax(q: Quantized) -> Quantized:
    """`q` of a kernel that reports neither amax nor tensor scale."""
    return replace(q, amax=None, tensor_scale=None)


def terms(x: torch.Tensor, rotation: Hadamard) -> torch.Tensor:
    """The products of every sum of a rotation, float32: (groups, outputs, inputs)."""
    k = torch.arange(rotation.group)
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in k] for i in k])
    entries = (1.0 - 2.0 * parity) * signs(rotation) * coefficient(rotation.group)
    return x.float().reshape(-1, 1, rotation.group) * entries


def in_turn(values: torch.Tensor) -> torch.Tensor:
    """The last dimension added up in float32, in turn."""
    total = torch.zeros(values.shape[:-1])
    for value in values.unbind(-1):
        total = total + value
    return total


def rotating(add: Callable[[torch.Tensor], torch.Tensor] = in_turn, **changes: Any) -> dict[str, Callable[..., Any]]:
    """The methods quantize and transform of a kernel with its own order of additions, or with a given `Hadamard`."""

    def transform(x, recipe):
        rotation = replace(find_recipe(recipe).transform, **changes)
        return add(terms(x, rotation)).to(x.dtype).view(x.shape)

    def quantize(x, recipe, **options):
        recipe = find_recipe(recipe)
        rotated = transform(x, recipe) if recipe.transform else x
        return replace(reference.quantize(rotated, recipe.rowwise, **options), recipe=recipe)

    return {"quantize": quantize, "transform": transform}
