"""Error bounds of float32 sums in a declared order of summation: docs/tolerance.md#declared-order."""

from __future__ import annotations

import torch

from narrowgauge.reference.bounds.decoded_operands import DecodedOperands
from narrowgauge.reference.bounds.fast.block_order import exact_blocks_error, power_of_two_block_sums
from narrowgauge.reference.bounds.fast.certified_sum import certified_sum
from narrowgauge.reference.bounds.fast.exactness_certificate import ExactnessCertificate, exactness_certificate
from narrowgauge.reference.bounds.running_error import (
    CHUNK,
    PartialSums,
    empty_sums,
    tree_sum,
    with_evaluation_error,
)
from narrowgauge.reference.gemm.split_k import join
from narrowgauge.reference.numbers.blocks import split_columns
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, has_powers, lowest_bit
from narrowgauge.reference.numbers.slabs import tiles
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, Summation


def declared_error(
    operands: DecodedOperands, summation: Summation, settled: torch.Tensor, *, overflows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(error, overflow) (M, N) of the sums in the order of `summation`; 0 in tiles whose outputs are all `settled`.

    A block sum times its scales, or an element product times its scales, is a float32 number unless it is below 2^-149
    or too large; only then it rounds, once. overflow, bool: a partial sum may exceed the largest float32 number; False
    everywhere unless `overflows`.
    """
    error = torch.zeros_like(operands.magnitude)
    overflow = torch.zeros_like(settled)
    order, roundoff = summation.order, summation.roundoff
    float64_blocks = order == "blocks" and not overflows and float64_exact(operands, summation)
    exact_blocks = float64_blocks and operands.block_width * operands.element_span <= 2.0**ACCUMULATOR_BITS
    certificate: ExactnessCertificate | None = None
    power_of_two_blocks = False
    if float64_blocks and not exact_blocks and operands.block_width <= CHUNK and all(map(has_powers, operands.scales)):
        certificate = exactness_certificate(operands.left, operands.right, exact=True)
        power_of_two_blocks = certificate is not None
    if not (exact_blocks or power_of_two_blocks or overflows or order == "tree"):
        summed = (operands.left, operands.right) if order == "sequential" else operands.elements
        certificate = exactness_certificate(*summed, exact=False)
    # A tree holds up to 32 numbers of an output at a time.
    for rows, columns in tiles(error, 8 if order == "tree" else 1):
        if bool(settled[rows, columns].all()):
            continue
        tile = operands.tile(rows, columns)
        if exact_blocks:
            error[rows, columns] = exact_blocks_error(tile, roundoff) * (1 + 2.0**-20)
            continue
        part = None if certificate is None else certificate.part(rows, columns)
        if part is not None and power_of_two_blocks:
            sums = power_of_two_block_sums(tile, part, roundoff)
        else:
            sums = ordered_sums(tile, summation, part, peak=overflows)
        error[rows, columns] = with_evaluation_error(sums, operands.columns, roundoff)
        if sums.peak is not None:
            overflow[rows, columns] = (sums.peak + sums.error) * (1 + roundoff) >= FLT_MAX
    return error, overflow


def float64_exact(operands: DecodedOperands, summation: Summation) -> bool:
    """Whether float64 holds every sum of products exactly, and no product underflows."""
    fits = operands.magnitude <= FLOAT64_EXACT * (1 - 2.0**-20) * operands.quantum
    if not bool(fits.all()):
        return False
    return bool(((operands.quantum >= summation.smallest_term) | (operands.magnitude == 0)).all())


def ordered_sums(
    operands: DecodedOperands, summation: Summation, certificate: ExactnessCertificate | None, *, peak: bool
) -> PartialSums:
    """The sums in the order of `summation`, by the plain definitions of the orders.

    `certificate`: of the operands that are summed first, with scales for "sequential", else without. `peak`: whether
    to follow the largest magnitude.
    """
    left, right, roundoff = operands.left, operands.right, summation.roundoff
    start = empty_sums(left.shape[0], right.shape[0], left.device, peak=peak)
    if summation.order in ("sequential", "tree"):
        term_error = _underflow_error(operands.quantum, summation)
        if summation.order == "tree":
            return tree_sum(left, right, roundoff, term_error, peak=peak)
        start.error = term_error * ((left != 0).double() @ (right != 0).double().T)
        return certified_sum(left, right, roundoff, start, certificate)
    if summation.slices == 1:
        return block_sums(operands, summation, slice(0, operands.columns), start, certificate)
    slices = split_columns(operands.columns, operands.slice_step, summation.slices)
    sums = [block_sums(operands, summation, columns, start, certificate) for columns in slices]
    return join(sums, lambda x, y: x.plus(y, roundoff), tree=summation.joined_as_tree)


def _underflow_error(quantum: torch.Tensor, summation: Summation) -> torch.Tensor:
    """Error (M, N) of a nonzero term as a float32 number."""
    return (quantum < summation.smallest_term).double() * summation.underflow_error


def block_sums(
    operands: DecodedOperands,
    summation: Summation,
    columns: slice,
    sums: PartialSums,
    certificate: ExactnessCertificate | None,
) -> PartialSums:
    """Adds the blocks that begin in `columns` to `sums`, in order of K; or this part of a single block.

    A block sum is the sequential sum of the products of elements, from 0, times the two scales of the block.
    """
    left, right = (elements[:, columns] for elements in operands.elements)
    part = None if certificate is None else certificate.columns(columns)
    left_scales, right_scales = operands.scales
    left_bits, right_bits = (lowest_bit(scales.unsqueeze(2)) for scales in (left_scales, right_scales))
    first = columns.start // operands.block_width
    empty = empty_sums(left.shape[0], right.shape[0], left.device, peak=sums.peak is not None)
    for number, start in enumerate(range(0, left.shape[1], operands.block_width), first):
        block = slice(start, start + operands.block_width)
        block_certificate = None if part is None else part.columns(block)
        inner = certified_sum(left[:, block], right[:, block], summation.roundoff, empty, block_certificate)
        factor = torch.outer(left_scales[:, number], right_scales[:, number])
        quantum = inner.quantum * torch.outer(left_bits[:, number], right_bits[:, number])
        no_products = inner.magnitude == 0
        term = PartialSums(
            inner.total * factor,
            inner.magnitude * factor.abs(),
            quantum.masked_fill_(no_products, torch.inf),
            inner.error * factor.abs() + _underflow_error(quantum, summation).masked_fill_(no_products, 0.0),
        )
        if sums.peak is not None:
            term.peak = term.total.abs()
        sums = sums.plus(term, summation.roundoff)
    return sums
