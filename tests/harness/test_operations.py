"""Every operation, recipe and option: the reference passes, and a kernel with one defect fails at the right stage."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from harness.case import Case
from harness.families import families_of
from harness.inputs import Inputs, make_inputs
from harness.layouts import laid_out
from harness.operations.grouped import judge_quantize_grouped
from harness.report.text import not_compared
from harness.runner import run_case
from harness.schema import KEYS
from reference import ops as reference
from reference.blocks import block_amax, over_tiles
from reference.decode import decode
from reference.encode import encode
from reference.formats import FP32
from reference.layout import pad_scales
from reference.quantize import encode_elements, quantize_both, quantize_grouped
from reference.recipes import recipe, recipe_names
from reference.scaling import block_scales, tensor_scale, unrounded_scales
from tests.harness.backends import backend, quantize, rotating
from tests.native.samples import nearly_tied
from tests.thinned import thinned

REFERENCE = {name: getattr(reference, name) for name in (
    "quantize", "quantize_both", "quantize_grouped", "dequantize", "transform", "swizzle", "unswizzle", "gemm",
    "gemm_grouped",
)}  # fmt: skip


def quantize_case(rule: str, *flags: str, shape=(48, 64), inputs="normal", dtype="bf16") -> Case:
    return Case("quantize", rule, shape, dtype, inputs, flags)


def grouped_case(rule: str, *flags: str, shape=(96, 64), inputs="normal") -> Case:
    return Case("quantize-grouped", rule, shape, "bf16", inputs, flags)


def gemm_case(rule: str, *flags: str, shape=(48, 64, 32), inputs="normal", operation="gemm") -> Case:
    return Case(operation, rule, shape, "bf16xbf16-fp32", inputs, flags)


def swizzle_case(inputs="position", shape=(256, 12)) -> Case:
    return Case("swizzle", "", shape, "", inputs)


def run(case, **doors):
    return run_case(case, backend(**doors))


def stages(record):
    return {entry["stage"]: entry for entry in record.stages}


def passes(case, **doors):
    record = run(case, **(doors or REFERENCE))
    assert (record.verdict, record.message) == ("pass", ""), case.id
    return record


def fails(case, stage, **doors):
    record = run(case, **{**REFERENCE, **doors})
    assert (record.verdict, record.stage) == ("fail", stage), (case.id, record.message)
    return record


# The reference passes everything, and every stage is seen.

# How the next scale of delayed scaling is made changes nothing of quantize.
RECIPES = [name for name in recipe_names() if "@" not in name and not name.endswith(("-recent", "-bulk"))]


@pytest.mark.long
@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_in_every_usage(name, usage):
    flags = [] if usage == "rowwise" else [usage]
    for inputs, options in (("nan", []), ("normal", ["swizzled"] if recipe(name).scale is not FP32 else [])):
        record = passes(quantize_case(name, *flags, *options, shape=(128, 128), inputs=inputs))
        assert "stages not observed" not in not_compared([record.to_dict()])
        assert record.excused_share == (0 if "rht" in name else None)


@pytest.mark.parametrize("family", thinned(families_of("quantize"), 3))
@pytest.mark.parametrize(
    "name", ["nvfp4-2d", "nvfp4-rowscaled", "nvfp4-4over6-448-mae", "nvfp4-2d-4over6-256-mse", "nvfp4-sr"]
)
def test_every_family_of_the_variants_passes(name, family):
    # Another dtype and shape for each: a tenth of a minute in place of half of one.
    dtype, shape = [("fp32", (17, 50)), ("bf16", (2, 3, 33)), ("fp16", (17, 50))][len(name + family) % 3]
    passes(quantize_case(name, "both", shape=shape, inputs=family, dtype=dtype))


@pytest.mark.parametrize("view", ["strided", "transposed"])
@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 64), (2, 3, 8, 64)])
@pytest.mark.parametrize("flags", [(), ("columnwise",), ("both",)])
def test_views_are_given_as_views(view, shape, flags):
    seen = []

    def spying(door):
        def call(x, *arguments, **options):
            seen.append((tuple(x.shape), x.stride()))
            return door(x, *arguments, **options)

        return call

    doors = {name: spying(REFERENCE[name]) for name in ("quantize", "quantize_both")}
    case = quantize_case("nvfp4-rht", *flags, view, shape=shape)
    passes(case, **doors)
    x = make_inputs(case).x
    wanted = laid_out(x, view)
    assert not wanted.is_contiguous()
    assert torch.equal(wanted, x)
    assert set(seen) == {(tuple(x.shape), wanted.stride())}
    assert tuple(x.shape) == ((64, 48) if flags == ("columnwise",) else shape)


@pytest.mark.parametrize(("view", "stage"), [("strided", "repeat"), ("transposed", "scales")])
def test_a_kernel_that_reads_a_view_as_if_it_were_contiguous_fails(view, stage):
    def careless(x, rule):
        return reference.quantize(x.as_strided(x.shape, (x.shape[1], 1)), rule)

    fails(quantize_case("nvfp4", view, shape=(48, 128)), stage, quantize=careless)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
def test_random_bits_are_given_as_seed_and_offset_or_as_words(usage, words):
    given = []

    def spying(door):
        def call(x, rule, **options):
            given.append(options["random"])
            return door(x, rule, **options)

        return call

    flags = [f for f in (usage, "words" if words else "") if f not in ("rowwise", "")]
    doors = {name: spying(REFERENCE[name]) for name in ("quantize", "quantize_both")}
    case = quantize_case("nvfp4-sr", *flags)
    passes(case, **doors)
    if not words:
        assert len(set(given)) == 1
        assert all(0 <= number < 2**63 for number in given[0])
        again = make_inputs(case).random["x"]
        assert given[0] == again != make_inputs(case, seed=1).random["x"]
    elif usage == "both":
        assert [tuple(t.shape) for t in given[0]] == [(48, 16), (64, 12)]
    else:
        assert tuple(given[0].shape) == ((48, 16) if usage == "rowwise" else (64, 12))
        assert given[0].dtype == torch.int32


@pytest.mark.parametrize("sections", thinned(["even:4", "front:4", "middle:4", "end:4", "ragged:3", "even:1"], 3))
@pytest.mark.parametrize("usage", [(), ("columnwise",)])
@pytest.mark.parametrize(
    "name", ["nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-2d-4over6-448-mse", "nvfp4-rht-sr", "nvfp4-sr"]
)
def test_sections_pass(name, usage, sections):
    shape = (192, 64) if sections != "ragged:3" or not usage or "rht" not in name else (272, 64)
    record = passes(grouped_case(name, sections, *usage, shape=shape))
    assert list(stages(record)) == ["memory", "repeat", "amax", "tensor scale", "scales", "codes"]
    assert stages(record)["codes"]["compared"] == shape[0] * shape[1]


def test_sections_of_nothing_pass():
    passes(grouped_case("nvfp4", "empty:4", shape=(0, 64)))
    passes(grouped_case("nvfp4-sr", "empty:4", "columnwise", shape=(0, 64)))
    passes(gemm_case("nvfp4", "empty:4", "accumulate", "bias", shape=(0, 64, 32), operation="gemm-grouped"))


SECTION_FORMS = {
    "a mapping": lambda q: {"codes": q.codes, "scales": q.scales, "amax": q.amax},
    "a tuple": lambda q: (q.codes, q.scales, q.amax),
    "a tuple without amax": lambda q: (q.codes, q.scales),
    "a list of Quantized": lambda q: q.sections(),
    "a tuple of tuples": lambda q: tuple((s.codes, s.scales, s.amax) for s in q.sections()),
    "a list of mappings without amax": lambda q: [{"codes": s.codes, "scales": s.scales} for s in q.sections()],
    "memory with room behind": lambda q: replace(
        q, codes=torch.cat([q.codes, q.codes]), scales=torch.cat([q.scales, q.scales])
    ) if q.columnwise else q,
}  # fmt: skip


@pytest.mark.parametrize("usage", [(), ("columnwise",)])
@pytest.mark.parametrize("form", SECTION_FORMS)
def test_sections_may_be_given_as(form, usage):
    def door(x, sizes, rule, **options):
        return SECTION_FORMS[form](reference.quantize_grouped(x, sizes, rule, **options))

    record = passes(grouped_case("nvfp4", "front:4", *usage), quantize_grouped=door)
    assert ("amax" in stages(record)) == ("without" not in form)
    if not usage:
        passes(
            gemm_case("nvfp4", "front:4", operation="gemm-grouped"),
            quantize_grouped=door, gemm_grouped=reference.gemm_grouped,
        )  # fmt: skip


@pytest.mark.parametrize("family", families_of("gemm-grouped"))
def test_grouped_products_pass(family):
    for flags in (("front:4",), ("ragged:3", "accumulate", "bias")):
        record = passes(gemm_case("nvfp4+nvfp4-2d", *flags, inputs=family, operation="gemm-grouped"))
        operands = [f"{name}.{stage}" for name in "xw" for stage in ("amax", "tensor scale", "scales", "codes")]
        assert list(stages(record)) == [*operands, "memory", "repeat", "output"]
        assert stages(record)["output"]["compared"] == 48 * 32


def test_a_grouped_product_needs_no_quantize():
    record = passes(gemm_case("nvfp4", "front:4", operation="gemm-grouped"), gemm_grouped=reference.gemm_grouped)
    assert list(stages(record)) == ["memory", "repeat", "output"]


@pytest.mark.parametrize("layout", ["tn", "nn", "nt"])
@pytest.mark.parametrize("rule", ["nvfp4", "nvfp4-rowscaled+nvfp4-2d", "nvfp4-sr", "nvfp4-2d-4over6-256-mae"])
def test_operands_that_lie_the_other_way_round_are_columnwise_halves(rule, layout):
    calls = []

    def spying(name):
        def call(x, recipe_, **options):
            calls.append((name, tuple(x.shape), options.get("rowwise", True)))
            return REFERENCE[name](x, recipe_, **options)

        return call

    case = gemm_case(rule, layout)
    passes(case, gemm=reference.gemm, **{name: spying(name) for name in ("quantize", "quantize_both")})
    x = ("quantize_both", (64, 48), False) if layout == "nt" else ("quantize", (48, 64), True)
    w = ("quantize", (32, 64), True) if layout == "tn" else ("quantize_both", (64, 32), False)
    assert calls == [x, w]
    calls.clear()
    passes(case, gemm=reference.gemm, quantize=spying("quantize"))
    assert calls == [("quantize", (48, 64), True), ("quantize", (32, 64), True)]


@pytest.mark.parametrize("rule", ["nvfp4-rht", "nvfp4-2d-rht", "nvfp4-rht-sr", "nvfp4-rht+nvfp4-2d-rht"])
def test_rotations_cancel_in_a_product(rule):
    case = gemm_case(rule, "nt", "bias")
    assert passes(case).sqnr_db == float("inf")
    passes(case, quantize=rotating()["quantize"], gemm=reference.gemm)


@pytest.mark.parametrize("shape", [(128, 4), (256, 16), (130, 5), (1, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("inputs", families_of("swizzle"))
def test_swizzles_pass(inputs, shape):
    record = passes(swizzle_case(inputs, shape))
    assert list(stages(record)) == ["memory", "repeat", "layout", "unswizzle"]
    there = passes(swizzle_case(inputs, shape), swizzle=reference.swizzle)
    assert list(stages(there)) == ["memory", "repeat", "layout"]
    assert not_compared([there.to_dict()]).endswith("swizzle unswizzle in 1 case.")


# One defect each.


def halves_swapped(x, rule, **options):
    return quantize_both(x.T, rule, **options) if x.shape[0] == x.shape[1] else quantize_both(x, rule, **options)


def test_halves_in_the_wrong_order():
    fails(quantize_case("nvfp4", "both", shape=(64, 64)), "rowwise.scales", quantize_both=halves_swapped)
    wrong = run(quantize_case("nvfp4", "both"), quantize_both=lambda *a, **o: quantize_both(*a, **o)[::-1])
    assert wrong.verdict == "error"
    assert wrong.message.startswith("the rowwise half of quantize_both gave codes as uint8 of shape (64, 24); nvfp4 of")


def test_a_half_that_is_another_when_it_is_made_alone():
    def door(x, rule, **options):
        row, column = quantize_both(x, rule, **options)
        if row is None:
            column.codes[3, 4] ^= 1
        return row, column

    record = fails(quantize_case("nvfp4", "both"), "halves", quantize_both=door)
    assert record.message == "halves: 1 of 1 536 codes of the columnwise half differ when it is made alone"


def test_a_columnwise_half_that_is_not_rotated_or_a_rowwise_one_that_is():
    case = quantize_case("nvfp4-rht", "both", shape=(64, 64))

    def rotating_neither(x, rule, **options):
        row, column = quantize_both(x, recipe("nvfp4"), **options)
        return row, column

    def rotating_both(x, rule, *, rowwise=True, columnwise=True):
        row, column = quantize_both(x, rule, rowwise=rowwise, columnwise=columnwise)
        return row and reference.quantize(x, rule), column

    fails(case, "columnwise.amax", quantize_both=rotating_neither)
    fails(case, "rowwise.amax", quantize_both=rotating_both)


def test_a_half_that_was_not_asked_for():
    record = run(quantize_case("nvfp4", "both"), quantize_both=lambda x, rule, **options: quantize_both(x, rule))
    assert record.message == "quantize_both gave a columnwise half, columnwise=False"
    record = run(quantize_case("nvfp4", "both"), quantize_both=lambda x, rule: (reference.quantize(x, rule), None))
    assert record.message == "quantize_both gave no columnwise half, columnwise=True"
    record = run(quantize_case("nvfp4", "both"), quantize_both=reference.quantize)
    assert record.message == "quantize_both gave Quantized; it gives a rowwise and a columnwise half"


def test_a_kernel_that_makes_both_halves_or_nothing_shows_no_halves():
    def door(x, rule, *, rowwise=True, columnwise=True):
        if not (rowwise and columnwise):
            raise NotImplementedError("both or nothing")
        return quantize_both(x, rule)

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
    assert stages(record)["unswizzle"]["sentence"] == ""  # right on what it was given


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
    def door(x, rule, *, swizzled=False, **options):
        q = reference.quantize(x, rule, **options)
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
    record = run(quantize_case("nvfp4", "swizzled"), quantize=lambda x, rule, swizzled: reference.quantize(x, rule))
    assert record.verdict == "error"
    assert record.message == (
        "quantize gave scales as uint8 of shape (48, 4); nvfp4 of (48, 64), swizzled, has uint8 of shape (128, 4)"
    )


def one_wrong_scale(q):
    q.scales[17, 2] ^= 1


def test_a_wrong_scale_of_swizzled_ones_is_a_wrong_scale():
    def door(x, rule, *, swizzled=False):
        q = reference.quantize(x, rule)
        q.scales[17, 2] ^= 1
        return replace(q, scales=reference.swizzle(q.scales), swizzled=True)

    record = fails(quantize_case("nvfp4", "swizzled"), "scales", quantize=door)
    assert "1 of 192 block scales differ, each by 1 step, at row 17, column 2" in record.message


def stale_amax(x, sizes, rule, **options):
    q = quantize_grouped(x, sizes, rule, **options)
    parts, last = [], None
    for part, section in zip(torch.split(x, sizes.tolist()), q.sections(), strict=True):
        parts.append(section if last is None else reference.quantize(part, rule, amax=last))
        last = section.amax
    return parts


def test_a_wrong_amax_of_columnwise_tiles_is_one_finding():
    """Scales are judged by the kernel's own amax, and 4over6 chooses along the rows of what was given."""
    x = nearly_tied()
    case = grouped_case("nvfp4-2d-4over6-256-mae", "even:2", "columnwise", shape=tuple(x.shape))

    def door(given, sizes, rule, **options):
        amaxes = [part.abs().amax().float() for part in torch.split(given, sizes.tolist())]
        return reference.quantize_grouped(given, sizes, rule, **options, amax=2 * torch.stack(amaxes))

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
    def door(x, sizes, rule):
        return quantize_grouped(x, sizes, rule, amax=x.float().abs().amax().expand(len(sizes)).contiguous())

    fails(grouped_case("nvfp4", "ragged:3"), "amax", quantize_grouped=door)


