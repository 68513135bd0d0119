"""pad_sections and unpad_sections: sections padded to the alignment of a grouped GEMM, and back."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from narrowgauge.reference.quantize import sections as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_equal

pytestmark = ON_EVERY_DEVICE

ALIGNED = {"fp8-block-1x128": 16, "fp8-current-e4m3": 16, "mxfp8-e4m3": 32, "mxfp4": 32, "nvfp4": 128, "nvfp4-2d": 128}
SIZES = [[0], [1], [16], [32], [128], [0, 0], [5, 0, 17], [0, 129, 0, 1], [16, 32, 128], [3] * 40, [0, 0, 200, 0, 31]]


def rows_of(sizes: list[int], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Different rows without a 0."""
    numbers = torch.arange(1, sum(sizes) * width + 1).view(sum(sizes), width) % 251 + 1
    return numbers.to(dtype)


def padded(x: torch.Tensor, sizes: list[int], alignment: int) -> torch.Tensor:
    """By torch's own padding, a section at a time."""
    parts = [torch.nn.functional.pad(part.long(), (0, 0, 0, -len(part) % alignment)) for part in x.split(sizes)]
    return torch.cat(parts).to(x.dtype)


@pytest.mark.parametrize("name", ALIGNED)
def test_sections_are_padded_with_zeros_and_cut_again(name: str) -> None:
    assert find_recipe(name).row_alignment == ALIGNED[name]
    for sizes in SIZES:
        x, counts = rows_of(sizes, 24, torch.int32), torch.tensor(sizes)
        got, aligned = ops.pad_sections(x, counts, name)
        assert aligned.tolist() == [-(-size // ALIGNED[name]) * ALIGNED[name] for size in sizes]
        assert aligned.dtype == torch.int64
        assert_equal(got, padded(x, sizes, ALIGNED[name]))
        assert_equal(ops.unpad_sections(got, counts, name), x)
        for one, other in zip((got, aligned), reference.pad_sections(x, counts, name), strict=True):
            assert_equal(one, other)


def test_rows_at_any_address_are_moved() -> None:
    """A thread reads no words of 16 bytes at an address that is not aligned."""
    sizes, bytes_of = [3, 18], torch.arange(21 * 32 + 16).to(torch.uint8)
    for first, dtype in product(range(16), (torch.uint8, torch.float16, torch.float32)):
        if first % dtype.itemsize:
            continue
        x = bytes_of[first : first + 21 * 32].view(dtype).view(21, -1)
        assert x.data_ptr() % 16 == (bytes_of.data_ptr() + first) % 16
        got, _ = ops.pad_sections(x, torch.tensor(sizes), "nvfp4")
        for part, rows in zip(got.split(128), x.split(sizes), strict=True):
            assert torch.equal(part[: len(rows)].view(torch.uint8), rows.contiguous().view(torch.uint8))
            assert not part[len(rows) :].view(torch.uint8).any()


def test_any_number_of_rows_and_sections_is_moved() -> None:
    """More rows and more sections than the grid has blocks of threads."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 40, (300,), generator=generator) * torch.randint(0, 2, (300,), generator=generator)
    x = rows_of(counts.tolist(), 8, torch.int16)
    got, aligned = ops.pad_sections(x, counts, "fp8-current-e4m3")
    assert_equal(got, padded(x, counts.tolist(), 16))
    assert int(aligned.sum()) == len(got)
    assert_equal(ops.unpad_sections(got, counts, "fp8-current-e4m3"), x)
