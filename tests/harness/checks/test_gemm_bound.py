"""Rule 2: a sum is right if a correct order of summation can give it, and only then."""

import math
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.distance import steps_words
from narrowgauge.harness.checks.gemm_bound import check_bounds
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import generate
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.recipes import find_recipe

FLT_MAX = torch.finfo(torch.float32).max
OUT = [torch.float32, torch.bfloat16, torch.float16]
every_output = pytest.mark.parametrize("out", OUT, ids=str)


def check(actual, limits):
    return check_bounds("output", actual, limits, describe=lambda row, column: {"row": row, "column": column})


def operands(family="normal", shape=(16, 1024, 24)):
    m, k, n = shape
    x = generate(family, Draw("x"), (m, k), torch.bfloat16, "x", find_recipe("nvfp4"))
    w = generate(family, Draw("w"), (n, k), torch.bfloat16, "w", find_recipe("nvfp4"))
    return reference.quantize(x, "nvfp4"), reference.quantize(w, "nvfp4")


def limits_of(out=torch.float32, family="normal", **options):
    return bounds(*operands(family), out_dtype=out, **options)


def mixed(out, **options):
    """Bounds with elements of tier 0 and of tier 2: some rows of x have few values, the remaining rows round."""
    m, k, n = 16, 1024, 24
    x = generate("rounding", Draw("x"), (m, k), torch.bfloat16, "x", find_recipe("nvfp4"))
    x[::2, 32:] = 0
    w = generate("rounding", Draw("w"), (n, k), torch.bfloat16, "w", find_recipe("nvfp4"))
    w[:, :32] = 1
    limits = bounds(reference.quantize(x, "nvfp4"), reference.quantize(w, "nvfp4"), out_dtype=out, **options)
    assert bool(limits.exact.any())
    assert not bool(limits.exact.all())
    return limits


def neighbour(x, up):
    """The next number of the dtype above or below."""
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    away = (x > 0) == up
    return (x.view(integer) + torch.where(away, 1, -1).to(integer)).view(x.dtype)


def one(limits, where, value):
    """The expected output with `value` at the first element of `where`, and the place of this element."""
    row, column = (int(i) for i in where.nonzero()[0])
    actual = limits.expected.clone()
    actual[row, column] = value[row, column]
    return actual, (row, column)


def judged_wrong(result, place, distance=1, words=""):
    elements = result.finding["elements"]
    return (
        not result.passed
        and (result.mismatches, result.max_ulp) == (1, distance)
        and elements
        == [{"which": "first", "row": place[0], "column": place[1], "distance": words or steps_words(distance)}]
    )


@every_output
def test_the_reference_and_both_ends_of_the_interval_are_right(out):
    limits = mixed(out)
    for actual in (
        limits.expected, torch.where(limits.exact, limits.expected, limits.lower),
        torch.where(limits.exact, limits.expected, limits.upper),
    ):  # fmt: skip
        result = check(actual, limits)
        assert result.passed
        assert (result.compared, result.mismatches, result.max_ulp, result.finding) == (16 * 24, 0, None, None)


@every_output
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_one_ulp_off_is_wrong_where_no_order_can_round(out, up):
    limits = mixed(out)
    actual, place = one(limits, limits.exact & (limits.expected != 0), neighbour(limits.expected, up))
    result = check(actual, limits)
    assert judged_wrong(result, place)
    assert result.sentence == (
        f"1 of 384 outputs differ, each by 1 step, at row {place[0]}, column {place[1]}; "
        "1 of them where no order of summation can round"
    )


@every_output
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_one_ulp_outside_the_interval_is_wrong(out, up):
    limits = mixed(out)
    actual, place = one(limits, ~limits.exact, neighbour(limits.upper if up else limits.lower, up))
    result = check(actual, limits)
    assert judged_wrong(result, place)
    assert result.sentence.endswith("; 1 of them outside the proved bound")


def test_the_distance_is_counted_from_what_is_right():
    limits = mixed(torch.float32)
    upper = limits.upper
    for _ in range(5):
        upper = neighbour(upper, up=True)
    assert judged_wrong(check(*one(limits, ~limits.exact, upper)[:1], limits), one(limits, ~limits.exact, upper)[1], 5)


def test_an_interval_is_no_excuse_for_an_exact_element():
    limits = mixed(torch.float32)
    inside = limits.exact & (limits.lower < limits.expected)
    actual, place = one(limits, inside, neighbour(limits.expected, up=False))
    assert limits.lower[place] <= actual[place] <= limits.upper[place]
    assert judged_wrong(check(actual, limits), place)


def test_the_sign_of_a_zero_sum_is_free():
    limits = limits_of(family="zeros")
    assert check(torch.full_like(limits.expected, -0.0), limits).passed


def test_the_sign_of_a_zero_that_is_no_zero_sum_is_not():
    # A product of 2^-149 or less, rounded to zero by α: its sign is that of the sum.
    a, b = operands("positive", (1, 16, 1))
    tiny = torch.tensor([1e-30])
    limits = bounds(replace(a, amax=tiny), replace(b, amax=tiny), out_dtype=torch.float32)
    assert not bool(limits.zero_sum)
    assert float(limits.expected) == 0
    assert check(limits.expected, limits).passed
    result = check(-limits.expected, limits)
    assert result.sentence.startswith("1 of 1 outputs differ, each the other zero; 1 of them where no order")


