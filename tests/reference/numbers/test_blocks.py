"""`block_amax` on every number of 16 bits and every width of a block, with and without NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge.reference.numbers.blocks import block_amax
from narrowgauge.spec.dtypes import INPUT_DTYPES

WIDTHS = [1, 16, 32, 48, 128]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype of 16 bits; float32 numbers with the last bits 0 or all set; in random order."""
    words = torch.arange(-(1 << 15), 1 << 15)
    if dtype == torch.float32:
        words = ((words << 16).unsqueeze(1) + torch.tensor([0, 0xFFFF])).flatten()
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(1))
    return words[order].to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)


def largest(x: torch.Tensor, width: int, *, propagate: bool) -> np.ndarray:
    """The amax of every block of (M, K), padded with zeros, by NumPy: the maximum of NaN is NaN."""
    magnitudes = np.abs(x.float().numpy())
    if not propagate:
        magnitudes[np.isnan(magnitudes)] = 0
    padded = np.pad(magnitudes, ((0, 0), (0, -x.shape[1] % width)))
    return padded.reshape(x.shape[0], -1, width).max(axis=2)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("propagate", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_the_amax_of_a_block_is_its_largest_magnitude(
    dtype: torch.dtype, width: int, propagate: bool, finite: bool
) -> None:
    x = numbers(dtype)
    if finite:
        x = x[x.isfinite()]
    for columns in (1000, 1024):  # the first leaves a short block for most widths
        matrix = x[: len(x) // columns * columns].view(-1, columns)
        before = matrix.clone()
        found = block_amax(matrix, width, propagate_nan=propagate)
        assert found.dtype == torch.float32
        assert torch.equal(matrix.view(torch.uint8), before.view(torch.uint8))
        np.testing.assert_array_equal(found.numpy(), largest(matrix, width, propagate=propagate))


@pytest.mark.parametrize("width", [16, 32, 128])
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_a_nan_is_ignored_and_changes_no_other_block(dtype: torch.dtype, width: int) -> None:
    x = torch.arange(1, 4 * width + 1).view(2, -1).to(dtype)
    clean = block_amax(x, width)
    for column in range(2 * width):
        dirty = x.clone()
        dirty[1, column] = -torch.nan
        found = block_amax(dirty, width)
        here = column // width
        expected = x[1, here * width : (here + 1) * width].float().clone()
        expected[column % width] = 0
        assert found[1, here] == expected.amax()
        found[1, here] = clean[1, here]
        assert torch.equal(found, clean)
