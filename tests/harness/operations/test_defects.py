"""A kernel with a single defect fails, at the right stage."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from narrowgauge.harness.cases.families import families_of
from narrowgauge.harness.inputs.inputs import Inputs, make_inputs
from narrowgauge.harness.operations.grouped import judge_quantize_grouped
from narrowgauge.harness.report.text import not_compared
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.blocks import block_amax, over_tiles
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pad_scales
from narrowgauge.reference.quantize.quantize import quantize_both, quantize_grouped
from narrowgauge.reference.quantize.scaling import block_scales, tensor_scale, unrounded_scales
from narrowgauge.reference.quantize.steps import encode_elements
from narrowgauge.spec.recipes import find_recipe
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


def halves_swapped(x, recipe, **options):
    return quantize_both(x.T, recipe, **options) if x.shape[0] == x.shape[1] else quantize_both(x, recipe, **options)


def test_halves_in_the_wrong_order():
    fails(quantize_case("nvfp4", "both", shape=(64, 64)), "rowwise.scales", quantize_both=halves_swapped)
    wrong = run(quantize_case("nvfp4", "both"), quantize_both=lambda *a, **o: quantize_both(*a, **o)[::-1])
    assert wrong.verdict == "error"
    assert wrong.message.startswith("the rowwise half of quantize_both gave codes as uint8 of shape (64, 24); nvfp4 of")


def test_a_half_that_is_another_when_it_is_made_alone():
    def door(x, recipe, **options):
        row, column = quantize_both(x, recipe, **options)
        if row is None:
            column.codes[3, 4] ^= 1
        return row, column

    record = fails(quantize_case("nvfp4", "both"), "halves", quantize_both=door)
    assert record.message == "halves: 1 of 1 536 codes of the columnwise half differ when it is made alone"


def test_a_half_that_is_rotated_wrongly():
    case = quantize_case("nvfp4-rht", "both", shape=(64, 64))

    def rotating_neither(x, recipe, **options):
        row, column = quantize_both(x, find_recipe("nvfp4"), **options)
        return row, column

    def rotating_both(x, recipe, *, rowwise=True, columnwise=True):
        row, column = quantize_both(x, recipe, rowwise=rowwise, columnwise=columnwise)
        return row and reference.quantize(x, recipe), column

    fails(case, "columnwise.amax", quantize_both=rotating_neither)
    fails(case, "rowwise.amax", quantize_both=rotating_both)


def test_a_half_that_was_not_asked_for():
    record = run(quantize_case("nvfp4", "both"), quantize_both=lambda x, recipe, **options: quantize_both(x, recipe))
    assert record.message == "quantize_both gave a columnwise half, columnwise=False"
    record = run(quantize_case("nvfp4", "both"), quantize_both=lambda x, recipe: (reference.quantize(x, recipe), None))
    assert record.message == "quantize_both gave no columnwise half, columnwise=True"
    record = run(quantize_case("nvfp4", "both"), quantize_both=reference.quantize)
    assert record.message == "quantize_both gave Quantized; it gives a rowwise and a columnwise half"


def test_a_kernel_with_both_halves_or_none_has_no_such_stage():
    def door(x, recipe, *, rowwise=True, columnwise=True):
        if not (rowwise and columnwise):
            raise NotImplementedError("both or nothing")
        return quantize_both(x, recipe)

    record = passes(quantize_case("nvfp4", "both"), quantize_both=door)
    assert not_compared([record.to_dict()]) == "Not compared: stages not observed: quantize halves in 1 case."


def wrong_split(scales):
    """Rows split as (32, 4) in place of (4, 32)."""
    padded = pad_scales(scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 32, 4, columns // 4, 4).permute(0, 3, 1, 2, 4).reshape(rows, columns)


def padding_of_ones(scales):
    out = reference.swizzle(torch.full_like(scales, 0))
    out.fill_(0xFF)
    right = reference.swizzle(scales)
    inside = reference.swizzle(torch.ones_like(scales)) == 1
    return torch.where(inside, right, out)


@pytest.mark.parametrize("inputs", families_of("swizzle"))
def test_the_wrong_split_of_rows(inputs):
    record = fails(swizzle_case(inputs), "layout", swizzle=wrong_split)
    assert "of 3 072 bytes are not in their place, the first at row 1, column 0" in record.message
    assert stages(record)["unswizzle"]["sentence"] == ""  # right for its argument


def test_padding_that_is_not_zero():
    record = fails(swizzle_case(shape=(130, 5)), "layout", swizzle=padding_of_ones)
    assert record.message == "layout: 1 398 of 1 398 padding bytes are not 0"
    passes(swizzle_case(shape=(256, 8)), swizzle=padding_of_ones)


def test_an_unswizzle_that_is_not_the_inverse():
    def lazy(scales, shape):
        return scales[: shape[0], : shape[1]].clone()

    fails(swizzle_case(), "unswizzle", unswizzle=lazy)


def test_a_swizzle_of_another_shape_is_an_error():
    record = run(swizzle_case(shape=(130, 5)), swizzle=lambda scales: scales)
    assert record.message == "swizzle gave uint8 of shape (130, 5), not uint8 of shape (256, 8)"


def swizzled_by(layout):
    def door(x, recipe, *, swizzled=False, **options):
        q = reference.quantize(x, recipe, **options)
        return replace(q, scales=layout(q.scales), swizzled=True) if swizzled else q

    return door


@pytest.mark.parametrize("usage", [(), ("columnwise",)])
def test_scales_in_another_layout_are_blamed_on_the_layout_alone(usage):
    case = quantize_case("nvfp4", *usage, "swizzled", shape=(256, 256), inputs="position")
    record = fails(case, "layout", quantize=swizzled_by(wrong_split))
    assert record.message.startswith("layout: the scales are right, but ")
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["layout"]
    record = fails(quantize_case("nvfp4", *usage, "swizzled"), "layout", quantize=swizzled_by(padding_of_ones))
    assert "padding bytes are not 0" in record.message


def test_swizzled_scales_have_whole_tiles():
    record = run(quantize_case("nvfp4", "swizzled"), quantize=lambda x, recipe, swizzled: reference.quantize(x, recipe))
    assert record.verdict == "error"
    assert record.message == (
        "quantize gave scales as uint8 of shape (48, 4); nvfp4 of (48, 64), swizzled, has uint8 of shape (128, 4)"
    )


def one_wrong_scale(q):
    q.scales[17, 2] ^= 1


def test_a_wrong_scale_of_swizzled_ones_is_a_wrong_scale():
    def door(x, recipe, *, swizzled=False):
        q = reference.quantize(x, recipe)
        q.scales[17, 2] ^= 1
        return replace(q, scales=reference.swizzle(q.scales), swizzled=True)

    record = fails(quantize_case("nvfp4", "swizzled"), "scales", quantize=door)
    assert "1 of 192 block scales differ, each by 1 step, at row 17, column 2" in record.message


def stale_amax(x, sizes, recipe, **options):
    q = quantize_grouped(x, sizes, recipe, **options)
    parts, last = [], None
    for part, section in zip(torch.split(x, sizes.tolist()), q.sections(), strict=True):
        parts.append(section if last is None else reference.quantize(part, recipe, amax=last))
        last = section.amax
    return parts


def test_a_wrong_amax_of_columnwise_tiles_is_one_finding():
    """Scales are judged by the kernel's own amax, and 4over6 chooses along the rows of the given matrix."""
    x = nearly_tied()
    case = grouped_case("nvfp4-2d-4over6-256-mae", "even:2", "columnwise", shape=tuple(x.shape))

    def door(given, sizes, recipe, **options):
        amaxes = [part.abs().amax().float() for part in torch.split(given, sizes.tolist())]
        return reference.quantize_grouped(given, sizes, recipe, **options, amax=2 * torch.stack(amaxes))

    outcome = judge_quantize_grouped(case, Inputs(x), backend(quantize_grouped=door))
    assert [stage.stage for stage in outcome.stages if stage.sentence] == ["amax"]