def test_random_bits_that_every_section_begins_anew():
    def door(x, sizes, rule, *, random):
        return [reference.quantize(part, rule, random=random) for part in torch.split(x, sizes.tolist())]

    record = fails(grouped_case("nvfp4-sr", "even:3"), "codes", quantize_grouped=door)
    assert record.message.startswith("codes: section 1 of 3: ")


def test_random_bits_that_rows_share():
    def door(x, rule, *, random):
        bits = make_inputs(quantize_case("nvfp4-sr", "words")).random["x"] if isinstance(random, tuple) else random
        shared = bits[:1].expand(x.shape[0], -1).contiguous()
        return reference.quantize(x, rule, random=shared)

    for flags in ((), ("words",)):
        record = fails(quantize_case("nvfp4-sr", *flags), "codes", quantize=door)
        assert stages(record)["scales"]["sentence"] == ""


def test_bytes_of_a_word_in_the_wrong_order():
    def door(x, rule, *, random):
        turned = random.view(torch.uint8).view(*random.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)
        return reference.quantize(x, rule, random=turned)

    fails(quantize_case("nvfp4-sr", "words"), "codes", quantize=door)


def test_the_offset_of_the_other_half():
    def door(x, rule, *, random, **options):
        return quantize_both(x, rule, random=(random[0], random[1] - 1), **options)

    fails(quantize_case("nvfp4-sr", "both"), "rowwise.codes", quantize_both=door)

    def same(x, rule, *, random, rowwise=True, columnwise=True):
        row, column = quantize_both(x, rule, random=random, rowwise=rowwise, columnwise=columnwise)
        return row, column and reference.quantize(x.T, rule, random=random)

    fails(quantize_case("nvfp4-sr", "both"), "columnwise.codes", quantize_both=same)


