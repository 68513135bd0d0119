"""Wrong layouts of swizzled block scales, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.reference.quantize.layout import pad_scales, swizzle

SWIZZLE_READS = {
    "swizzle-columns-not-padded": "tiles of swizzled scales of {} are counted by columns that are not padded",
    **{
        f"swizzle-rows-modulo:{rows}": f"row r of swizzled scales of {{}} is read from row r modulo {rows}"
        for rows in (128 << n for n in range(10))
    },
}
"""Sentences of wrong offsets from which swizzled scales are read, with {} for the matrix."""
Layout = tuple[str, str, torch.Tensor]
"""Cause, sentence, and the swizzled bytes in the padded shape (⌈R/128⌉·128, ⌈C/4⌉·4)."""


def deviating_layouts(scales: torch.Tensor) -> Iterator[Layout]:
    """Linear scales (R, C) in known wrong layouts. The scales are uint8 or numbers of their places.

    Several layouts can give the same bytes, also the correct bytes: tiles in a single column, equal scales. Source of
    the correct layout and of the wrong split of the row: docs/numerics.md#scale-layout.
    """
    padded = pad_scales(scales)
    rows, columns = padded.shape
    flat = torch.zeros_like(padded).flatten()
    flat[: scales.numel()] = scales.flatten()
    yield "not-swizzled", "scales are linear, not swizzled", padded
    yield "not-swizzled", "scales are linear, neither swizzled nor padded", flat.view(rows, columns)
    split_rows = padded.view(rows // 128, 32, 4, columns // 4, 4)
    yield (
        "swizzle-32-4", "scales: the row of a tile is split as (32, 4), not as (4, 32)",
        split_rows.permute(0, 3, 1, 2, 4).reshape(rows, columns),
    )  # fmt: skip
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4)
    yield (
        "swizzle-tiles-by-column", "scales: tiles of 128x4 lie column by column, not row by row",
        tiles.permute(3, 0, 2, 1, 4).reshape(rows, columns),
    )  # fmt: skip
    yield (
        "swizzle-columns-before-rows", "scales: the 16 bytes of a tile's row are ordered by column before row",
        tiles.permute(0, 3, 2, 4, 1).reshape(rows, columns),
    )  # fmt: skip
    yield (
        "swizzle-linear-tiles", "scales: tiles of 128x4 are linear inside",
        padded.view(rows // 128, 128, columns // 4, 4).permute(0, 2, 1, 3).reshape(rows, columns),
    )  # fmt: skip
    transposed = pad_scales(scales.T.reshape(scales.shape)).view(rows // 128, 4, 32, columns // 4, 4)
    yield (
        "scales-transposed", "scales are transposed, then swizzled",
        transposed.permute(0, 3, 2, 1, 4).reshape(rows, columns),
    )  # fmt: skip


def wrong_offsets(cause: str, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
    """Wrong byte offsets from which swizzled scales of `shape` (R, C) are read, int64 (R, C), for a cause in
    `SWIZZLE_READS`. None if the offsets are right for this shape.
    """
    rows, columns = shape
    row, column = torch.arange(rows, device=device).unsqueeze(1), torch.arange(columns, device=device)
    tiles = -(-columns // 4)
    if cause == "swizzle-columns-not-padded":
        if columns % 4 == 0 or rows <= 128:
            return None
        tiles = columns // 4
    else:
        count = int(cause.rpartition(":")[2])
        if rows <= count:
            return None
        row = row % count
    return 512 * (row // 128 * tiles + column // 4) + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4


def padding_not_zeroed(swizzled: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether `swizzled` has the scales (R, C) in the correct layout, and its only mistake is nonzero padding."""
    padding = swizzle(torch.ones_like(scales)) == 0
    wrong = swizzled != swizzle(scales)
    return bool(wrong.any()) and not bool((wrong & ~padding).any())


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
    return list(deviating_layouts(replay.scales))[number][2].view(pad_scales(replay.scales).shape)


def _padding_bytes(matrix: KernelMatrix) -> torch.Tensor:
    is_scale = swizzle(torch.ones_like(matrix.kernel_stages["scales"])) == 1
    return matrix.kernel_stages["layout"][~is_scale]
