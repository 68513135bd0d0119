"""GEMMs that are correct under another declaration: operands that are decoded first, subnormal numbers flushed to 0,
another order of a simulated tensor core.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.diagnosis.gemm.epilogues import before_last_cast
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    GemmParts,
    cast_ends,
    correct_epilogue,
    fits,
    operand_values,
)
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Product
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_first import decoded, decoded_bounds, tensor_factor
from narrowgauge.reference.gemm.fast.tensor_core_sum import FewOutputs
from narrowgauge.reference.gemm.tensor_core import factors_of_operand
from narrowgauge.reference.numbers.blocks import split_columns
from narrowgauge.spec.summation import OPERANDS, Alignment, Summation, summation

_SPLITS = range(2, 17)
"""Slices of K that are tried."""
_PROMOTED = tuple(1 << bits for bits in range(5, 13))
"""Columns of promotion that are tried: 32 to 4096."""


ON_PURPOSE = "; a kernel that does so on purpose declares "
"""Words between the sentence of a deviation and the declaration that makes it correct."""
DECLARATIONS: tuple[Deviation[Summation], ...] = (
    Deviation("operands-not-decoded",
              "codes are multiplied and scales applied afterwards; the declared operands are decoded first",
              "declaration", lambda order: replace(order, operands=None)),
    Deviation("operands-decoded-first",
              "both operands are decoded to {0}, with all their scales, before they are multiplied"
              f'{ON_PURPOSE}{{{{"operands": "{{1}}"}}}}', "declaration",
              lambda name, order: replace(order, operands=name, order=None),
              {name.removeprefix("decoded-"): name for name in OPERANDS}),
    Deviation("subnormals-flushed",
              f'float32 numbers below 2^-126 are taken to be 0{ON_PURPOSE}{{"subnormals": "flushed"}}',
              "declaration", lambda order: replace(order, flushes=True)),
)  # fmt: skip
"""Declarations that a kernel may lack: functions from the declared summation to the other one."""
DECODED_TO_FLOAT16: Deviation[GemmParts] = Deviation(
    "operands-decoded-first",
    "both operands are decoded to float16, with all their scales, before they are multiplied", "operands",
)  # fmt: skip
ORDER: Deviation[GemmParts] = Deviation(
    "order:{}", f'sums have the order {{0}}{ON_PURPOSE}{{{{"gemm": "{{0}}"}}}}', "order",
    lambda name, parts: replace(parts, order=Summation(name)),
)  # fmt: skip
"""An order of a tensor core, which gives every bit."""
ANY_ORDER: Deviation[GemmParts] = Deviation(
    "order-not-declared", "sums are right in some order, not in the declared one", "order",
    lambda parts: None if parts.order.order is None else replace(parts, order=replace(parts.order, order=None)),
    exact=False,
)  # fmt: skip
"""A possible cause: a mistake of small effect fits the wider bounds of any order too."""


def wrong_reference_outputs(declaration: Deviation[Summation], products: Sequence[Product]) -> tuple[int, bool] | None:
    """Number of the reference's outputs that are wrong under another declaration, if all outputs of the kernel are
    correct, and whether it leaves outputs undetermined, which are never wrong. None if an output of the kernel is
    wrong, or if the kernel has this declaration."""
    wrong, undetermined = 0, False
    for product in products:
        declared = summation(product.order)
        order = declaration.result(declared)
        if order == declared:
            return None
        limits = bounds(
            product.a, product.b, out_dtype=product.output.dtype, c=product.c, bias=product.bias, order=order
        )
        if not bool(within_bounds(product.output, limits).all()):
            return None
        undetermined |= bool((limits.undetermined & ~product.limits.undetermined).any())
        wrong += int((~within_bounds(product.limits.expected, limits)).sum())
    return wrong, undetermined


def simulated_orders(declared: Summation, columns: int, block: int | None = None) -> list[list[str]]:
    """Names of other orders of the declared tensor core. Orders with equal bits are together.

    In this order: without slices of K; without promotion too; promotion after 32 to 4096 columns; 2 to 16 nonempty
    slices; such slices without promotion. Empty if no tensor core is declared, or if numbers may be flushed to 0.
    `block`: columns of a block if block sums are promoted with float32 scales.
    """
    model = declared.aligned
    if model is None or declared.flushes or columns == 0:
        return []
    longest = 0 if model.decoded else min(columns, block or columns)
    promoted = [length for length in _PROMOTED if length < longest and length % model.width == 0]
    names: dict[Hashable, list[str]] = {}
    for slices, length in (
        (1, model.promoted),
        (1, None),
        *((1, length) for length in promoted),
        *((slices, model.promoted) for slices in _SPLITS),
        *((slices, None) for slices in _SPLITS),
    ):
        if sum(1 for _ in split_columns(columns, block or length or model.width, slices)) != slices:
            continue
        prefix = (f"split-{slices}-" if slices > 1 else "") + ("decoded-" if model.decoded else "")
        name = f"{prefix}aligned-{model.fraction}-{model.width}" + (f"-{length}" if length else "")
        names.setdefault(_accumulators(model, slices, length, columns, block), []).append(name)
    if not (declared.joined_as_tree or declared.joined_in_output):
        names.pop(_accumulators(model, declared.slices, model.promoted, columns, block), None)
    return [list(dict.fromkeys(equal)) for equal in names.values()]


def may_have_order(parts: GemmParts, names: Sequence[str]) -> list[bool]:
    """Whether each of several orders of the declared tensor core gives every output of `parts`, which are few.

    The answer is True if only `GemmParts.sums` can tell.
    """
    model = parts.order.aligned
    if model is None or parts.promotes:
        return [True] * len(names)
    left, right = (factors_of_operand(q) for q in (parts.left, parts.right))
    undetermined = ~(operand_values(parts.left) @ operand_values(parts.right).T).isfinite()
    few, answers = FewOutputs(left, right, model), []
    for order in map(Summation, names):
        slices = order.slices
        assert order.aligned is not None
        assert isinstance(slices, int)
        sums = few.sums(slices, order.aligned.promoted)
        answers.append(bool(fits(parts.output, correct_epilogue(parts, (sums, sums)), undetermined).all()))
    return answers


def _accumulators(
    model: Alignment, slices: int | tuple[int, ...], promoted: int | None, columns: int, block: int | None
) -> Hashable:
    """The accumulators of an order. Orders with equal accumulators have equal bits.

    A slice with a single accumulator is added like a promoted accumulator of the first slice.
    """
    if block is not None:
        cuts = tuple(part.start for part in split_columns(columns, block, slices))
        return cuts, promoted if promoted is not None and promoted < block else None
    step = promoted or model.width
    first, *others = (
        tuple(range(part.start, part.stop, promoted or columns)) for part in split_columns(columns, step, slices)
    )
    return (*first, *(other[0] if len(other) == 1 else other for other in others))


def decoded_to_float16(products: Sequence[GemmParts]) -> int | None:
    """Number of the reference's outputs that are no sums of operands decoded to float16, with all their scales. None if
    an output of the kernel is no sum of these operands."""
    wrong = 0
    for parts in products:
        a, b = parts.source.a, parts.source.b
        order = Summation(flushes=parts.order.flushes)
        x, w = (decoded(q, tensor_factor(q), torch.float16) for q in (a, b))
        sums = decoded_bounds(x, w, order)
        if bool(x.unknown.any() | w.unknown.any()):
            return None
        one = replace(parts, factor=torch.ones_like(parts.factor))
        candidates = [cast_ends(y, parts.dtype) for y in before_last_cast(one, (sums.lower, sums.upper))]
        if not bool(fits(parts.output, candidates, sums.overflow).all()):
            return None
        wrong += int((~fits(parts.source.limits.expected, candidates, sums.overflow)).sum())
    return wrong