def test_rounding_to_nearest_where_it_should_be_stochastic():
    fails(quantize_case("nvfp4-sr"), "codes", quantize=lambda x, rule, random: reference.quantize(x, "nvfp4"))


def test_tiles_of_eight_rows():
    def door(x, rule):
        right = reference.quantize(x, rule)
        blocks = over_tiles(block_amax(x, 16), 8)
        scales = block_scales(blocks, right.tensor_scale, rule)
        return replace(right, scales=scales, codes=encode_elements(x, scales, right.tensor_scale, rule))

    record = fails(quantize_case("nvfp4-2d"), "scales", quantize=door)
    assert stages(record)["codes"]["sentence"] == ""


def test_the_scale_of_a_tile_that_is_written_for_its_first_row_only():
    def door(x, rule):
        q = reference.quantize(x, rule)
        scales = torch.zeros_like(q.scales)
        scales[::16] = q.scales[::16]
        return replace(q, scales=scales)

    record = fails(quantize_case("nvfp4-2d"), "scales", quantize=door)
    assert "180 of 192 block scales differ" in record.message


def where_equal_four(x, rule):
    """4over6 with ≤ in place of <: seen where the two are as near."""
    q = reference.quantize(x, rule)
    base = unrounded_scales(block_amax(x, 16), q.tensor_scale, rule)
    six, four = (encode(scale, rule.scale) for scale in (base, base * 1.5))
    alone = (x.view(len(x), -1, 16) != 0).sum(2) <= 1
    tie = alone & (decode(four, rule.scale) == 1.5 * decode(six, rule.scale))
    scales = torch.where(tie, four, q.scales)
    return replace(q, scales=scales, codes=encode_elements(x, scales, q.tensor_scale, rule))


