"""Layouts of block scales that kernels write in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.reference.quantize.layout import pad_scales, swizzle

Layout = tuple[str, str, torch.Tensor]
"""A cause, its sentence, and the bytes that it leaves, of the padded shape (⌈R/128⌉·128, ⌈C/4⌉·4)."""


def deviating_layouts(scales: torch.Tensor) -> Iterator[Layout]:
    """Linear scales (R, C), uint8 or numbers of their places, as kernels that swizzle in a known wrong way leave them.

    Several can be the same bytes, those of the right layout too: tiles in one column, scales that are all equal. Source
    of the right one, and of the wrong split of the row: docs/numerics.md#scale-layout.
    """
    padded = pad_scales(scales)
    rows, columns = padded.shape
    flat = torch.zeros_like(padded).flatten()
    flat[: scales.numel()] = scales.flatten()
    yield "not-swizzled", "scales are linear, not swizzled", padded
    yield "not-swizzled", "scales are linear, neither swizzled nor padded", flat.view(rows, columns)
    split = padded.view(rows // 128, 32, 4, columns // 4, 4)
    yield (
        "swizzle-32-4", "scales: the row of a tile is split as (32, 4), not as (4, 32)",
        split.permute(0, 3, 1, 2, 4).reshape(rows, columns),
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


def padding_not_zeroed(swizzled: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether linear `scales` (R, C) lie in `swizzled` as they should, and only bytes of the padding are not 0."""
    padding = swizzle(torch.ones_like(scales)) == 0
    different = swizzled != swizzle(scales)
    return bool(different.any()) and not bool((different & ~padding).any())


_LAYOUT = frozenset({"layout"})


def arranging_deviations(found: Sequence[Evidence]) -> Iterator[QuantizeDeviation]:
    """Deviations of the layout of `found`, whose scales are swizzled, the most plausible first."""
    if not found or "layout" not in found[0].shown:
        return
    for number, (cause, sentence, _) in enumerate(deviating_layouts(found[0].shown["scales"])):
        yield QuantizeDeviation(cause, sentence, _LAYOUT, hooks={"layout": partial(_arranged, number)}, local=False)
    if all(padding_not_zeroed(each.shown["layout"], each.shown["scales"]) for each in found):
        fillings = torch.unique(torch.cat([_padding(each) for each in found]))
        if len(fillings) == 1:
            sentence = f"the padding of swizzled scales is {int(fillings)}, not 0"
        else:
            sentence = f"the padding of swizzled scales is not 0, but {len(fillings)} different bytes"
        # Several bytes are not explained by saying that they are no zeros.
        yield QuantizeDeviation(
            "padding-not-zeroed", sentence, _LAYOUT, exact=len(fillings) == 1, local=False,
            hooks={"layout": lambda run: run.evidence.shown["layout"]},
        )  # fmt: skip


def _arranged(number: int, run: Run) -> torch.Tensor:
    return list(deviating_layouts(run.scales))[number][2].view(pad_scales(run.scales).shape)


def _padding(each: Evidence) -> torch.Tensor:
    inside = swizzle(torch.ones_like(each.shown["scales"])) == 1
    return each.shown["layout"][~inside]
