"""Wrong layouts of the scales that quantize swizzles, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.swizzle.deviations import WRONG_LAYOUTS, padding_not_zeroed
from narrowgauge.reference.quantize.layout import swizzle

PADDING: QuantizeDeviation = Deviation(
    "padding-not-zeroed", "the padding of swizzled scales is {}, not 0", "layout",
    lambda r: r.kernel_matrix.kernel_stages["layout"], row_local=False,
)  # fmt: skip
DIFFERENT_PADDING: QuantizeDeviation = replace(
    PADDING, sentence="the padding of swizzled scales is not 0, but {} different bytes", exact=False
)
"""Several different padding bytes: the deviation does not predict them."""


def layout_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Deviations of the layout, the most plausible first. None if the kernel's scales are not swizzled."""
    if not matrices or "layout" not in matrices[0].kernel_stages:
        return
    for row in WRONG_LAYOUTS:
        yield row.through(lambda layout, r: layout(r.scales), row_local=False)
    if all(padding_not_zeroed(matrix.kernel_stages["layout"], matrix.kernel_stages["scales"]) for matrix in matrices):
        fillings = torch.unique(torch.cat([_padding_bytes(matrix) for matrix in matrices]))
        yield PADDING.bound(int(fillings)) if len(fillings) == 1 else DIFFERENT_PADDING.bound(len(fillings))


def _padding_bytes(matrix: KernelMatrix) -> torch.Tensor:
    is_scale = swizzle(torch.ones_like(matrix.kernel_stages["scales"])) == 1
    return matrix.kernel_stages["layout"][~is_scale]
