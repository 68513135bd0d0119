"""Wrong layouts of the scales that quantize swizzles, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.pack_scales.deviations import WRONG_LAYOUTS, padding_not_zeroed
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES, Packing

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
    for row in WRONG_LAYOUTS if matrices[0].result.scale_layout == TILES else ():
        yield row.through(lambda layout, r: layout(r.scales), row_local=False)
    if all(padding_not_zeroed(m.kernel_stages["layout"], _packing(m), m.kernel_stages["scales"]) for m in matrices):
        fillings = torch.unique(torch.cat([_padding_bytes(matrix) for matrix in matrices]))
        yield PADDING.bound(int(fillings)) if len(fillings) == 1 else DIFFERENT_PADDING.bound(len(fillings))


def _padding_bytes(matrix: KernelMatrix) -> torch.Tensor:
    return matrix.kernel_stages["layout"].cpu()[_packing(matrix).cells("0")]


def _packing(matrix: KernelMatrix) -> Packing:
    return Packing(LAYOUTS[matrix.result.scale_layout], tuple(matrix.kernel_stages["scales"].shape))
