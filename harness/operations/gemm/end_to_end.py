"""A product end to end: the kernel's output beside the product of the reference's own operands. The figure decides no
verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.harness.checks.bit_equality import same_bytes
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.spec.quantized import Quantized


class Operand(NamedTuple):
    """Two versions of an operand of a product, (M, K)."""

    kernel: Quantized
    """The operand stored by the backend; the reference's own if the backend does not quantize the operand."""
    own: Quantized
    """The reference's own."""


def add_end_to_end(outcome: Outcome, own: Sequence[tuple[Quantized, Quantized]]) -> None:
    """Measure every product of the outcome against the reference's own operands, a pair for each, (M, K) and (N, K).

    Sets the figure `outside_share` of the stage `output`, and the values for the comparisons of further harnesses. A
    wrong operand fails in its own stage, and the product is judged with the wrong operand: a single fault is a single
    finding. This figure shows the effect of both on the output. With equal operands, the figure follows from the judged
    bounds.
    """
    output = next(stage for stage in outcome.stages if stage.stage == "output")
    if not output.compared:
        return
    outside, expected = output.mismatches, []
    if not all(_same(one.a, a) and _same(one.b, b) for one, (a, b) in zip(outcome.products, own, strict=True)):
        outside = 0
        for one, (a, b) in zip(outcome.products, own, strict=True):
            limits = bounds(a, b, out_dtype=one.output.dtype, c=one.c, bias=one.bias, order=one.order)
            outside += int((~within_bounds(one.output, limits)).sum())
            expected.append(limits.expected)
        outcome.expected = torch.cat(expected)
    output.figures["outside_share"] = outside / output.compared


def _same(kernel: Quantized, own: Quantized) -> bool:
    """Whether two operands multiply alike. A number not shown by a kernel is computed from its amax."""
    pairs = ((getattr(kernel, part), getattr(own, part)) for part in QUANTIZED_PARTS)
    return all(one is other or one is None or other is None or same_bytes(one, other) for one, other in pairs)
