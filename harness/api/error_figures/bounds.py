"""The interval of correct outputs of a GEMM, for a user's own test."""

from __future__ import annotations

from typing import Any, Literal

import torch

from narrowgauge import adapt
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.judging.judge_output import SLAB, OutputArguments
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.gemm.gemm import check_operands
from narrowgauge.spec.arguments import check_epilogue
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation


def bounds(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: Any = None,
    bias: Any = None,
    order: str = "any",
    accumulator: Literal["nearest", "truncating"] = "nearest",
    subnormals: Literal["kept", "flushed"] = "kept",
    operands: Literal["codes", "decoded-float32", "decoded-bfloat16"] = "codes",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest correct output of a @ b.T (+ c) (+ bias) with a float32 accumulator.

    a, b: Quantized (M, K) and (N, K), of `narrowgauge.quantize` or `narrowgauge.adapt.quantized`, on one device.
    c: (M, N), bias: (N,), float32, bfloat16 or float16.
    order, accumulator, subnormals, operands: as of `narrowgauge.assert_gemm`.

    Returns `lower` and `upper`, (M, N) of dtype `out_dtype`, on the device of the operands: `lower <= y <= upper` for a
    correct output y, and both ends are correct outputs. Ends are equal if no order of additions can round. Then a
    possibly fused addend gives two correct outputs, the ends, and no output between. Special ends:
    - both NaN: only NaN is correct;
    - −inf and inf: overflow depends on the order, and any infinity or NaN is correct too;
    - −0 stands for both zeros, and so does 0: `assert_gemm` also judges the sign of a zero.

    Source of the formula: docs/tolerance.md#gemm. Raises TypeError and ValueError for arguments that do not fit
    together, and ValueError for an unknown order or unknown operands.
    """
    with default_settings():
        arguments = _arguments(a, b, out_dtype, c, bias, order, accumulator, subnormals, operands)
        rows = torch.arange(a.shape[0], device=a.codes.device)
        # The bounds of a slab have float64 temporaries.
        ends = [_ends(arguments.select(slab).bounds()) for slab in torch.split(rows, SLAB)]
        lower, upper = (torch.cat(end) for end in zip(*ends, strict=True))
    return lower, upper


def _arguments(
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    c: Any,
    bias: Any,
    order: str,
    accumulator: str,
    subnormals: str,
    operands: str,
) -> OutputArguments:
    """The checked arguments of a GEMM."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Quantized):
            makers = "narrowgauge.quantize or narrowgauge.adapt.quantized"
            raise TypeError(f"{name} is a Quantized, of {makers}, not {type(operand).__name__}")
    for name, value, values in (
        ("accumulator", accumulator, ("nearest", "truncating")),
        ("subnormals", subnormals, ("kept", "flushed")),
    ):
        if value not in values:
            raise ValueError(f"{name} is {' or '.join(map(repr, values))}, not {value!r}")
    addend, row = (None if value is None else adapt.tensor(value) for value in (c, bias))
    device = a.codes.device
    for name, part in (("b", b.codes), ("c", addend), ("bias", row)):
        if part is not None and part.device != device:
            raise ValueError(f"{name} is on {part.device}; a is on {device}: move one of them")
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, addend, row)
    declared = Summation(
        None if order == "any" else order,
        truncates=accumulator == "truncating",
        flushes=subnormals == "flushed",
        operands=None if operands == "codes" else operands,
    )
    return OutputArguments(a, b, out_dtype, addend, row, declared)


def _ends(limits: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest output that `harness.checks.gemm_bound.within_bounds` accepts."""
    expected, fused = limits.expected, limits.fused
    # The conditions of within_bounds; fmin and fmax leave out a NaN.
    interval = ~limits.exact & limits.centre.isfinite()
    lower, upper = torch.fmin(expected, fused), torch.fmax(expected, fused)
    lower = torch.where(interval, torch.fmin(lower, limits.lower), lower)
    upper = torch.where(interval, torch.fmax(upper, limits.upper), upper)
    anything = limits.undetermined | ((expected.isnan() | fused.isnan()) & ~lower.isnan())
    return lower.masked_fill(anything, -torch.inf), upper.masked_fill(anything, torch.inf)