def test_the_amax_of_the_section_before():
    record = fails(grouped_case("nvfp4", "even:4", inputs="low-rows"), "amax", quantize_grouped=stale_amax)
    assert record.message.startswith("amax: section 1 of 4: 1 of 1 amaxes differ")
    assert record.findings[0]["elements"][0]["section"] == 1
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["amax"]
    record = fails(
        gemm_case("nvfp4", "even:4", inputs="low-rows", operation="gemm-grouped"), "x.amax", quantize_grouped=stale_amax
    )
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["x.amax"]


def test_one_amax_for_all_sections():
    def door(x, sizes, recipe):
        return quantize_grouped(x, sizes, recipe, amax=x.float().abs().amax().expand(len(sizes)).contiguous())

    fails(grouped_case("nvfp4", "ragged:3"), "amax", quantize_grouped=door)


def test_random_bits_that_every_section_begins_anew():
    def door(x, sizes, recipe, *, random):
        return [reference.quantize(part, recipe, random=random) for part in torch.split(x, sizes.tolist())]

    record = fails(grouped_case("nvfp4-sr", "even:3"), "codes", quantize_grouped=door)
    assert record.message.startswith("codes: section 1 of 3: ")


def test_random_bits_that_rows_share():
    def door(x, recipe, *, random):
        bits = make_inputs(quantize_case("nvfp4-sr", "words")).random["x"] if isinstance(random, tuple) else random
        shared = bits[:1].expand(x.shape[0], -1).contiguous()
        return reference.quantize(x, recipe, random=shared)

    for flags in ((), ("words",)):
        record = fails(quantize_case("nvfp4-sr", *flags), "codes", quantize=door)
        assert stages(record)["scales"]["sentence"] == ""