@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("most", [448, 256])
def test_four_where_it_is_no_better_than_six(most, mode):
    case = quantize_case(f"nvfp4-4over6-{most}-{mode}", inputs="single", shape=(128, 128))
    record = fails(case, "scales", quantize=where_equal_four)
    assert stages(record)["scales"]["mismatches"] > 100
    assert stages(record)["codes"]["sentence"] == ""


def test_an_error_of_the_other_mode():
    case = quantize_case("nvfp4-4over6-448-mae", shape=(128, 128))
    fails(case, "scales", quantize=lambda x, rule: reference.quantize(x, "nvfp4-4over6-448-mse"))


def test_columnwise_tiles_that_choose_for_themselves():
    """The columnwise half is the transpose of the rowwise one, although its own sums of errors round otherwise."""

    def door(x, rule, *, rowwise=True, columnwise=True):
        row, column = quantize_both(x, rule, rowwise=rowwise, columnwise=columnwise)
        if column is not None:
            column.scales[16:32, 1] = column.scales[16:32, 1] ^ 1
        return row, column

    fails(quantize_case("nvfp4-2d-4over6-448-mae", "both"), "columnwise.scales", quantize_both=door)


@pytest.mark.parametrize("given", [("codes", "scales", "amax", "tensor_scale"), ("codes", "scales", "amax")])
def test_the_amax_of_the_neighbouring_row(given):
    def door(x, rule):
        neighbour = reference.quantize(x, rule).amax.roll(1)
        q = reference.quantize(x, rule, amax=neighbour)
        return {name: getattr(q, name) for name in given}

    record = fails(quantize_case("nvfp4-rowscaled"), "amax", quantize=door)
    assert "47 of 48 amaxes differ" in record.message
    assert [name for name, entry in stages(record).items() if entry["sentence"]] == ["amax"]
    assert record.findings[0]["elements"][0]["row"] == 0


