"""The error and the tolerance to expect of a quantized GEMM, for a recipe, a shape and an output dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.error_figures.bounds import bounds
from narrowgauge.harness.api.error_figures.metrics import metrics
from narrowgauge.harness.api.inputs import inputs
from narrowgauge.harness.checks import ordinal
from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.ops import dequantize, quantize
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

SAMPLE = 32
"""Rows of a and of b that are evaluated unless the caller asks for more: 1024 outputs."""


class Allclose(NamedTuple):
    """Tolerances of a library's own test of a GEMM, as arguments of torch.testing.assert_close."""

    library: str
    rtol: float
    atol: float
    source: str


LIBRARIES = (
    Allclose("Transformer Engine", 8e-3, 8e-3, "tests/pytorch/nvfp4/test_nvfp4_gemm_exact.py"),
    Allclose("vLLM", 1e-1, 1e-1, "tests/kernels/quantization/test_nvfp4_scaled_mm.py"),
)
"""Read on 2026-11-24."""


@dataclass(frozen=True)
class LibraryTolerance:
    """A library's tolerance on the sampled outputs."""

    library: str
    refused: float
    """Share of the outputs with correct kernels outside of the tolerance."""
    ulp: int
    """Median of the accepted error of the tolerance to a single side, in ulp of the output."""


@dataclass(frozen=True)
class Interval:
    """The proved intervals of the sampled outputs, for one order of summation."""

    order: str
    """"any", or the declared order."""
    exact: float
    """Share of the outputs with a single correct value."""
    median_ulp: int
    """Median width of the intervals, in ulp of the output."""
    largest_ulp: int
    """Largest width of an interval, in ulp of the output. Near 0 an ulp is small."""
    rtol: float
    """The rtol with which allclose accepts every correct kernel, for atol = 0. inf if an expected output is 0 and its
    interval is not."""
    atol: float
    """The atol with which allclose accepts every correct kernel, for rtol = 0."""
    libraries: tuple[LibraryTolerance, ...]


@dataclass(frozen=True)
class Tolerance:
    """Expected error and tolerance of a GEMM of quantized operands."""

    recipe: str
    shape: tuple[int, int, int]
    """M, K and N."""
    out_dtype: str
    family: str
    """Input family of both operands before quantization."""
    evaluated: tuple[int, int]
    """Number of evaluated rows of a and of b. K is whole."""
    relative_error: float
    """Relative Frobenius error of the product of the quantized operands, before any rounding of a kernel, against the
    product of the inputs."""
    sqnr_db: float
    """The same as a signal to quantization noise ratio in decibels."""
    intervals: tuple[Interval, ...]
    """For any order of summation, then for the declared order."""


def tolerance(
    shape: Sequence[int],
    recipe: str | Recipe,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    order: str | None = None,
    family: str = "normal",
    seed: int = 0,
    rows: int = SAMPLE,
) -> Tolerance:
    """The error of quantization, and the necessary tolerance of a correct GEMM kernel.

    shape: (M, K, N). At most `rows` rows of a and of b are made and evaluated, with all of K.
    recipe: recipe of both operands. out_dtype: float32, bfloat16 or float16.
    order: a declared order of summation, such as "aligned-13-32-128", beside any order.
    family: input family, as of `narrowgauge.inputs`. seed: seed of the inputs.

    Sources: docs/tolerance.md#gemm for the intervals, `narrowgauge.metrics` for the error. Raises ValueError for a
    shape, recipe, family or order that does not exist or does not fit, TypeError for another dtype.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape is {tuple(shape)}; it has three positive sizes: M, K and N")
    if rows < 1:
        raise ValueError(f"rows is {rows}; at least one row of each operand is evaluated")
    (m, k, n), made = shape, find_recipe(recipe) if isinstance(recipe, str) else recipe
    sample = (min(m, rows), k, min(n, rows))
    x, w = inputs(made, sample, family, seed, operation="gemm")
    with default_settings():
        a, b = quantize(x, made), quantize(w, made)
        error = metrics(_product(a, b), (x.double() @ w.double().T).float())
        expected = gemm(a, b, out_dtype=out_dtype)
    orders = ["any", *([] if order is None else [order])]
    return Tolerance(
        str(made), (m, k, n), str(out_dtype).removeprefix("torch."), family, (sample[0], sample[2]),
        error.relative_error, error.sqnr_db,
        tuple(_interval(name, expected, *bounds(a, b, out_dtype=out_dtype, order=name)) for name in orders),
    )  # fmt: skip


def _product(a: Quantized, b: Quantized) -> torch.Tensor:
    """The product of the decoded operands, rounded once to float32."""
    left, right = (dequantize(q, torch.float32).double() for q in (a, b))
    return (left @ right.T).float()


def _interval(order: str, expected: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> Interval:
    """Figures of the intervals [lower, upper] (M, N) around the outputs of the reference. Intervals that are not finite
    are left out."""
    known = lower.isfinite() & upper.isfinite() & expected.isfinite()
    expected, lower, upper = expected[known], lower[known], upper[known]
    if not expected.numel():
        raise ValueError("no output of these inputs is finite; take another input family")
    steps = ordinal.float_ordinals(upper) - ordinal.float_ordinals(lower)
    centre = expected.double()
    distance = torch.maximum(upper.double() - centre, centre - lower.double())
    magnitude = centre.abs()
    relative = torch.where(distance == 0, 0.0, distance / magnitude)
    return Interval(
        order, float((steps == 0).double().mean()), int(steps.median()), int(steps.max()), float(relative.max()),
        float(distance.max()), tuple(_library(each, expected, distance, magnitude) for each in LIBRARIES),
    )  # fmt: skip


def _library(
    each: Allclose, expected: torch.Tensor, distance: torch.Tensor, magnitude: torch.Tensor
) -> LibraryTolerance:
    accepted = each.atol + each.rtol * magnitude
    above = (expected.double().abs() + accepted).to(expected.dtype)
    steps = ordinal.float_ordinals(above) - ordinal.float_ordinals(expected.abs())
    return LibraryTolerance(each.library, float((distance > accepted).double().mean()), int(steps.median()))
