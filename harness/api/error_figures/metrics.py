"""Figures of the distance between two tensors. They are for information: no verdict depends on a figure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge import adapt
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.distance import Comparison
from narrowgauge.harness.checks.finding import histogram
from narrowgauge.spec.arguments import dtype_name
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format

CHUNK = 1 << 24
"""Elements of a chunk. Its temporaries have up to 100 bytes per element."""
_FORMATS = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float8_e8m0fnu: E8M0, torch.float4_e2m1fn_x2: E2M1,
    torch.float8_e4m3fnuz: E4M3FNUZ, torch.float8_e5m2fnuz: E5M2FNUZ,
}  # fmt: skip
DTYPES = (*INPUT_DTYPES, *_FORMATS)


@dataclass(frozen=True)
class Metrics:
    """Figures of `actual` against `expected`, element by element. d is the difference actual − expected.

    Two NaN are equal, also with different payloads and signs, and two infinities of equal sign are equal: their d is 0.
    d is infinite for an element with NaN or an infinity on one side only, or with infinities of opposite signs.
    """

    elements: int
    """Number of elements."""
    unequal: int
    """Elements with different numbers. −0 and 0 are equal."""
    nan_mismatches: int
    """Number of elements with NaN on a single side."""
    inf_mismatches: int
    """Elements without NaN, with an infinity on one side only or with infinities of opposite signs."""
    zero_sign_mismatches: int
    """Number of elements with −0 on a side and 0 on the opposite side."""
    max_ulp: int
    """Largest distance in steps of the dtype of `expected`: 1 for neighbouring numbers, 0 for −0 and 0. Infinity is one
    step above the largest finite number. Elements with NaN are left out."""
    max_abs_error: float
    """Largest |d|."""
    relative_error: float
    """Relative Frobenius error √Σd² / √Σexpected², with the sum over the finite elements of `expected`. 0 if all d are
    0; inf if a d is infinite, or if `expected` is 0 and a d is not."""
    sqnr_db: float
    """Signal to quantization noise ratio in decibels, −20·log10(relative_error): inf if all d are 0."""
    histogram: tuple[tuple[int, int, int], ...]
    """Ascending bins (low, high, count): `count` elements are `low` to `high` steps above `expected`. Bins are 0, 1, 2,
    3 to 4, 5 to 8 and so on, and the same with negative signs. Empty bins and elements with NaN are left out."""


def metrics(actual: Any, expected: Any) -> Metrics:
    """Figures of the distance of `actual` from `expected`, with float64 sums, on the device of the tensors.

    actual, expected: equal shapes on one device, and equal dtypes: float32, bfloat16, float16, float8_e4m3fn,
    float8_e5m2, float8_e8m0fnu or float4_e2m1fn_x2 (two elements in a byte). With `expected` in float32, `actual` has
    any of these dtypes. Steps are those of the dtype of `expected`: convert a float32 reference to the dtype of the
    kernel's output to count ulps of the output.

    Raises TypeError for other dtypes, ValueError for different shapes or devices.
    """
    with default_settings():
        found, reference = adapt.tensor(actual), adapt.tensor(expected)
        _check(found, reference)
        fmt = _FORMATS.get(reference.dtype)
        a, e = _elements(found), _elements(reference)
        if a.shape != e.shape:
            raise ValueError(f"actual has shape {tuple(a.shape)}; expected has {tuple(e.shape)}")
        a, e = a.reshape(-1), e.reshape(-1)
        parts = []
        for start in range(0, e.numel(), CHUNK):
            part, right = a[start : start + CHUNK], e[start : start + CHUNK]
            if found.dtype != reference.dtype:  # every dtype converts to float32 exactly
                part = _values(part, _FORMATS.get(found.dtype)).float()
            parts.append(_of_chunk(part, right, fmt))
    return _joined(parts, e.numel())


def _check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    for name, tensor in (("actual", actual), ("expected", expected)):
        if tensor.dtype not in DTYPES:
            names = ", ".join(map(dtype_name, DTYPES))
            raise TypeError(f"{name} is {dtype_name(tensor.dtype)}; metrics takes {names}: convert it")
    if expected.dtype not in (actual.dtype, torch.float32):
        remedy = " or ".join(dict.fromkeys((dtype_name(actual.dtype), "float32")))
        raise TypeError(
            f"actual is {dtype_name(actual.dtype)} and expected is {dtype_name(expected.dtype)}: convert expected to "
            f"{remedy}"
        )
    if actual.device != expected.device:
        raise ValueError(f"actual is on {actual.device}; expected is on {expected.device}: move one of them")


def _elements(x: torch.Tensor) -> torch.Tensor:
    """An element for each number: codes, uint8, of a narrow dtype, or the tensor itself."""
    if x.dtype not in _FORMATS:
        return x
    codes = x.view(torch.uint8)
    return torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2) if _FORMATS[x.dtype] is E2M1 else codes


def _values(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """float64 numbers of codes, or of a floating-point tensor."""
    if fmt is None:
        return x.double()
    return torch.tensor(fmt.values, dtype=torch.float64, device=x.device)[x.long()]


@dataclass(frozen=True)
class _Part:
    """Figures of a chunk."""

    unequal: int
    nan_mismatches: int
    inf_mismatches: int
    zero_sign_mismatches: int
    max_ulp: int
    max_abs_error: float
    noise: float
    signal: float
    bins: list[list[int]]


def _of_chunk(actual: torch.Tensor, expected: torch.Tensor, fmt: Format | None) -> _Part:
    """Figures of a chunk, 1-D and not empty: codes of the same format, or numbers of the same dtype."""
    a, e = _values(actual, fmt), _values(expected, fmt)
    a_nan, e_nan = a.isnan(), e.isnan()
    equal = (a == e) | (a_nan & e_nan)
    nan_mismatches = a_nan ^ e_nan
    inf_mismatches = (a.isinf() | e.isinf()) & ~equal & ~nan_mismatches
    difference = (a - e).abs().masked_fill_(equal, 0.0).masked_fill_(nan_mismatches | inf_mismatches, torch.inf)
    ordinals = (ordinal.float_ordinals(x) if fmt is None else ordinal.code_ordinals(x, fmt) for x in (actual, expected))
    steps = torch.sub(*ordinals).abs_().masked_fill_(a_nan | e_nan, 0)
    return _Part(
        unequal=int((~equal).sum()),
        nan_mismatches=int(nan_mismatches.sum()),
        inf_mismatches=int(inf_mismatches.sum()),
        zero_sign_mismatches=int(((a == 0) & (e == 0) & (a.signbit() != e.signbit())).sum()),
        max_ulp=int(steps.amax()),
        max_abs_error=float(difference.amax()),
        noise=float(difference.square_().sum()),
        signal=float(e.masked_fill(~e.isfinite(), 0.0).square_().sum()),
        bins=histogram(Comparison(expected, actual, fmt)),
    )


def _joined(parts: list[_Part], elements: int) -> Metrics:
    noise, signal = sum(part.noise for part in parts), sum(part.signal for part in parts)
    relative = math.sqrt(noise / signal) if signal else math.inf if noise else 0.0
    counts: Counter[tuple[int, int]] = Counter()
    for part in parts:
        counts.update({(low, high): count for low, high, count in part.bins})
    return Metrics(
        elements=elements,
        unequal=sum(part.unequal for part in parts),
        nan_mismatches=sum(part.nan_mismatches for part in parts),
        inf_mismatches=sum(part.inf_mismatches for part in parts),
        zero_sign_mismatches=sum(part.zero_sign_mismatches for part in parts),
        max_ulp=max((part.max_ulp for part in parts), default=0),
        max_abs_error=max((part.max_abs_error for part in parts), default=0.0),
        relative_error=relative,
        sqnr_db=-20 * math.log10(relative) if relative else math.inf,
        histogram=tuple((low, high, count) for (low, high), count in sorted(counts.items()) if count),
    )