def test_the_scale_of_the_neighbouring_row():
    def door(x, rule):
        right = reference.quantize(x, rule)
        encode = tensor_scale(right.amax.roll(1), rule)
        scales = block_scales(block_amax(x, 16), encode, rule)
        return encode_elements(x, scales, encode, rule), scales, right.amax

    fails(quantize_case("nvfp4-rowscaled"), "scales", quantize=door)


def test_one_amax_where_every_row_has_one():
    record = run(quantize_case("nvfp4-rowscaled"), quantize=lambda x, rule: reference.quantize(x, "nvfp4"))
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

    def door(x, rule):
        q = reference.quantize(x, rule)
        if next(calls) == 2:
            q.codes[3, 4] ^= 0x10
        return q

    record = fails(gemm_case("nvfp4", "even:4", operation="gemm-grouped"), "w.codes", quantize=door)
    assert record.message.startswith("w.codes: matrix 2 of 4: 1 of 2 048 codes differ")


def test_sizes_come_back_as_they_were():
    def door(x, sizes, rule):
        q = quantize_grouped(x, sizes.clone(), rule)
        sizes[0] += 1
        return q

    record = fails(grouped_case("nvfp4", "even:4"), "memory", quantize_grouped=door)
    assert record.message.startswith("memory: 1 bytes of input sizes were changed")


