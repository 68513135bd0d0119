"""`narrowgauge.bounds`: every output of a correct kernel lies inside, and both ends are accepted by the judge."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.harness.api.error_figures.bounds import bounds
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import generate
from narrowgauge.reference import ops
from narrowgauge.reference.bounds.bounds import bounds as reference_bounds
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation
from tests.reference import orders

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(
    family: str = "rounding", shape: tuple[int, int, int] = (8, 256, 6), recipe: str = "nvfp4", seed: int = 0
) -> tuple[Quantized, Quantized]:
    rows, depth, columns = shape
    chosen = find_recipe(recipe)
    x = generate(family, Draw(f"x{seed}"), (rows, depth), torch.bfloat16, "x", chosen)
    w = generate(family, Draw(f"w{seed}"), (columns, depth), torch.bfloat16, "w", chosen)
    return ops.quantize(x, recipe), ops.quantize(w, recipe)


def inside(y: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The sentence of the docstring, without its special ends."""
    return (lower <= y) & (y <= upper)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32), family=st.sampled_from(["normal", "rounding", "cancelling", "positive", "lattice"]),
    depth=st.sampled_from([32, 256, 1024]), dtype=st.sampled_from(DTYPES), addends=st.sampled_from(["", "c", "cb"]),
)  # fmt: skip
def test_every_order_of_additions_lies_inside(
    seed: int, family: str, depth: int, dtype: torch.dtype, addends: str
) -> None:
    a, b = operands(family, (3, depth, 4), seed=seed)
    rng = np.random.default_rng(seed)
    factor = orders.f32(float(alpha(a, b)))
    sums = orders.accumulators(orders.products(operand(a).numpy(), operand(b).numpy()), rng, 2)
    size = float(np.abs(factor * sums).max()) + 1
    c, bias = torch.randn(3, 4) * size, torch.randn(4) * size
    options = {"c": c} if addends == "c" else {"c": c, "bias": bias} if addends else {}
    lower, upper = bounds(a, b, out_dtype=dtype, **options)
    assert lower.shape == upper.shape == (3, 4)
    assert lower.dtype == upper.dtype == dtype
    numbers = {name: value.numpy() for name, value in options.items()}
    for name, out in orders.outputs(sums, factor, numbers.get("c"), numbers.get("bias"), dtype):
        assert bool((inside(out, lower, upper) | (lower == -torch.inf)).all()), name
    exact = reference_bounds(a, b, out_dtype=dtype, **options)
    in_float64 = exact.centre.to(dtype)  # additions in float64, a single rounding at the end
    assert bool((inside(in_float64, lower, upper) | exact.exact).all())


DECLARED = [{"order": "blocks"}, {"accumulator": "truncating"}, {"subnormals": "flushed"}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "declared"),
    [
        *((family, {}) for family in ("normal", "rounding", "lattice", "nan", "inf", "zeros")),
        *(("rounding", declared) for declared in DECLARED),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-block-1x128-e4m3-pow2", "fp8-current-e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ends_are_the_extremes_of_what_the_judge_accepts(
    dtype: torch.dtype, recipe: str, family: str, declared: dict[str, Any]
) -> None:
    a, b = operands(family, recipe=recipe)
    bias = torch.linspace(-3, 3, 6)
    lower, upper = bounds(a, b, out_dtype=dtype, bias=bias, **declared)
    order = Summation(declared.get("order"), truncates="accumulator" in declared, flushes="subnormals" in declared)
    limits = reference_bounds(a, b, out_dtype=dtype, bias=bias, order=order)
    for end, outward in ((lower, -torch.inf), (upper, torch.inf)):
        accepted = within_bounds(end, limits)
        assert bool((accepted | ((end == 0) & ~limits.zero_sum)).all())  # the other zero
        beyond = torch.nextafter(end.float(), torch.tensor(outward)) if dtype == torch.float32 else None
        if beyond is not None:
            finite = end.isfinite()
            assert not bool(within_bounds(beyond, limits)[finite].any())
    assert torch.equal(lower.isnan(), limits.expected.isnan() & limits.fused.isnan() & ~limits.undetermined)


def test_a_sum_that_cannot_round_has_equal_ends() -> None:
    a, b = operands("lattice")
    lower, upper = bounds(a, b, out_dtype=torch.float32)
    assert torch.equal(lower, upper)
    assert torch.equal(lower, ops.gemm(a, b, out_dtype=torch.float32))
    c = torch.full((8, 6), 1e-3)
    lower, upper = bounds(a, b, out_dtype=torch.float32, c=c)
    limits = reference_bounds(a, b, out_dtype=torch.float32, c=c)
    assert torch.equal(lower, torch.minimum(limits.expected, limits.fused))
    assert torch.equal(upper, torch.maximum(limits.expected, limits.fused))


def test_overflow_that_depends_on_the_order_has_infinite_ends() -> None:
    huge = torch.full((1, 32), 3e38)
    huge[0, ::2] *= -1
    a, b = ops.quantize(huge, "mxfp8-e4m3"), ops.quantize(torch.ones(1, 32) * 2, "mxfp8-e4m3")
    lower, upper = bounds(a, b, out_dtype=torch.float32)
    assert (float(lower), float(upper)) == (-torch.inf, torch.inf)
    assert bool(reference_bounds(a, b, out_dtype=torch.float32).undetermined.all())


A, B = operands()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"a": A.codes}, TypeError, "a is a Quantized, of narrowgauge.quantize or narrowgauge.adapt.quantized, not"),
        ({"order": "backwards"}, ValueError, "'sequential'"),
        ({"accumulator": "rounding"}, ValueError, "accumulator is 'nearest' or 'truncating', not 'rounding'"),
        ({"subnormals": True}, ValueError, "subnormals is 'kept' or 'flushed', not True"),
        ({"bias": torch.zeros(5)}, ValueError, "bias has shape (6,), not (5,)"),
        ({"c": torch.zeros(8, 6, device="meta")}, (TypeError, ValueError), "c|meta"),
        ({"b": operands(shape=(8, 128, 6))[1]}, ValueError, "128"),
        ({"b": replace(B, recipe=find_recipe("mxfp8-e4m3"))}, ValueError, "multipl"),
        ({"out_dtype": torch.float64}, TypeError, "float64"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], error: Any, text: str) -> None:
    arguments = {"a": A, "b": B, "out_dtype": torch.float32} | change
    with pytest.raises(error, match=text if "|" in text else re.escape(text)):
        bounds(arguments.pop("a"), arguments.pop("b"), **arguments)
