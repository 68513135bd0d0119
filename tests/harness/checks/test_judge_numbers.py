"""Comparators on whole value sets: every code of every format, every 16-bit float, against Fractions and struct."""

import struct
from fractions import Fraction
from itertools import pairwise
from math import isfinite, isnan

import pytest
import torch

from narrowgauge.harness.checks.exact import exact_codes, exact_floats
from narrowgauge.harness.checks.gemm_bound import check_bounds, within_bounds
from narrowgauge.harness.checks.rounding_boundary import Sources, boundary_codes, boundary_floats
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.formats import E4M3, E5M2, E8M0, FORMATS

SIXTEEN = [torch.bfloat16, torch.float16]
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_sixteen = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
SOURCES = Sources(torch.ones(1, 16), 1, 16)


def at(row, column):
    return {"row": row, "column": column}


def codes(actual, expected, fmt):
    return exact_codes("codes", actual, expected, fmt, noun="codes", describe=at)


def floats(actual, expected):
    return exact_floats("values", actual, expected, noun="values", describe=at)


def places(result):
    """(rows, columns) of the wrong elements, as pairs."""
    return [] if result.wrong_elements is None else [tuple(place) for place in result.wrong_elements.nonzero().tolist()]


# An oracle of its own: what a code means, from its bits, as a fraction; no float, no torch.