def test_bytes_of_a_word_in_the_wrong_order():
    def door(x, recipe, *, random):
        turned = random.view(torch.uint8).view(*random.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)
        return reference.quantize(x, recipe, random=turned)

    fails(quantize_case("nvfp4-sr", "words"), "codes", quantize=door)


def test_the_offset_of_the_other_half():
    def door(x, recipe, *, random, **options):
        return quantize_both(x, recipe, random=(random[0], random[1] - 1), **options)

    fails(quantize_case("nvfp4-sr", "both"), "rowwise.codes", quantize_both=door)

    def same(x, recipe, *, random, rowwise=True, columnwise=True):
        row, column = quantize_both(x, recipe, random=random, rowwise=rowwise, columnwise=columnwise)
        return row, column and reference.quantize(x.T, recipe, random=random)

    fails(quantize_case("nvfp4-sr", "both"), "columnwise.codes", quantize_both=same)


def test_rounding_to_nearest_where_it_should_be_stochastic():
    fails(quantize_case("nvfp4-sr"), "codes", quantize=lambda x, recipe, random: reference.quantize(x, "nvfp4"))


def test_tiles_of_eight_rows():
    def door(x, recipe):
        right = reference.quantize(x, recipe)
        blocks = over_tiles(block_amax(x, 16), 8)
        scales = block_scales(blocks, right.tensor_scale, recipe)
        return replace(right, scales=scales, codes=encode_elements(x, scales, right.tensor_scale, recipe))

    record = fails(quantize_case("nvfp4-2d"), "scales", quantize=door)
    assert stages(record)["codes"]["sentence"] == ""


def test_the_scale_of_a_tile_written_for_its_first_row_alone():
    def door(x, recipe):
        q = reference.quantize(x, recipe)
        scales = torch.zeros_like(q.scales)
        scales[::16] = q.scales[::16]
        return replace(q, scales=scales)

    record = fails(quantize_case("nvfp4-2d"), "scales", quantize=door)
    assert "180 of 192 block scales differ" in record.message


def where_equal_four(x, recipe):
    """4over6 with ≤ in place of <: visible if both errors are equal."""
    q = reference.quantize(x, recipe)
    base = unrounded_scales(block_amax(x, 16), q.tensor_scale, recipe)
    six, four = (encode(scale, recipe.scale) for scale in (base, base * 1.5))
    alone = (x.view(len(x), -1, 16) != 0).sum(2) <= 1
    tie = alone & (decode(four, recipe.scale) == 1.5 * decode(six, recipe.scale))
    scales = torch.where(tie, four, q.scales)
    return replace(q, scales=scales, codes=encode_elements(x, scales, q.tensor_scale, recipe))


