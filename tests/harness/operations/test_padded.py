"""Products of padded sections: the reference passes, a single defect fails by name."""

import pytest
import torch

from narrowgauge.harness.report.text import not_compared
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from tests.harness.product_cases import BLOCKS, PAIRS, REFERENCE, fails, in_blocks, padded_case, passes, run, stages
from tests.harness.sample_backends import backend


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("recipe", "sections", "rows"),
    [
        *((recipe, "ragged:3", 99) for recipe in PAIRS),
        *(("mxfp8-e4m3+mxfp8-2d", f"{kind}:4", 44) for kind in ("front", "middle", "end")),
        *(("fp8-current-e4m3", f"{kind}:4", 44) for kind in ("front", "middle", "end")),
        ("mxfp8-e4m3", "even:2", 128),
    ],
)
def test_padded_sections_pass(recipe, sections, rows):
    record = passes(padded_case(recipe, "accumulate", "bias", shape=(rows, 128, 32), sections=sections))
    assert stages(record)["output"]["compared"] == rows * 32
    assert {"padding", "unpadding"} <= set(stages(record))
    assert ("rows" in stages(record)) == ("-sr" not in recipe)
    assert "unpadded" not in stages(record)


def test_a_backend_without_the_door_pads_nothing():
    doors = {name: door for name, door in REFERENCE.items() if name != "pad_sections"}
    record = run_case(padded_case("mxfp8-e4m3"), backend(**doors))
    assert (record.verdict, record.message) == ("unsupported", "backend wrong has no pad_sections")


def test_a_kernel_that_takes_aligned_sections_alone_passes():
    def grouped(x, sizes, recipe, **options):
        if any(size % 32 for size in sizes.tolist()):
            raise NotImplementedError("sections of 32 rows")
        return reference.quantize_grouped(x, sizes, recipe, **options)

    record = passes(padded_case("mxfp8-e4m3"), quantize_grouped=grouped)
    assert "rows" not in stages(record)
    assert not_compared([record.to_dict()]).endswith("gemm-grouped rows (1 case).")


def rows_of(sizes, alignment=32):
    """Numbers of the padding rows."""
    found, start = [], 0
    for size in sizes.tolist():
        aligned = -(-size // alignment) * alignment
        found += range(start + size, start + aligned)
        start += aligned
    return found


def test_padding_that_is_not_zero():
    def pad(x, sizes, recipe):
        padded, aligned = reference.pad_sections(x, sizes, recipe)
        padded[rows_of(sizes)] = 1
        return padded, aligned

    record = fails(padded_case("mxfp8-e4m3"), "padding", pad_sections=pad)
    assert record.message == (
        "padding: 7 808 of 20 480 padded elements differ, each not 0 where 0 is expected, the first at row 11, column 0"
    )


def test_padding_that_nobody_writes():
    """Every later stage is judged on the kernel's own result, and a finding of either run says so."""

    def pad(x, sizes, recipe):
        right, aligned = reference.pad_sections(x, sizes, recipe)
        padded, behind = torch.empty_like(right), rows_of(sizes)
        kept = [row for row in range(len(right)) if row not in behind]
        padded[kept] = right[kept]
        return padded, aligned

    record = run(padded_case("mxfp8-e4m3"), pad_sections=pad)
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert stages(record)["repeat"]["sentence"] == "7 808 of 20 480 elements of padded were never written"
    assert stages(record)["padding"]["sentence"] != ""


def test_padded_sizes_that_are_not_right():
    def pad(x, sizes, recipe):
        padded, aligned = reference.pad_sections(x, sizes, recipe)
        return padded, aligned.flip(0)

    record = fails(padded_case("mxfp8-e4m3"), "padding", pad_sections=pad)
    assert record.message == "padding: the padded sizes are [64, 64, 32], and have to be [32, 64, 64]"


def test_rows_that_are_quantized_differently_before_padding():
    """A kernel with a separate path for sections that end inside a tile, and correct in the path that padding needs."""

    def grouped(x, sizes, recipe, **options):
        q = reference.quantize_grouped(x, sizes, recipe, **options)
        if any(size % 32 for size in sizes.tolist()):
            q.codes[7, 3] ^= 1
        return q

    record = fails(padded_case("mxfp8-e4m3"), "rows", quantize_grouped=grouped)
    assert record.message.startswith("rows: 1 of ")
    assert record.message.endswith(" codes of section 0 differ from those of the section without padding")


@pytest.mark.long
def test_rows_that_are_left_out_or_moved_by_unpadding():
    def shifted(y, sizes, recipe):
        return reference.unpad_sections(y, sizes, recipe).roll(1, 0)

    record = fails(padded_case("mxfp8-e4m3", dtype="bf16xbf16-fp32"), "unpadding", unpad_sections=shifted)
    assert " of 3 168 unpadded outputs differ: " in record.message

    def packed(y, sizes, recipe):
        return y[: int(sizes.sum())].clone()

    fails(padded_case("mxfp8-e4m3"), "unpadding", unpad_sections=packed)


def grouped_by(product):
    """gemm_grouped made of a gemm."""

    def door(a: GroupedQuantized, b, *, out_dtype):
        return torch.cat([product(section, matrix, out_dtype=out_dtype) for section, matrix in
                          zip(a.sections(), b, strict=True)])  # fmt: skip

    return door


def by_rows(a: Quantized, b: Quantized, *, out_dtype):
    """The declared order for sections that are not aligned, and the rounded float64 sum for aligned sections."""
    if a.shape[0] % 32 == 0:
        return reference.gemm(a, b, out_dtype=out_dtype)
    return in_blocks(a, b, out_dtype=out_dtype)


@pytest.mark.long
def test_other_bits_than_the_backends_own_unpadded_product():
    case = padded_case("mxfp8-e4m3", inputs="rounding")
    right = passes(case, BLOCKS, gemm_grouped=grouped_by(in_blocks))
    assert stages(right)["unpadded"]["compared"] == 99 * 32
    record = fails(case, "unpadded", BLOCKS, gemm_grouped=grouped_by(by_rows))
    assert " outputs of padded and unpadded sections differ" in record.message
    passes(case, gemm_grouped=grouped_by(by_rows))  # without a declaration both are right