def meaning(code, fmt):
    """(sign, magnitude): a Fraction, "inf" or "nan"."""
    if not fmt.signed:
        return 0, "nan" if code == 255 else Fraction(2) ** (code - 127)
    if fmt.complement:
        return (1, Fraction(fmt.codes - code)) if code >= fmt.sign_code else (0, Fraction(code))
    if not fmt.negative_zero and code == fmt.sign_code:
        return 0, "nan"
    sign, magnitude = divmod(code, 1 << (fmt.bits - 1))
    exponent, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    if fmt is E4M3 and magnitude == 0x7F:
        return sign, "nan"
    if fmt is E5M2 and exponent == 31:
        return sign, "nan" if mantissa else "inf"
    unit = Fraction(2) ** (max(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    return sign, unit * (mantissa + (1 << fmt.mantissa_bits if exponent else 0))


def in_order(fmt):
    """The codes from the least to the greatest number, -0 before +0; NaN beyond the infinities, by payload."""

    def key(code):
        sign, magnitude = meaning(code, fmt)
        kind = {"inf": 1, "nan": 2}.get(magnitude, 0)
        size = (kind, magnitude if kind == 0 else code & 0x7F)
        return (1, *size) if not sign else (0, -size[0], -size[1])

    return sorted(range(fmt.codes), key=key)


@every_format
def test_every_code_and_its_neighbour_are_one_step_apart(fmt):
    order = torch.tensor(in_order(fmt), dtype=torch.uint8)
    below, above = order[:-1].view(1, -1), order[1:].view(1, -1)
    zeros = [pair for pair in pairwise(order.tolist()) if meaning(pair[0], fmt)[1] == meaning(pair[1], fmt)[1] == 0]
    for one, other in ((below, above), (above, below)):
        result = codes(one, other, fmt)
        assert (result.compared, result.mismatches, result.max_ulp) == (fmt.codes - 1, fmt.codes - 1, 1)
        by = ", by up to 1 step" if zeros else ", each by 1 step"  # +0 and -0 differ by 0 steps
        if not all(isfinite(fmt.value(code)) for code in order.tolist()):
            by = ": "  # NaN and infinity are no step away
        assert result.sentence.startswith(f"{fmt.codes - 1} of {fmt.codes - 1} codes differ{by}")
        assert len(places(result)) == fmt.codes - 1
    assert len(zeros) == (fmt.signed and fmt.negative_zero)


@pytest.mark.sampled(2)
@every_format
def test_every_code_equals_itself_and_no_other(fmt):
    every = torch.arange(fmt.codes, dtype=torch.uint8)
    rank = {code: number for number, code in enumerate(in_order(fmt))}
    zero = rank[0] if fmt.signed else None
    for code in range(0, fmt.codes, 7 if fmt.bits == 8 else 1):
        result = codes(every.view(1, -1), torch.full((1, fmt.codes), code, dtype=torch.uint8), fmt)
        assert places(result) == [(0, other) for other in range(fmt.codes) if other != code]
        # Between both sides of zero lie two zeros, and a step between their neighbours.
        farthest = max(
            abs(rank[other] - rank[code])
            - (fmt.signed and fmt.negative_zero and (rank[other] < zero) != (rank[code] < zero))
            for other in range(fmt.codes)
        )
        assert result.max_ulp == farthest


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E8M0], ids=lambda fmt: fmt.name)
def test_every_code_between_two_ends(fmt):
    order = in_order(fmt)
    rank = {code: number for number, code in enumerate(order)}
    every = torch.arange(fmt.codes, dtype=torch.uint8).view(1, -1)
    picked = [order[n] for n in (0, 1, 3, len(order) // 2 - 1, len(order) // 2, len(order) // 2 + 1, -4, -2, -1)]
    for low in picked:
        for high in picked:
            ends = tuple(torch.full_like(every, code) for code in (low, high))
            result = boundary_codes("codes", every, every, ends, fmt, SOURCES, noun="codes", describe=at)
            outside = [(0, c) for c in range(fmt.codes) if not rank[low] <= rank[c] <= rank[high]]
            assert places(result) == outside
            assert result.passed == (not outside)


# Floats.


def value(word, dtype):
    """The number of 16 bits, by struct alone."""
    if dtype == torch.float16:
        return struct.unpack("<e", struct.pack("<H", word))[0]
    return struct.unpack("<f", struct.pack("<I", word << 16))[0]


def words(dtype):
    """Every number of 16 bits, (256, 256), and its value as Python's float."""
    raw = torch.arange(1 << 16).view(256, 256)
    x = raw.to(torch.int32).to(torch.int16).view(dtype)
    return x, [value(word, dtype) for word in range(1 << 16)]


def wrong_words(result):
    """Whether each word is wrong."""
    return [False] * (1 << 16) if result.wrong_elements is None else result.wrong_elements.view(-1).tolist()


@every_sixteen
def test_every_16_bit_float_equals_itself_and_not_the_next(dtype):
    x, values = words(dtype)
    assert floats(x, x.clone()).passed
    result = floats(x.view(torch.int16).add(1).view(dtype), x)
    nan = [isnan(number) for number in values]
    assert wrong_words(result) == [not (nan[word] and nan[(word + 1) & 0xFFFF]) for word in range(1 << 16)]
    # A step to the next word is a step of the value, except from the last NaN of a sign to the zero of the second sign.
    steps = floats(x.view(torch.int16).add(1).view(dtype)[:127], x[:127])
    assert (steps.max_ulp, steps.mismatches) == (1, len(places(steps)))


LIMITS = {
    "a wide interval": ((-1.5, 2.0), 0.25, 0.25, False, False, False),
    "an exact one": ((-1.5, 2.0), 0.25, 0.5, True, False, False),
    "an exact zero": ((0.0, 0.0), 0.0, 0.0, True, False, False),
    "an exact zero sum": ((0.0, 0.0), 0.0, 0.0, True, True, False),
    "an exact minus zero": ((-0.0, -0.0), -0.0, -0.0, True, False, False),
    "between the zeros": ((-0.0, 0.0), 0.0, 0.0, False, False, False),
    "an infinity": ((float("inf"), float("inf")), float("inf"), float("inf"), True, False, False),
    "a NaN": ((float("nan"), float("nan")), float("nan"), float("nan"), True, False, False),
    "undetermined": ((1.0, 2.0), 1.5, 1.5, False, False, True),
}


def limits_of(shape, dtype, ends, expected, fused, exact, zero_sum, undetermined):
    """Bounds of outputs of a single kind."""

    def full(number, kind=dtype):
        return torch.full(shape, number, dtype=kind)

    centre = sum(ends) / 2
    return Bounds(
        full(expected), full(fused), full(expected), full(ends[0]), full(ends[1]), full(exact, torch.bool),
        full(zero_sum, torch.bool),
        full(undetermined, torch.bool), full(centre, torch.float64), full(1.0, torch.float64),
        full(0 if exact else 2, torch.uint8),
    )  # fmt: skip


def is_right(number, ends, expected, fused, exact, zero_sum, undetermined):
    """The rule in Python's own numbers; a zero's sign is that of its string."""
    for wanted in (expected, fused):
        if isnan(number) and isnan(wanted):
            return True
        if number == wanted and (str(number)[0] == "-") == (str(wanted)[0] == "-"):
            return True
        if number == wanted and zero_sum:
            return True
    finite = not isnan(number) and abs(number) != float("inf")
    if undetermined and not finite:
        return True
    if exact or isnan(ends[0]) or abs(ends[0]) == float("inf") or isnan(number):
        return False
    return ends[0] <= number <= ends[1]


@pytest.mark.sampled(5)
@every_sixteen
@pytest.mark.parametrize("kind", LIMITS)
def test_every_16_bit_float_against_a_bound(kind, dtype):
    x, values = words(dtype)
    limits = limits_of(x.shape, dtype, *LIMITS[kind])
    right = [is_right(number, *LIMITS[kind]) for number in values]
    assert within_bounds(x, limits).view(-1).tolist() == right
    result = check_bounds("output", x, limits, describe=at)
    assert (result.compared, result.mismatches) == (1 << 16, (1 << 16) - sum(right))
    assert 0 < sum(right) < 1 << 16


@pytest.mark.sampled(2)
@every_sixteen
def test_every_16_bit_float_between_two_ends(dtype):
    x, values = words(dtype)
    minus = float("-inf")
    for low, high in ((-1.5, 2.0), (-0.0, 0.0), (0.0, 1.0), (-1.0, -0.0), (minus, minus), (minus, 3.0)):
        ends = tuple(torch.full_like(x, end) for end in (low, high))
        result = boundary_floats(
            "output", x, ends[0], ends, Sources(torch.ones(256, 256), 1, 16), noun="elements", describe=at
        )

        def signed(number):
            return number, -1 if str(number)[0] == "-" else 1

        wrong = [isnan(v) or not signed(low) <= signed(v) <= signed(high) for v in values]
        assert result.mismatches == sum(wrong)
        assert wrong_words(result) == wrong