@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("most", [448, 256])
def test_four_where_it_is_no_better_than_six(most, mode):
    case = quantize_case(f"nvfp4-4over6-{most}-{mode}", inputs="single", shape=(128, 128))
    record = fails(case, "scales", quantize=where_equal_four)
    assert stages(record)["scales"]["mismatches"] > 100
    assert stages(record)["codes"]["sentence"] == ""


def test_an_error_of_the_other_mode():
    case = quantize_case("nvfp4-4over6-448-mae", shape=(128, 128))
    fails(case, "scales", quantize=lambda x, recipe: reference.quantize(x, "nvfp4-4over6-448-mse"))


def test_columnwise_tiles_that_choose_for_themselves():
    """The columnwise half is the transpose of the rowwise half, although its own sums of errors round differently."""

    def door(x, recipe, *, rowwise=True, columnwise=True):
        row, column = quantize_both(x, recipe, rowwise=rowwise, columnwise=columnwise)
        if column is not None:
            column.scales[16:32, 1] = column.scales[16:32, 1] ^ 1
        return row, column

    fails(quantize_case("nvfp4-2d-4over6-448-mae", "both"), "columnwise.scales", quantize_both=door)


@pytest.mark.parametrize("given", [("codes", "scales", "amax", "tensor_scale"), ("codes", "scales", "amax")])
def test_the_amax_of_the_neighbouring_row(given):
    def door(x, recipe):
        neighbour = reference.quantize(x, recipe).amax.roll(1)
        q = reference.quantize(x, recipe, amax=neighbour)
        return {name: getattr(q, name) for name in given}

    record = fails(quantize_case("nvfp4-rowscaled"), "amax", quantize=door)
    assert "47 of 48 amaxes differ" in record.message
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["amax"]
    assert record.findings[0]["elements"][0]["row"] == 0


def test_the_scale_of_the_neighbouring_row():
    def door(x, recipe):
        right = reference.quantize(x, recipe)
        encode = tensor_scale(right.amax.roll(1), recipe)
        scales = block_scales(block_amax(x, 16), encode, recipe)
        return encode_elements(x, scales, encode, recipe), scales, right.amax

    fails(quantize_case("nvfp4-rowscaled"), "scales", quantize=door)


def test_one_amax_where_every_row_has_one():
    record = run(quantize_case("nvfp4-rowscaled"), quantize=lambda x, recipe: reference.quantize(x, "nvfp4"))
    assert record.message == (
        "quantize gave amax as float32 of shape (1,); nvfp4-rowscaled of (48, 64) has float32 of shape (48,)"
    )


def test_a_section_that_is_multiplied_by_its_neighbour_s_matrix():
    def door(a, b, **options):
        return reference.gemm_grouped(a, [*b[1:], b[0]], **options)

    fails(gemm_case("nvfp4", "even:4", operation="gemm-grouped"), "output", gemm_grouped=door)


def test_a_section_with_another_bias():
    def door(a, b, *, bias, **options):
        return reference.gemm_grouped(a, b, bias=bias[:1].expand(len(b), -1), **options)

    record = fails(gemm_case("nvfp4", "even:4", "bias", operation="gemm-grouped"), "output", gemm_grouped=door)
    assert record.findings[0]["elements"][0]["row"] >= 12


def test_a_wrong_matrix_of_several_is_named():
    calls = count()

    def door(x, recipe):
        q = reference.quantize(x, recipe)
        if next(calls) == 2:
            q.codes[3, 4] ^= 0x10
        return q

    record = fails(gemm_case("nvfp4", "even:4", operation="gemm-grouped"), "w.codes", quantize=door)
    assert record.message.startswith("w.codes: matrix 2 of 4: 1 of 2 048 codes differ")


def test_sizes_come_back_as_they_were():
    def door(x, sizes, recipe):
        q = quantize_grouped(x, sizes.clone(), recipe)
        sizes[0] += 1
        return q

    record = fails(grouped_case("nvfp4", "even:4"), "memory", quantize_grouped=door)
    assert record.message.startswith("memory: 1 bytes of input sizes were changed")
