"""A kernel with a single defect fails, at the right stage."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.quantize_grouped.judge import judge_quantize_grouped
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.report.text import not_compared
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.blocks import block_amax, over_tiles
from narrowgauge.reference.quantize.quantize import quantize_both, quantize_grouped
from narrowgauge.reference.quantize.scaling import block_scales, tensor_scale
from narrowgauge.reference.quantize.steps import encode_elements
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import TILED
from tests.harness.operation_cases import (
    fails,
    gemm_case,
    grouped_case,
    passes,
    quantize_case,
    run,
    stages,
    swizzle_case,
)
from tests.harness.sample_backends import backend
from tests.native.samples import nearly_tied


def test_a_kernel_with_both_halves_or_none_has_no_such_stage():
    def door(x, recipe, *, rowwise=True, columnwise=True):
        if not (rowwise and columnwise):
            raise NotImplementedError("both or nothing")
        return quantize_both(x, recipe)

    record = passes(quantize_case("nvfp4", "both"), quantize_both=door)
    assert not_compared([record.to_dict()]) == "Not compared: stages not observed: quantize halves (1 case)."


def wrong_split(scales):
    """Rows split as (32, 4) in place of (4, 32)."""
    padded = TILED["128x4"].pad(scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 32, 4, columns // 4, 4).permute(0, 3, 1, 2, 4).reshape(rows, columns)


def padding_of_ones(scales):
    out = reference.swizzle(torch.full_like(scales, 0))
    out.fill_(0xFF)
    right = reference.swizzle(scales)
    inside = reference.swizzle(torch.ones_like(scales)) == 1
    return torch.where(inside, right, out)


def swizzled_by(layout):
    def door(x, recipe, *, swizzled=False, **options):
        q = reference.quantize(x, recipe, **options)
        return replace(q, scales=layout(q.scales), swizzled=True) if swizzled else q

    return door


# ---- defects: functions with the arguments of the reference's, one mistake in each -----------------------------------


def halves_swapped(x, recipe, **options):
    return quantize_both(x.T, recipe, **options)


def half_changed_alone(x, recipe, **options):
    row, column = quantize_both(x, recipe, **options)
    if row is None:
        column.codes[3, 4] ^= 1
    return row, column


def rotating_neither(x, recipe, **options):
    return quantize_both(x, find_recipe("nvfp4"), **options)


def rotating_both(x, recipe, *, rowwise=True, columnwise=True):
    row, column = quantize_both(x, recipe, rowwise=rowwise, columnwise=columnwise)
    return row and reference.quantize(x, recipe), column


def earlier_offset(x, recipe, *, random, **options):
    return quantize_both(x, recipe, random=(random[0], random[1] - 1), **options)


def same_offset(x, recipe, *, random, **options):
    row, column = quantize_both(x, recipe, random=random, **options)
    return row, column and reference.quantize(x.T, recipe, random=random)


def tiles_chosen_by_columns(x, recipe, **options):
    row, column = quantize_both(x, recipe, **options)
    if column is not None:
        column.scales[16:32, 1] ^= 1
    return row, column


def wrong_swizzled_scale(x, recipe, *, swizzled=False):
    q = reference.quantize(x, recipe)
    q.scales[17, 2] ^= 1
    return replace(q, scales=reference.swizzle(q.scales), swizzled=True)


def shared_bits(x, recipe, *, random):
    bits = make_inputs(quantize_case("nvfp4-sr", "words"))["random.x"] if isinstance(random, tuple) else random
    return reference.quantize(x, recipe, random=bits[:1].expand(x.shape[0], -1).contiguous())


def turned_words(x, recipe, *, random):
    turned = random.view(torch.uint8).view(*random.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)
    return reference.quantize(x, recipe, random=turned)


def tiles_of_eight_rows(x, recipe):
    q = reference.quantize(x, recipe)
    scales = block_scales(over_tiles(block_amax(x, 16), 8), q.tensor_scale, recipe)
    return replace(q, scales=scales, codes=encode_elements(x, scales, q.tensor_scale, recipe))


def scale_of_the_first_row_alone(x, recipe):
    q = reference.quantize(x, recipe)
    scales = torch.zeros_like(q.scales)
    scales[::16] = q.scales[::16]
    return replace(q, scales=scales)


def amax_of_the_next_row(x, recipe):
    q = reference.quantize(x, recipe, amax=reference.quantize(x, recipe).amax.roll(1))
    return {name: getattr(q, name) for name in ("codes", "scales", "amax", "tensor_scale")}


def scale_of_the_next_row(x, recipe):
    amax = reference.quantize(x, recipe).amax
    scale = tensor_scale(amax.roll(1), recipe)
    scales = block_scales(block_amax(x, 16), scale, recipe)
    return encode_elements(x, scales, scale, recipe), scales, amax


def stale_amax(x, sizes, recipe, **options):
    parts, last = [], None
    for part, q in zip(x.split(sizes.tolist()), quantize_grouped(x, sizes, recipe).sections(), strict=True):
        parts.append(q if last is None else reference.quantize(part, recipe, amax=last))
        last = q.amax
    return parts


def one_amax(x, sizes, recipe):
    return quantize_grouped(x, sizes, recipe, amax=x.float().abs().amax().expand(len(sizes)).contiguous())


def bits_from_the_start(x, sizes, recipe, *, random):
    return [reference.quantize(part, recipe, random=random) for part in x.split(sizes.tolist())]


def changed_sizes(x, sizes, recipe):
    q = quantize_grouped(x, sizes.clone(), recipe)
    sizes[0] += 1
    return q


def next_matrix(a, b, **options):
    return reference.gemm_grouped(a, [*b[1:], b[0]], **options)


def first_bias(a, b, *, bias, **options):
    return reference.gemm_grouped(a, b, bias=bias[:1].expand(len(b), -1), **options)


def nearest(x, recipe, random):
    return reference.quantize(x, "nvfp4")


def other_mode(x, recipe):
    return reference.quantize(x, "nvfp4-4over6-448-mse")


def grouped_gemm(*flags, **options):
    return gemm_case("nvfp4", "even:4", *flags, operation="gemm-grouped", **options)


SQUARE = {"shape": (64, 64)}
FOUR = grouped_case("nvfp4", "even:4")
DEFECTS = [
    (quantize_case("nvfp4", "both", **SQUARE), "rowwise.scales", "", "quantize_both", halves_swapped),
    (quantize_case("nvfp4", "both"), "halves", "1 of 1 536 codes", "quantize_both", half_changed_alone),
    (quantize_case("nvfp4-rht", "both", **SQUARE), "columnwise.amax", "", "quantize_both", rotating_neither),
    (quantize_case("nvfp4-rht", "both", **SQUARE), "rowwise.amax", "", "quantize_both", rotating_both),
    (quantize_case("nvfp4-sr", "both"), "rowwise.codes", "", "quantize_both", earlier_offset),
    (quantize_case("nvfp4-sr", "both"), "columnwise.codes", "", "quantize_both", same_offset),
    (quantize_case("nvfp4-2d-4over6-448-mae", "both"), "columnwise.scales", "", "quantize_both",
     tiles_chosen_by_columns),
    *((swizzle_case(inputs), "layout", "3 072 bytes are not in their place, the first at row 1", "swizzle", wrong_split)
      for inputs in OPERATIONS["swizzle"].families()),
    (swizzle_case(shape=(130, 5)), "layout", "1 398 of 1 398 padding bytes are not 0", "swizzle", padding_of_ones),
    (swizzle_case(), "unswizzle", "", "unswizzle", lambda scales, shape: scales[: shape[0], : shape[1]].clone()),
    (quantize_case("nvfp4", "swizzled"), "scales", "1 of 192 block scales differ, each by 1 step, at row 17, column 2",
     "quantize", wrong_swizzled_scale),
    (quantize_case("nvfp4-sr"), "codes", "", "quantize", shared_bits),
    (quantize_case("nvfp4-sr", "words"), "codes", "", "quantize", shared_bits),
    (quantize_case("nvfp4-sr", "words"), "codes", "", "quantize", turned_words),
    (quantize_case("nvfp4-sr"), "codes", "", "quantize", nearest),
    (quantize_case("nvfp4-2d"), "scales", "", "quantize", tiles_of_eight_rows),
    (quantize_case("nvfp4-2d"), "scales", "180 of 192 block scales", "quantize", scale_of_the_first_row_alone),
    (quantize_case("nvfp4-4over6-448-mae", shape=(128, 128)), "scales", "", "quantize", other_mode),
    (quantize_case("nvfp4-rowscaled"), "amax", "47 of 48 amaxes differ", "quantize", amax_of_the_next_row),
    (quantize_case("nvfp4-rowscaled"), "scales", "", "quantize", scale_of_the_next_row),
    (grouped_case("nvfp4", "even:4", inputs="low-rows"), "amax", "section 1 of 4: 1 of 1", "quantize_grouped",
     stale_amax),
    (grouped_gemm(inputs="low-rows"), "x.amax", "section 1 of 4", "quantize_grouped", stale_amax),
    (grouped_case("nvfp4", "ragged:3"), "amax", "", "quantize_grouped", one_amax),
    (grouped_case("nvfp4-sr", "even:3"), "codes", "section 1 of 3: ", "quantize_grouped", bits_from_the_start),
    (FOUR, "memory", "1 bytes of input sizes were changed", "quantize_grouped", changed_sizes),
    (grouped_gemm(), "output", "", "gemm_grouped", next_matrix),
    (grouped_gemm("bias"), "output", "", "gemm_grouped", first_bias),
]  # fmt: skip
WITH_CONSEQUENCES = (
    halves_swapped, rotating_neither, rotating_both, scale_of_the_first_row_alone, earlier_offset,
    tiles_chosen_by_columns, wrong_swizzled_scale, scale_of_the_next_row,
)  # fmt: skip
"""Defects that a later stage shows too."""


@pytest.mark.sampled(39)
@pytest.mark.parametrize(
    ("case", "stage", "words", "method", "defect"),
    DEFECTS,
    ids=[f"{row[4].__name__}-{row[1]}-{row[0].inputs}" for row in DEFECTS],
)
def test_a_defect_fails_in_its_stage(case, stage, words, method, defect):
    record = fails(case, stage, **{method: defect})
    assert words in record.message
    if defect not in WITH_CONSEQUENCES:
        assert [name for name, entry in stages(record).items() if entry["sentence"]] == [stage]


NO_RESULT = [
    (quantize_case("nvfp4", "both"), {"quantize_both": lambda x, recipe, **options: quantize_both(x, recipe)},
     "a columnwise half, columnwise=False"),
    (quantize_case("nvfp4", "both"), {"quantize_both": lambda x, recipe: (reference.quantize(x, recipe), None)},
     "no columnwise half, columnwise=True"),
    (quantize_case("nvfp4", "both"), {"quantize_both": lambda *a, **o: quantize_both(*a, **o)[::-1]},
     "the rowwise half of quantize_both gave codes as uint8 of shape (64, 24)"),
    (swizzle_case(shape=(130, 5)), {"swizzle": lambda scales: scales}, "uint8 of shape (256, 8)"),
    (quantize_case("nvfp4", "swizzled"), {"quantize": lambda x, recipe, swizzled: reference.quantize(x, recipe)},
     "(128, 4)"),
    (quantize_case("nvfp4-rowscaled"), {"quantize": lambda x, recipe: reference.quantize(x, "nvfp4")}, "(48,)"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "doors", "words"), NO_RESULT)
def test_a_result_of_another_form_is_an_error(case, doors, words):
    record = run(case, **doors)
    assert record.verdict == "error"
    assert words in record.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("usage", [(), ("columnwise",)])
def test_scales_in_another_layout_are_blamed_on_the_layout_alone(usage):
    case = quantize_case("nvfp4", *usage, "swizzled", shape=(256, 256), inputs="position")
    record = fails(case, "layout", quantize=swizzled_by(wrong_split))
    assert record.message.startswith("layout: the scales are right, but ")
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["layout"]
    record = fails(quantize_case("nvfp4", *usage, "swizzled"), "layout", quantize=swizzled_by(padding_of_ones))
    assert "padding bytes are not 0" in record.message


def test_a_wrong_amax_of_columnwise_tiles_is_one_finding():
    """Scales are judged by the kernel's own amax, and 4over6 chooses along the rows of the given matrix."""
    x = nearly_tied()
    case = grouped_case("nvfp4-2d-4over6-256-mae", "even:2", "columnwise", shape=tuple(x.shape))

    def door(given, sizes, recipe, **options):
        amaxes = [part.abs().amax().float() for part in torch.split(given, sizes.tolist())]
        return reference.quantize_grouped(given, sizes, recipe, **options, amax=2 * torch.stack(amaxes))

    outcome = judge_quantize_grouped(case, Inputs({"x": x}), backend(quantize_grouped=door))
    assert [stage.stage for stage in outcome.stages if stage.sentence] == ["amax"]
