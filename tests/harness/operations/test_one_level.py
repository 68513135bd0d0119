"""MX and FP8: every stage of the reference passes, and a kernel with a single defect has a single finding."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import OPERATIONS, case_from_labels
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.report.text import not_compared
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.tools.show import show_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.reference.quantize.layout import pack, swizzle
from narrowgauge.reference.quantize.scaling import divide, element_factors, encode_scales, per_row, scale_elements
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E5M2
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

DOORS = ("quantize", "quantize_both", "quantize_grouped", "dequantize", "update_scale")
REFERENCE = {name: getattr(reference, name) for name in DOORS}
MX = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
FP8 = ("fp8-block-1x128-e4m3-pow2", "fp8-block-128x128-e4m3-fp32", "fp8-current-e4m3", "fp8-delayed-e4m3")


def case_of(recipe, *flags, shape=(64, 160), inputs="normal", dtype="fp32", operation="quantize"):
    return case_from_labels(operation, recipe, shape, dtype, inputs, flags)


def run(case, **doors):
    return run_case(case, backend(**{**REFERENCE, **doors}))


def wrong_stages(record):
    return [entry["stage"] for entry in record.stages if entry["sentence"]]


def passes(case, **doors):
    record = run(case, **doors)
    assert (record.verdict, record.message) == ("pass", ""), case.id
    return record


def fails(case, *stages, **doors):
    """Exactly these stages are wrong."""
    record = run(case, **doors)
    assert (record.verdict, wrong_stages(record)) == ("fail", list(stages)), (case.id, record.message)
    return record


# Findings.


@pytest.mark.parametrize("flags", [(), ("columnwise",), ("both",)])
@pytest.mark.parametrize("name", [*MX, "mxfp8-2d", "mxfp4-2d-sr", *FP8])
def test_every_stage_is_seen(name, flags):
    record = passes(case_of(name, *flags))
    of_tensor = ["amax", "tensor scale"] if find_recipe(name).tensor_scale != "none" else []
    stages = [*of_tensor, "scales", "codes"]
    if flags == ("both",):
        expected = [f"{half}.{stage}" for half in ("rowwise", "columnwise") for stage in stages] + ["halves"]
    else:
        expected = [*stages, "values"]
    assert [entry["stage"] for entry in record.stages] == ["memory", "repeat", *expected]
    assert "stages not observed" not in not_compared([record.to_dict()])
    assert all(entry["compared"] for entry in record.stages)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("usage", [(), ("columnwise",)])
@pytest.mark.parametrize("sections", ["ragged:3", "front:4", "even:1"])
@pytest.mark.parametrize("name", [*MX, "mxfp8-2d", "mxfp8-e4m3-sr", *FP8])
def test_sections_pass(name, sections, usage):
    case = case_of(name, sections, *usage, shape=(288, 136), operation="quantize-grouped")
    assert passes(case).stages[-1]["compared"] == 288 * 136
    if sections == "front:4":
        passes(replace(case, shape=(0, 136), sections="empty:4"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*MX, *FP8])
def test_a_wrong_section_is_named(name):
    def door(x, sizes, recipe, **options):
        q = reference.quantize_grouped(x, sizes, recipe, **options)
        q.codes[-1, -1] ^= 1
        return q

    record = fails(
        case_of(name, "even:4", shape=(128, 64), operation="quantize-grouped"), "codes", quantize_grouped=door
    )
    assert record.message.startswith("codes: section 3 of 4: 1 of 2 048 codes differ")


@pytest.mark.parametrize("name", MX[:4])
def test_a_columnwise_half_in_place_comes_from_quantize_both(name):
    given = []

    def door(x, recipe, **options):
        given.append((tuple(x.shape), sorted(options)))
        return reference.quantize_both(x, recipe, **options)

    for view in ((), ("strided",), ("transposed",)):
        passes(case_of(name, "columnwise", *view), quantize_both=door, quantize=None)
    assert given == [((64, 160), ["rowwise"])] * 6


def test_random_bits_of_a_half_that_is_made_in_place():
    given = []

    def door(x, recipe, **options):
        given.append(options["random"])
        return reference.quantize_both(x, recipe, **options)

    passes(case_of("mxfp8-e4m3-sr", "columnwise"), quantize_both=door)
    assert all(isinstance(number, int) for number in given[0])
    passes(case_of("mxfp8-e4m3-sr", "columnwise", "words"), quantize_both=door)
    assert given[-1][0] is None
    assert tuple(given[-1][1].shape) == (160, 16)
    again = make_inputs(case_of("mxfp8-e4m3-sr", "columnwise", "words"))
    assert [*again.under("random."), *again.counters] == ["xT"]
    wrong = run(
        case_of("mxfp8-e4m3-sr", "columnwise"),
        quantize_both=lambda x, recipe, random, **options: reference.quantize_both(
            x, recipe, random=(random[0], random[1] + 1), **options
        ),
    )
    assert wrong_stages(wrong) == ["codes"]


# The blamed stage, and its place.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("flags", [("columnwise",), ("both",)])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_findings_of_a_half_in_place_are_in_the_coordinates_of_x(part, flags):
    """Codes lie as x does, (64, 160); a scale at (1, 37) is of column 37 and of the 32 rows from row 32 on."""

    def door(x, recipe, **options):
        row, column = reference.quantize_both(x, recipe, **options)
        if column is not None:
            getattr(column, part)[1, 37] ^= 1
        return row, column

    prefix = "" if flags == ("columnwise",) else "columnwise."
    record = run(case_of("mxfp8-e4m3", *flags), quantize_both=door)
    assert (record.verdict, record.stage) == ("fail", f"{prefix}{part}")
    element = record.findings[0]["elements"][0]
    assert (element["column"], element["block"]) == (37, 0 if part == "codes" else 1)
    assert element["row"] == (1 if part == "codes" else 32)
    x = make_inputs(case_of("mxfp8-e4m3", *flags)).x
    wanted = x[1, 37] if part == "codes" else x[32:, 37].abs().max()
    assert element["input"] == float(wanted)


def by_other_rule(other):
    """A quantize with the scales of a second recipe, and the codes under these scales."""

    def door(x, recipe, **options):
        return replace(reference.quantize(x, other(recipe), **options), recipe=recipe)

    return door


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dialect", ["ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest"])
def test_another_rule_for_the_exponent_is_one_finding(dialect, dtype):
    door = by_other_rule(lambda recipe: find_recipe(f"{recipe.name}@{dialect}"))
    fails(case_of("mxfp8-e4m3", inputs="scale-edges", dtype=dtype), "scales", quantize=door)


def rounding_ties_to_zero(x, recipe, **options):
    q = reference.quantize(x, recipe, **options)
    factors = element_factors(q.scales, q.tensor_scale, recipe, x.dtype, block_amaxes(x, recipe))
    codes = encode(
        scale_elements(x, per_row(factors, recipe, len(x)), q.tensor_scale, recipe), recipe.element, ties="zero"
    )
    return replace(q, codes=pack(codes) if recipe.element.bits == 4 else codes)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [*MX, *FP8, "fp8-current-e5m2", "fp8-block-1x128-e5m2-fp32", "fp8-delayed-e5m2"])
def test_another_rounding_of_ties_is_found_on_ties(name, dtype):
    record = fails(case_of(name, inputs="ties", dtype=dtype), "codes", quantize=rounding_ties_to_zero)
    assert record.max_ulp == 1
    assert record.mismatches > 64 * 160 / 8


@pytest.mark.parametrize("name", ["mxfp8-e5m2", "fp8-current-e5m2", "fp8-block-1x128-e5m2-pow2", "fp8-delayed-e5m2"])
def test_infinity_that_does_not_saturate(name):
    def door(x, recipe, **options):
        q = reference.quantize(x, recipe, **options)
        return replace(q, codes=torch.where(x == torch.inf, E5M2.inf_code, q.codes).to(torch.uint8))

    passes(case_of(name), quantize=door)
    record = fails(case_of(name, inputs="inf"), "codes", quantize=door)
    assert record.findings[0]["elements"][0]["actual"] == "inf"


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("block", ["1x128", "128x128"])
def test_elements_multiplied_by_the_inverse_of_the_inverse(block, kind):
    """fl(1/fl(1/s)) is not s, unless s is a power of two."""

    def door(x, recipe, **options):
        q = reference.quantize(x, recipe, **options)
        factors = per_row(divide(1.0, q.scales), recipe, len(x))
        return replace(q, codes=encode(scale_elements(x, factors, None, recipe), recipe.element))

    case = case_of(f"fp8-block-{block}-e4m3-{kind}", inputs="near-ties")
    if kind == "pow2":
        passes(case, quantize=door)
    else:
        assert fails(case, "codes", quantize=door).max_ulp == 1


@pytest.mark.parametrize("name", ["fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2-fp32", "fp8-current-e4m3"])
def test_scales_that_are_not_cut_to_a_power_of_two_or_are(name):
    other = name.removesuffix("-fp32") + "-pow2"
    for asked, made in ((name, other), (other, name)):
        record = run(case_of(asked), quantize=by_other_rule(lambda recipe, made=made: find_recipe(made)))
        assert wrong_stages(record) == (["scales"] if "block" in name else ["tensor scale"]), record.message


def without_tensor_scale(door):
    return lambda *given, **options: replace(door(*given, **options), tensor_scale=None, amax=None)


def test_current_scaling_without_a_scale_fails_in_its_inverse():
    door = by_other_rule(lambda recipe: find_recipe("fp8-current-e4m3-pow2"))
    fails(case_of("fp8-current-e4m3"), "scales", quantize=without_tensor_scale(door))
    passes(case_of("fp8-current-e4m3"), quantize=without_tensor_scale(reference.quantize))


@pytest.mark.parametrize("flags", [(), ("columnwise",), ("both",)])
def test_delayed_scaling_that_takes_the_scale_of_its_own_input(flags):
    def own(x):
        return encode_scales(x.abs().amax().view(1), find_recipe("fp8-current-e5m2"), x.dtype)

    def one(x, recipe, *, scale):
        return reference.quantize(x, recipe, scale=own(x))

    def both(x, recipe, *, scale, **options):
        return reference.quantize_both(x, recipe, scale=own(x), **options)

    cases = [case_of("fp8-delayed-e5m2", *flags, shape=(n, 160)) for n in range(60, 68)]
    # A given scale is the scale of x, or a further power of two times the scale.
    case = next(c for c in cases if not torch.equal((given := make_inputs(c))["scale.x"], own(given.x)))
    halves = ("rowwise.", "columnwise.") if flags == ("both",) else ("",)
    stages = [f"{half}{stage}" for half in halves for stage in ("tensor scale", "scales", "codes")]
    fails(case, *stages, quantize=one, quantize_both=both)


def test_the_given_scale_is_guarded():
    def door(x, recipe, *, scale):
        q = reference.quantize(x, recipe, scale=scale.clone())
        scale.mul_(2)
        return q

    record = fails(case_of("fp8-delayed-e4m3"), "memory", quantize=door)
    assert "bytes of input scale were changed" in record.message


# Layout.


def test_a_half_in_place_that_is_given_as_the_transpose():
    def door(x, recipe, **options):
        row, column = reference.quantize_both(x, recipe, **options)
        return row, column and replace(column, codes=column.codes.T.contiguous(), scales=column.scales.T.contiguous())

    record = run(case_of("mxfp8-e4m3", "both"), quantize_both=door)
    assert record.verdict == "error"
    assert record.message.startswith(
        "the columnwise half of quantize_both gave codes as uint8 of shape (160, 64); mxfp8-e4m3 of (160, 64) has"
    )
    square = run(case_of("mxfp6-e3m2", "columnwise", shape=(32, 32)), quantize_both=door)
    assert square.verdict == "error"  # (1, 32) scales are no (32, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", [("columnwise", "swizzled"), ("both", "swizzled")])
def test_scales_that_are_swizzled_as_they_lie_in_memory(flags):
    """Tensor cores read the scales of a columnwise operand along its columns: (K, ⌈M/32⌉), not (⌈M/32⌉, K)."""

    def door(x, recipe, **options):
        row, column = reference.quantize_both(x, recipe, **options)
        plain = reference.quantize_both(x, recipe, rowwise=False)[1]
        lying = swizzle(plain.scales)
        return row, column and replace(column, scales=lying.view(-1)[: column.scales.numel()].view(column.scales.shape))

    prefix = "" if flags[0] == "columnwise" else "columnwise."
    record = run(case_of("mxfp8-e4m3", *flags, shape=(128, 128), inputs="position"), quantize_both=door)
    assert record.verdict == "fail"
    assert record.stage in (f"{prefix}layout", f"{prefix}scales")
    passes(case_of("mxfp8-e4m3", *flags, shape=(128, 128), inputs="position"))


# Values.


# The update of delayed scaling.

UPDATES = [
    f"fp8-delayed-{element}{recent}{margin}{bulk}"
    for element in ("e4m3", "e5m2")
    for recent in ("", "-recent")
    for margin in ("", "-margin3")
    for bulk in ("", "-bulk")
]


def update_case(recipe="fp8-delayed-e4m3", inputs="amaxes", shape=(16, 40)):
    return case_from_labels("update-scale", recipe, shape, "", inputs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("inputs", OPERATIONS["update-scale"].families())
@pytest.mark.parametrize("recipe", UPDATES)
def test_updates_pass(recipe, inputs):
    for shape in ((1, 1), (2, 3), (16, 40), (1024, 5), (4, 0)):
        record = passes(update_case(recipe, inputs, shape))
        assert [entry["stage"] for entry in record.stages] == ["memory", "repeat", "history", "scale"]
    assert record.dtype == ""


def rolled_down(history, scale, recipe):
    made = update_scale(history, scale, recipe)[1]
    wrong = history.roll(1, 0)
    wrong[0] = 0.0
    return wrong, made


def not_cleared(history, scale, recipe):
    after, made = update_scale(history, scale, recipe)
    after[0] = history[0]
    return after, made


def after_the_roll(history, scale, recipe):
    """The maximum of the history after the first row is 0 and before the last row moves."""
    cleared = history.clone()
    cleared[0] = 0.0
    return update_scale(history, scale, recipe)[0], update_scale(cleared, scale, recipe)[1]


def divided_twice(history, scale, recipe):
    """As fl(max/amax)·2^-margin, with an earlier overflow."""
    after, made = update_scale(history, scale, find_recipe(recipe.name.replace("-margin3", "")))
    return after, torch.where(made == scale, scale, made * 2.0**-3)


def with_rule(**changes):
    def door(history, scale, recipe):
        return update_scale(history, scale, replace(recipe, delayed=replace(recipe.delayed, **changes)))

    return door


def infinite(history, scale, recipe):
    after, made = update_scale(history, scale, recipe)
    return after, torch.where(made == torch.finfo(torch.float32).max, torch.inf, made)


def with_nan(history, scale, recipe):
    after, made = update_scale(history, scale, recipe)
    return after, torch.where(history.isnan().any(0), scale, made)


def reset(history, scale, recipe):
    """1, as for a new tensor, if the amax is 0, infinite or NaN."""
    after, made = update_scale(history, scale, recipe)
    return after, torch.where(made == scale, 1.0, made)


DEFECTS = [
    (rolled_down, "fp8-delayed-e4m3", "amaxes", ["history"]),
    (not_cleared, "fp8-delayed-e4m3", "amaxes", ["history"]),
    (after_the_roll, "fp8-delayed-e4m3", "amaxes", ["scale"]),
    (with_rule(algorithm="most-recent"), "fp8-delayed-e4m3", "amaxes", ["scale"]),
    (with_rule(algorithm="max"), "fp8-delayed-e4m3-recent", "amaxes", ["scale"]),
    (with_rule(margin=0), "fp8-delayed-e4m3-margin3", "amaxes", ["scale"]),
    (with_rule(update="bulk"), "fp8-delayed-e4m3", "amaxes-zero-first", ["history", "scale"]),
    (with_rule(update="single"), "fp8-delayed-e4m3-bulk", "amaxes-zero-first", ["history", "scale"]),
    (divided_twice, "fp8-delayed-e4m3-margin3", "amaxes-tiny", ["scale"]),
    (infinite, "fp8-delayed-e5m2", "amaxes-tiny", ["scale"]),
    (with_nan, "fp8-delayed-e4m3", "amaxes-nan", ["scale"]),
    (reset, "fp8-delayed-e4m3", "amaxes-zeros", ["scale"]),
    (reset, "fp8-delayed-e4m3-recent", "amaxes-inf", ["scale"]),
]


@pytest.mark.parametrize(("door", "recipe", "inputs", "stages"), DEFECTS)
def test_an_update_with_one_defect(door, recipe, inputs, stages):
    record = fails(update_case(recipe, inputs), *stages, update_scale=door)
    element = record.findings[-1]["elements"][0]
    assert {"tensor", "before", "expected_bits", "actual_bits"} <= element.keys()


def shown(capsys, case, at=None, **doors):
    right = show_case(case, backend(**{**REFERENCE, **doors}), device="cpu", seed=0, source=None, place=at)
    return right, capsys.readouterr().out


def test_show_goes_to_what_is_wrong_in_a_half_in_place(capsys):
    def door(x, recipe, **options):
        row, column = reference.quantize_both(x, recipe, **options)
        if column is not None:
            column.codes[41, 37] ^= 1
        return row, column

    right, said = shown(capsys, case_of("mxfp8-e4m3", "both"), quantize_both=door)
    assert not right
    assert "columnwise half, column 37, block 1" in said
    (line,) = (line for line in said.splitlines() if line.split()[:1] == ["41"])
    expected, actual = (word for word in line.split() if word.startswith("0b"))
    assert int(expected, 2) ^ int(actual, 2) == 1
    assert len(expected) == len("0b") + 8


def test_show_of_an_update_goes_to_its_first_wrong_scale(capsys):
    def door(history, scale, recipe):
        after, made = update_scale(history, scale, recipe)
        made[21] *= 2
        return after, made

    right, said = shown(capsys, update_case(), update_scale=door)
    assert not right
    tensors = [line.split()[0] for line in said.splitlines() if line.count("0x") == 2]
    assert tensors == [str(tensor) for tensor in range(16, 24)]
    assert "the result is empty" in shown(capsys, update_case(shape=(4, 0)))[1]


# Shown results, messages and times.