@every_output
def test_both_roundings_of_an_addend_are_right_and_no_third(out):
    generator = torch.Generator().manual_seed(1)
    c = torch.randn(16, 24, generator=generator).to(out)
    limits = limits_of(out, "lattice", c=c)
    assert bool(limits.exact.all())
    assert check(limits.expected, limits).passed
    assert check(limits.fused, limits).passed
    if out == torch.float32:  # elsewhere the last cast hides the difference
        differs = limits.fused != limits.expected
        assert bool(differs.any())
        up = limits.fused > limits.expected
        beyond = torch.where(up, neighbour(limits.fused, up=True), neighbour(limits.fused, up=False))
        actual, place = one(limits, differs, beyond)
        assert not check(actual, limits).passed
        assert check(actual, limits).finding["elements"][0]["row"] == place[0]


def test_nan_is_right_where_nan_is_expected_and_nowhere_else():
    a, b = operands()
    a.scales[3, 0] = 0x7F  # NaN of E4M3
    limits = bounds(a, b, out_dtype=torch.float32)
    assert limits.expected.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert check(limits.expected, limits).passed
    assert check(torch.where(limits.expected.isnan(), 0.0, limits.expected), limits).mismatches == 24
    for row in (2, 4):
        actual = limits.expected.clone()
        actual[row] = torch.nan
        assert check(actual, limits).mismatches == 24


def infinite_alpha(signs):
    """Bounds under an infinite α, a product for each of these signs; the sums are exact."""
    x = torch.zeros(len(signs), 16)
    x[:, 0] = torch.tensor(signs)
    a, b = reference.quantize(x, "nvfp4"), reference.quantize(torch.ones(1, 16), "nvfp4")
    huge = torch.tensor([FLT_MAX])
    return bounds(replace(a, amax=huge), replace(b, amax=huge), out_dtype=torch.float32)


def test_an_infinite_alpha_has_one_result_where_the_sum_is_exact():
    limits = infinite_alpha([1.0, -1.0, 0.0])
    assert limits.expected.view(-1).tolist()[:2] == [torch.inf, -torch.inf]
    assert bool(limits.expected[2].isnan())
    assert bool(limits.exact.all())
    assert check(limits.expected, limits).passed
    for value in (-torch.inf, torch.nan, FLT_MAX):
        actual = limits.expected.clone()
        actual[0] = value
        assert check(actual, limits).mismatches == 1
    actual = limits.expected.clone()
    actual[2] = torch.inf
    assert check(actual, limits).mismatches == 1


def test_an_infinite_alpha_of_an_uncertain_sign_is_free():
    # The halves of K cancel except for a small product below the rounding of the sum.
    x = torch.full((1, 4096), 6.0)
    x[:, 2048:], x[:, :16], x[:, 2048:2064] = -6.0, 2.0**-6, 0.0
    a, b = reference.quantize(x, "nvfp4"), reference.quantize(torch.ones(1, 4096), "nvfp4")
    huge = torch.tensor([FLT_MAX])
    limits = bounds(replace(a, amax=huge), replace(b, amax=huge), out_dtype=torch.float32)
    assert bool(limits.undetermined)
    for value in (torch.inf, -torch.inf, torch.nan):
        assert check(torch.full((1, 1), value), limits).passed
    for value in (0.0, FLT_MAX, -FLT_MAX):
        assert not check(torch.full((1, 1), value), limits).passed


def test_figures_say_how_sharp_the_test_was():
    limits = mixed(torch.float32)
    actual = torch.where(limits.exact, limits.expected, (limits.expected + limits.upper) / 2)
    figures = check(actual, limits).figures
    assert figures["exact_share"] == float(limits.exact.double().mean())
    used = sorted(((actual.double() - limits.centre).abs() / limits.budget).view(-1).tolist())
    assert 0 < figures["budget_max"] == used[-1] < 1
    assert figures["budget_p99"] == used[math.ceil(0.99 * len(used)) - 1]
    assert sum(figures["budget_histogram"]) == len(used)
    assert figures["budget_histogram"][0] == sum(u < 0.1 for u in used)
    widths = (ordinal.float_ordinals(limits.upper) - ordinal.float_ordinals(limits.lower))[~limits.exact].tolist()
    assert figures["interval_ulps_max"] == max(widths)
    assert figures["interval_ulps_mean"] == sum(widths) / len(widths)


# A declared order.


def ordered(out=torch.float32):
    """Bounds of `mixed` under the order "blocks"."""
    return mixed(out, order="blocks")


@every_output
def test_a_declared_order_narrows_what_is_right(out):
    free, limits = mixed(out), ordered(out)
    assert torch.equal(limits.tier == 0, free.tier == 0)
    assert set(limits.tier.unique().tolist()) == {0, 1}
    assert set(free.tier.unique().tolist()) == {0, 2}
    for end in (limits.lower, limits.upper, limits.expected):
        assert check(torch.where(limits.exact, limits.expected, end), limits).passed
    if out == torch.float32:  # elsewhere the last cast hides the difference
        outside = ~limits.exact & (free.upper > limits.upper)
        assert bool(outside.any())
        actual, place = one(limits, outside, neighbour(limits.upper, up=True))
        assert check(actual, free).passed
        assert judged_wrong(check(actual, limits), place)


def test_figures_say_which_share_the_declared_order_judges():
    free, declared = mixed(torch.float32), ordered()
    figures = check(declared.expected, declared).figures
    assert figures["exact_share"] + figures["ordered_share"] == 1
    assert 0 < figures["ordered_share"] == float((declared.tier == 1).double().mean())
    assert check(free.expected, free).figures["ordered_share"] == 0
