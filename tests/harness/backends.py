"""Backends for the tests of the harness: the reference's doors, with something done to what they give."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from harness.backend import Backend
from harness.case import Case
from reference import ops as reference
from reference.quantized import Quantized

QUANTIZE = Case("quantize", "nvfp4", (32, 48), "bf16", "normal")
GEMM = Case("gemm", "nvfp4", (16, 64, 24), "bf16xbf16-fp32", "normal", ("tn",))


def backend(**doors: Any) -> Backend:
    """A backend with these doors and no other."""
    return Backend("wrong", SimpleNamespace(**doors))


def quantize(change: Callable[[Quantized], object]) -> Callable[..., Any]:
    """A quantize that gives what `change` makes of the reference's result: the result itself where that is None."""

    def door(x, recipe):
        q = reference.quantize(x, recipe)
        changed = change(q)
        return q if changed is None else changed

    return door


def gemm(change: Callable[[Any], object]) -> Callable[..., Any]:
    """A gemm that gives what `change` makes of the reference's output: the output itself where that is None."""

    def door(a, b, **options):
        out = reference.gemm(a, b, **options)
        changed = change(out)
        return out if changed is None else changed

    return door


def without_amax(q: Quantized) -> Quantized:
    """`q` of a kernel that shows neither amax nor tensor scale."""
    return replace(q, amax=None, tensor_scale=None)
