"""Sections padded to what a grouped GEMM takes, and back, on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.reference.quantize import sections as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import assert_equal, matrix

ALIGNED = {"fp8-block-1x128": 16, "fp8-current-e4m3": 16, "mxfp8-e4m3": 32, "mxfp4": 32, "nvfp4": 128, "nvfp4-2d": 128}
SIZES = [[0], [1], [16], [32], [128], [0, 0], [5, 0, 17], [0, 129, 0, 1], [16, 32, 128], [3] * 40, [0, 0, 200, 0, 31]]
DTYPES = (torch.uint8, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)
WIDTHS = (1, 3, 8, 16, 20, 33, 128, 517)
"""With those dtypes, rows of every size of words that a thread moves: 1, 2, 4, 8 and 16 bytes."""


def rows_of(sizes: list[int], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows no two of which are alike, and none of which is 0."""
    numbers = torch.arange(1, sum(sizes) * width + 1).view(sum(sizes), width) % 251 + 1
    return numbers.to(dtype)


def padded(x: torch.Tensor, sizes: list[int], alignment: int) -> torch.Tensor:
    """By torch's own padding, a section at a time."""
    parts = [torch.nn.functional.pad(part.long(), (0, 0, 0, -len(part) % alignment)) for part in x.split(sizes)]
    return torch.cat(parts).to(x.dtype)


@pytest.mark.parametrize("name", ALIGNED)
def test_sections_get_rows_of_zeros_up_to_the_recipes_multiple_and_lose_them_again(name: str) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_dtype_and_width_are_moved(dtype: torch.dtype, width: int) -> None:
    sizes = [5, 0, 17, 32]
    x, counts = rows_of(sizes, width, dtype), torch.tensor(sizes)
    got, _ = ops.pad_sections(x, counts, "mxfp8-e4m3")
    assert_equal(got, padded(x, sizes, 32))
    assert_equal(ops.unpad_sections(got, counts, "mxfp8-e4m3"), x)


def test_what_lies_anywhere_in_memory_is_moved() -> None:
    """Rows that begin at any address, of which words of 16 bytes are not read."""
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
    """More of either than the grid has blocks of threads."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 40, (300,), generator=generator) * torch.randint(0, 2, (300,), generator=generator)
    x = rows_of(counts.tolist(), 8, torch.int16)
    got, aligned = ops.pad_sections(x, counts, "fp8-current-e4m3")
    assert_equal(got, padded(x, counts.tolist(), 16))
    assert int(aligned.sum()) == len(got)
    assert_equal(ops.unpad_sections(got, counts, "fp8-current-e4m3"), x)


def test_nan_and_minus_zero_are_moved_bit_for_bit() -> None:
    x = matrix("any bits", 21, 40, torch.bfloat16)
    got, _ = ops.pad_sections(x, torch.tensor([20, 1]), "mxfp8-e4m3")
    assert torch.equal(got[:20].view(torch.int16), x[:20].view(torch.int16))
    assert torch.equal(got[32:33].view(torch.int16), x[20:].view(torch.int16))


def test_strided_rows_vectors_and_more_dimensions() -> None:
    sizes, wide = torch.tensor([3, 4]), matrix("normal", 14, 60, torch.float32)
    for x in (wide[::2, ::3], wide.T[:7, :9], wide[:7, 0], wide.view(7, 2, 60), wide[:7, :0]):
        got, aligned = ops.pad_sections(x, sizes, "mxfp8-e4m3")
        expected, _ = reference.pad_sections(x, sizes, "mxfp8-e4m3")
        assert aligned.tolist() == [32, 32]
        assert_equal(got, expected)
        assert_equal(ops.unpad_sections(got, sizes, "mxfp8-e4m3"), x.contiguous())


@pytest.mark.parametrize("width", [1, 16, 33])
def test_nothing_outside_is_read_and_nothing_outside_is_written(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [0, 129, 31, 0]
    x, counts = matrix("normal", 160, width, torch.bfloat16), torch.tensor(sizes)
    with guarded_outputs(monkeypatch):
        got, _ = ops.pad_sections(embedded(x), embedded(counts), "nvfp4")
        back = ops.unpad_sections(embedded(got), embedded(counts), "nvfp4")
    assert_equal(got, reference.pad_sections(x, counts, "nvfp4")[0])
    assert_equal(back, x)


# What is refused.

X, SECTIONS = torch.ones(20, 3), torch.tensor([15, 5])
REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("no such recipe", lambda: ops.pad_sections(X, SECTIONS, "mxfp5"), ValueError, "no recipe is called 'mxfp5'"),
    ("x on no device", lambda: ops.pad_sections(X.to("meta"), SECTIONS, "mxfp4"), ValueError,
     "kernel pad_4 runs on cpu and cuda, not meta"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_it_is_refused_with_a_sentence(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
