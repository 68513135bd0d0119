"""GEMMs that are correct under another declaration: operands that are decoded first, subnormal numbers flushed to 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.diagnosis.gemm.epilogues import before_last_cast
from narrowgauge.harness.diagnosis.gemm.gemm_parts import GemmParts, cast_ends, fits
from narrowgauge.harness.operations.stages.outcome import Product
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_first import decoded, decoded_bounds, tensor_factor
from narrowgauge.spec.summation import OPERANDS, Summation, summation

Declaration = tuple[str, str, Callable[[Summation], Summation]]
"""Cause, sentence with the line to declare, and function from the declared summation to the other one."""


def other_declarations() -> Iterator[Declaration]:
    """The declarations that a kernel may lack, the most plausible first."""
    yield (
        "operands-not-decoded",
        "codes are multiplied and scales applied afterwards; the declared operands are decoded first",
        lambda order: replace(order, operands=None),
    )
    for name in OPERANDS:
        dtype = name.removeprefix("decoded-")
        yield (
            "operands-decoded-first",
            f"both operands are decoded to {dtype}, with all their scales, before they are multiplied; "
            f'a kernel that does so on purpose declares {{"operands": "{name}"}}',
            lambda order, name=name: replace(order, operands=name, order=None),  # type: ignore[misc]
        )
    yield (
        "subnormals-flushed",
        "float32 numbers below 2^-126 are taken to be 0; a kernel that does so on purpose declares "
        '{"subnormals": "flushed"}',
        lambda order: replace(order, flushes=True),
    )


def follows(declaration: Declaration, products: Sequence[Product]) -> bool:
    """Whether all outputs are correct under another declaration. False if it is the declaration of the kernel.

    False, too, if the other declaration leaves an output undetermined: any wrong output would be correct.
    """
    for product in products:
        declared = summation(product.order)
        order = declaration[2](declared)
        if order == declared:
            return False
        limits = bounds(
            product.a, product.b, out_dtype=product.output.dtype, c=product.c, bias=product.bias, order=order
        )
        undetermined = limits.undetermined & ~product.limits.undetermined
        if bool(undetermined.any()) or not bool(within_bounds(product.output, limits).all()):
            return False
    return True


def decoded_to_float16(products: Sequence[GemmParts]) -> bool:
    """Whether all outputs are sums of operands that were decoded to float16, with all their scales."""
    for parts in products:
        a, b = parts.source.a, parts.source.b
        order = Summation(flushes=parts.order.flushes)
        x, w = (decoded(q, tensor_factor(q), torch.float16) for q in (a, b))
        sums = decoded_bounds(x, w, order)
        if bool(x.unknown.any() | w.unknown.any()):
            return False
        one = replace(parts, factor=torch.ones_like(parts.factor))
        candidates = [cast_ends(y, parts.dtype) for y in before_last_cast(one, (sums.lower, sums.upper))]
        if not bool(fits(parts.output, candidates, sums.overflow).all()):
            return False
    return True
