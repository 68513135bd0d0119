"""Wrong layouts of the scales that quantize swizzles, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.swizzle.deviations import deviating_layouts, padding_not_zeroed
from narrowgauge.reference.quantize.layout import swizzle

_LAYOUT = frozenset({"layout"})


def layout_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Deviations of the layout, the most plausible first. None if the kernel's scales are not swizzled."""
    if not matrices or "layout" not in matrices[0].kernel_stages:
        return
    for number, (cause, sentence, _) in enumerate(deviating_layouts(matrices[0].kernel_stages["scales"])):
        overrides = {"layout": partial(_deviating_layout, number)}
        yield QuantizeDeviation(cause, sentence, _LAYOUT, overrides=overrides, row_local=False)
    if all(padding_not_zeroed(matrix.kernel_stages["layout"], matrix.kernel_stages["scales"]) for matrix in matrices):
        fillings = torch.unique(torch.cat([_padding_bytes(matrix) for matrix in matrices]))
        if len(fillings) == 1:
            sentence = f"the padding of swizzled scales is {int(fillings)}, not 0"
        else:
            sentence = f"the padding of swizzled scales is not 0, but {len(fillings)} different bytes"
        # Several different padding bytes: the deviation does not predict them, so it is not exact.
        yield QuantizeDeviation(
            "padding-not-zeroed", sentence, _LAYOUT, exact=len(fillings) == 1, row_local=False,
            overrides={"layout": lambda replay: replay.kernel_matrix.kernel_stages["layout"]},
        )  # fmt: skip


def _deviating_layout(number: int, replay: Replay) -> torch.Tensor:
    return list(deviating_layouts(replay.scales))[number][2]


def _padding_bytes(matrix: KernelMatrix) -> torch.Tensor:
    is_scale = swizzle(torch.ones_like(matrix.kernel_stages["scales"])) == 1
    return matrix.kernel_stages["layout"][~is_scale]