# Doors that are not there.


@pytest.mark.parametrize("operation", KEYS)
def test_a_door_that_is_not_there_is_unsupported(operation):
    cases = {
        "quantize": quantize_case("nvfp4", "both"),
        "transform": Case("transform", "nvfp4-rht", (16, 32), "bf16", "normal"),
        "update-scale": Case("update-scale", "fp8-delayed-e4m3", (4, 3), "", "amaxes"),
        "gemm-quantized": gemm_case("mxfp8-e4m3", "tn", "mxfp8-e4m3", operation="gemm-quantized"),
        "swizzle": swizzle_case(), "quantize-grouped": grouped_case("nvfp4", "even:4"),
        "gemm": gemm_case("nvfp4", "tn"), "gemm-grouped": gemm_case("nvfp4", "even:4", operation="gemm-grouped"),
        "grouped-linear": Case("grouped-linear", "MXFP8BlockScaling", (8, 32, 16), "bf16", "normal", ("even:2",)),
        **{name: Case(name, "MXFP8BlockScaling", (1, 8, 32, 16), "bf16", "normal", ("heads:2",))
           for name in ("linear", "layernorm-linear", "transformer-layer")},
    }  # fmt: skip
    record = run(cases[operation], dequantize=reference.dequantize)
    assert record.verdict == "unsupported"
    assert record.message.startswith("backend wrong has no ")


