"""Sections padded to the rows that a grouped GEMM takes, and back."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.ops import pad_sections, quantize, quantize_grouped, unpad_sections
from narrowgauge.spec.recipes import find_recipe
from tests.reference.samples import matrix

ALIGNMENTS = {
    "nvfp4": 128, "nvfp4-2d": 128, "mxfp8-e4m3": 32, "mxfp8-2d": 32, "mxfp4": 32, "fp8-current-e4m3": 16,
    "fp8-block-1x128": 16, "fp8-block-128x128": 16, "fp8-delayed-e5m2": 16,
}  # fmt: skip
SIZES = {
    "one": [5], "aligned": [128, 256], "any": [1, 17, 130, 31], "empty in front": [0, 0, 7], "empty inside": [7, 0, 9],
    "empty behind": [129, 0], "all empty": [0, 0, 0],
}  # fmt: skip
EVERY = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.mark.parametrize(("name", "alignment"), ALIGNMENTS.items())
def test_rows_are_aligned_as_numerics_md_says(name: str, alignment: int) -> None:
    """ "Modules": 16 for FP8, 32 for MXFP8, 128 for NVFP4."""
    assert find_recipe(name).row_alignment == alignment


@EVERY
@pytest.mark.parametrize(("name", "alignment"), ALIGNMENTS.items())
def test_sections_are_padded_with_zeros_and_cut_again(name: str, alignment: int, sizes: list[int]) -> None:
    x = matrix("any", 1, sum(sizes), 7).view(torch.int32)
    padded, aligned = pad_sections(x, torch.tensor(sizes), name)
    assert aligned.dtype == torch.int64
    assert aligned.tolist() == [(size + alignment - 1) // alignment * alignment for size in sizes]
    expected = []
    for part in torch.split(x, sizes):
        expected += [part, torch.zeros(-part.shape[0] % alignment, 7, dtype=torch.int32)]
    assert torch.equal(padded, torch.cat(expected))
    assert torch.equal(unpad_sections(padded, torch.tensor(sizes), name), x)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32", "fp8-current-e5m2"])
def test_padding_does_not_change_the_rows_that_were_there(name: str) -> None:
    sizes = [3, 0, 40, 17]
    x = matrix("normal", 3, sum(sizes), 48)
    padded, aligned = pad_sections(x, torch.tensor(sizes), name)
    parts = quantize_grouped(padded, aligned, name).sections()
    for part, section in zip(parts, torch.split(x, sizes), strict=True):
        alone = quantize(section, name)
        assert torch.equal(part.codes[: len(section)], alone.codes)
        assert torch.equal(part.scales[: len(alone.scales)], alone.scales)