def test_options_are_given_only_where_they_differ_from_their_default():
    """So that a door of a person's own need not know them."""

    def alone(*given):
        return reference.quantize(*given)

    def grouped(*given):
        return quantize_grouped(*given)

    for case in (quantize_case("nvfp4"), quantize_case("nvfp4", "columnwise"), quantize_case("nvfp4-rowscaled")):
        passes(case, quantize=alone)
    passes(grouped_case("nvfp4", "even:4"), quantize_grouped=grouped)
    passes(
        gemm_case("nvfp4", "even:4", operation="gemm-grouped"),
        gemm_grouped=lambda a, b, *, out_dtype: reference.gemm_grouped(a, b, out_dtype=out_dtype),
    )


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("name", thinned(RECIPES, 3))
def test_one_wrong_byte_of_any_recipe_is_found(name, part):
    def spoil(q):
        numbers = getattr(q, part)
        if numbers.dtype == torch.float32:
            numbers.view(torch.int32)[-1, -1] ^= 1
        else:
            numbers[17, 3] ^= 1

    record = fails(quantize_case(name, shape=(32, 128)), part, quantize=quantize(spoil))
    assert stages(record)[part]["mismatches"] == 1


# Dialects: whoever speaks one of another library is judged by it.

SPOKEN = [name for name in recipe_names() if "@" in name]


@pytest.mark.long
@pytest.mark.parametrize("usage", [(), ("both",)])
@pytest.mark.parametrize("name", SPOKEN)
def test_a_backend_that_speaks_a_dialect_passes_in_it(name, usage):
    for dtype in ("fp32", "bf16", "fp16"):
        for inputs in ("normal", "e4m3-ties", "huge"):
            passes(quantize_case(name, *usage, dtype=dtype, inputs=inputs, shape=(33, 77)))


@pytest.mark.long
@pytest.mark.parametrize("name", SPOKEN)
def test_a_backend_that_speaks_another_dialect_fails_in_it(name):
    """It speaks te, but for the name: what te-native quantizes is the same."""
    rule = recipe(name)

    def quantize(x, _, **options):
        return replace(reference.quantize(x, rule.name, **options), recipe=rule)

    verdicts = {
        run(quantize_case(name, dtype=dtype, inputs=inputs, shape=(64, 128)), quantize=quantize).verdict
        for dtype in ("fp32", "bf16")
        for inputs in ("e4m3-ties", "huge", "low-rows", "scale-edges")
    }
    assert ("fail" in verdicts) == (name != "nvfp4@te-native")
