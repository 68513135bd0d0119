"""Classes of the bytes in which a quantizer differs from a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.operations.stages.quantized import code_view, scale_view
from narrowgauge.harness.tools.dialect.rules import Rules, canonical, raw, spread, with_fields
from narrowgauge.reference.quantize.exponents import exponent_codes
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

KINDS = {
    "NaN sign": "the sign of NaN, or another NaN code of the format, as a block scale or as a code",
    "sign of a zero scale": "block scales +0 and -0",
    "-0": "codes +0 and -0 of negative numbers",
    "positive zeros as -0": "code -0 of +0 or of positive numbers, which lose their sign",
    "dead blocks": "codes under a block scale of 0 or NaN, which have no value of their own",
    "scales of zeros": "block scales of blocks of zeros, whose codes are 0 under any scale",
    "scales of special amaxes": "block scales of blocks with infinity or NaN, or under an amax of 0, infinity or NaN",
    "scales by products in float16": "block scales of float16 inputs, computed as amax·(1/max) with the reciprocal and "
    "the product rounded to float16",
    "scales outside of float16": "block scales of float16 inputs that float16 does not have",
    "scales at the ends of float32": "block scales that the rule has below 2^-125 or above 2^124",
    "scales by subnormal numbers": "block scales under an amax, or a tensor scale, that is subnormal in float32",
    "codes of NaN": "codes of elements that are NaN",
    "codes under special amaxes": "codes of blocks with infinity or NaN, and of numbers that the rule makes NaN",
    "codes at the ends of float32": "codes under block scales, its own or the rule's, below 2^-125 or above 2^124",
    "codes by infinite reciprocals in float16": "the largest code, or NaN of 0, of float16 inputs under a block scale "
    "whose reciprocal is infinite in float16",
    "codes by subnormal numbers": "codes of subnormal float32 numbers, or under such a tensor scale",
    "codes beyond the range": "codes of numbers above the largest element under their scale, which the rule saturates",
    "codes of infinity": "codes of elements that are infinite",
    "rounding of ties": "codes of elements exactly between two codes: the other neighbour",
    "rounding below the first tie": "the smallest code above 0 of the float32 number below its tie with 0: floor(|x| + "
    "1/2) of float32 numbers, whose sum is rounded to the tie",
    "rounding beside ties": "codes of elements up to 2 float32 numbers from a tie of two codes: the other neighbour, "
    "which a quotient with an error of 2 ulp gives",
}
"""Known classes. Further classes, `scale rule` and `element rule`, are not explained."""
_SMALLEST_NORMAL = 2.0**-126
_ULPS = 2
"""Largest error of a division in ulp, for example of div.full.f32 (PTX ISA), which Triton's operator / compiles to."""
SAME_VALUES = ("NaN sign", "sign of a zero scale", "-0", "positive zeros as -0", "dead blocks")
"""Classes whose bytes decode to the same values."""


@dataclass(frozen=True)
class Place:
    """A block scale or a code of the stacked inputs."""

    stage: str
    """`scales` or `codes`"""
    stack: int
    row: int
    column: int


@dataclass
class Difference:
    """Bytes of one class in which a quantizer differs from a rule."""

    kind: str
    count: int
    inputs: list[str]
    """Names of the inputs with such bytes."""
    first: str
    """The first place in words: row, block or column, the byte of the quantizer and of the rule."""
    place: Place

    @property
    def known(self) -> bool:
        """Whether the class says what differs."""
        return self.kind in KINDS

    def __str__(self) -> str:
        more = f" and {len(self.inputs) - 1} more" if len(self.inputs) > 1 else ""
        noun = "block scale" if self.place.stage == "scales" else "code"
        count = f"{format_count(self.count)} {noun}{'' if self.count == 1 else 's'}"
        return f"{self.kind}: {count} in {self.inputs[0]}{more}, the first at {self.first}"


def classified(rules: Rules, rule: Recipe) -> list[Difference]:
    """All bytes in which the observed quantizer differs from `rule`, by class, the unexplained classes first.

    Codes are compared under the quantizer's own scales.
    """
    found: dict[str, Difference] = {}
    for number, stack in enumerate(rules.observed.stacks):
        for stage, classes in (("scales", _of_scales), ("codes", _of_codes)):
            for kind, wrong, describe in classes(rules, number, rule):
                if not bool(wrong.any()):
                    continue
                rows, columns = wrong.nonzero(as_tuple=True)
                height = len(wrong) // len(stack.names)
                names = [stack.names[index] for index in torch.unique(rows // height).tolist()]
                if kind not in found:
                    place = Place(stage, number, int(rows[0]), int(columns[0]))
                    found[kind] = Difference(kind, 0, [], describe(place.row, place.column), place)
                found[kind].count += len(rows)
                found[kind].inputs += names
    return sorted(found.values(), key=lambda difference: (difference.known, difference.place.stage != "scales"))


_Class = tuple[str, torch.Tensor, Callable[[int, int], str]]
"""A class, bool: bytes differ by the class, and the description of a place."""


def _of_scales(rules: Rules, number: int, rule: Recipe) -> Iterator[_Class]:
    stack, fmt = rules.observed.stacks[number], rule.scale
    made, refused = rules.scales(number, rule)
    wrong = raw(made) != raw(stack.scales)
    height = len(stack.scales) // len(stack.names)

    def describe(row: int, block: int) -> str:
        (a, a_bits), (e, e_bits) = (scale_view(t[row, block], fmt) for t in (stack.scales, made))
        return f"row {row % height}, block {block}: {a_bits} = {a}, where the rule has {e_bits} = {e}"

    same = canonical(made, fmt) == canonical(stack.scales, fmt)
    blocks, _ = rules.amaxes(number, rule)
    special_blocks, special = rules.special(number, rule)
    of_rows = spread(special, len(blocks)).unsqueeze(1)
    zeros = blocks == 0
    if wrong.shape != zeros.shape:  # a scale for each tensor
        zeros = zeros.amin(1, keepdim=True)
    of_subnormals = _below(rules, number, rule, len(wrong))
    if wrong.shape == blocks.shape:
        of_subnormals = of_subnormals | _subnormal(blocks)
    is_nan = _is_nan(stack.scales, fmt)
    zero = _is_zero(stack.scales, fmt) & _is_zero(made, fmt)
    kinds = [
        ("sign of a zero scale", same & zero),
        ("NaN sign", same),
        ("scales of zeros", zeros & ~is_nan & ~_is_nan(made, fmt)),
        ("scales of special amaxes", of_rows | special_blocks if wrong.shape == blocks.shape else of_rows),
        ("scales by products in float16", _by_products(rules, number, rule)),
        ("scales outside of float16", _outside_of_float16(made, stack.x, fmt)),
        ("scales at the ends of float32", _at_the_ends(made, fmt)),
        ("scales by subnormal numbers", of_subnormals),
        ("scale rule", torch.ones_like(wrong)),
    ]
    if refused is not None:
        wrong = wrong & ~refused.unsqueeze(1)
    for kind, holds in kinds:
        yield kind, wrong & holds, describe
        wrong = wrong & ~holds


def _of_codes(rules: Rules, number: int, rule: Recipe) -> Iterator[_Class]:
    stack, fmt = rules.observed.stacks[number], rule.element
    made = rules.codes(number, rule)
    wrong = made != stack.codes

    def describe(row: int, column: int) -> str:
        (a, a_bits), (e, e_bits) = (code_view(int(t[row, column]), fmt) for t in (stack.codes, made))
        value, pattern = float_view(stack.x[row, column])
        place = f"row {row % stack.height}, column {column} (x = {value}, {pattern})"
        return f"{place}: {a_bits} = {a}, where the rule has {e_bits} = {e}"

    if not bool(wrong.any()):
        return

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand_as(wrong)[wrong]

    x, scaled, codes, expected = map(here, (stack.x, rules.scaled(number, rule), stack.codes, made))
    kernel, oracle = canonical(codes, fmt), canonical(expected, fmt)
    ends = _at_the_ends(stack.scales, rule.scale) | _at_the_ends(rules.scales(number, rule)[0], rule.scale)
    between = _beside_tie(scaled, kernel, oracle, fmt)
    kinds = [
        ("dead blocks", here(rules.dead(number))),
        ("positive zeros as -0", (kernel == oracle) & (codes == fmt.sign_code) & ~x.signbit()),
        ("-0", (kernel == oracle) & (kernel == 0)),
        ("NaN sign", kernel == oracle),
        ("codes of NaN", x.isnan()),
        ("codes of infinity", x.isinf()),
        (
            "codes under special amaxes",
            scaled.isnan() | here(rules.of_elements(number, rules.special(number, rule)[0])),
        ),
        ("codes by infinite reciprocals in float16", here(_by_infinity(rules, number))),
        ("codes at the ends of float32", here(rules.of_elements(number, ends))),
        ("codes by subnormal numbers", _subnormal(x.float()) | here(_below(rules, number, rule, len(stack.x)))),
        ("codes beyond the range", scaled.abs() > fmt.max),
        ("rounding of ties", between == 0),
        ("rounding below the first tie", _below_first_tie(scaled, kernel, oracle, fmt)),
        ("rounding beside ties", between <= _ULPS),
        ("element rule", torch.ones_like(x, dtype=torch.bool)),
    ]
    left = torch.ones_like(x, dtype=torch.bool)
    for kind, holds in kinds:
        if bool((of_kind := left & holds).any()):
            of_all = torch.zeros_like(wrong)
            of_all[wrong] = of_kind
            yield kind, of_all, describe
            left &= ~holds


def _is_nan(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is FP32:
        return scales.isnan()
    magnitude = scales & 0x7F if fmt.signed else scales
    return magnitude.eq(fmt.nan_code or 0)


def _at_the_ends(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Scales with whose reciprocals, products and quotients float32 underflows or overflows."""
    if fmt is E4M3:
        return torch.zeros_like(scales, dtype=torch.bool)
    numbers = scales if fmt is FP32 else torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - 127)
    return (numbers < 2.0**-125) | (numbers > 2.0**124)


def _subnormal(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers != 0) & (numbers.abs() < _SMALLEST_NORMAL)


def _below(rules: Rules, number: int, rule: Recipe, rows: int) -> torch.Tensor:
    """Rows whose tensor scale amax/2688 is subnormal, (rows, 1)."""
    amax = rules.amaxes(number, rule)[1]
    below = (amax < _SMALLEST_NORMAL * rule.max_product) & (rule.tensor_scale not in ("none", "given"))
    return spread(below, rows).unsqueeze(1)


def _outside_of_float16(scales: torch.Tensor, x: torch.Tensor, fmt: Format) -> torch.Tensor:
    outside = (scales.int() < 127 - 14) | (scales.int() > 127 + 15)
    return outside & (fmt is E8M0 and x.dtype is torch.float16)


def _by_products(rules: Rules, number: int, rule: Recipe) -> torch.Tensor:
    """Block scales of float16 inputs that come from R(amax·R(1/max))."""
    stack, largest = rules.observed.stacks[number], rule.element.max
    of_power = with_fields(rule, block_scale="amax*2^-emax", statistics="float32", smallest_amax=0.0)
    if rule.scale is not E8M0 or of_power is None or stack.x.dtype is not torch.float16:
        return torch.zeros_like(stack.scales, dtype=torch.bool)
    blocks = rules.amaxes(number, rule)[0].half()
    product = (blocks * torch.tensor(1 / largest).half()).float()
    return exponent_codes(product * 2.0 ** (math.frexp(largest)[1] - 1), of_power) == stack.scales


def _by_infinity(rules: Rules, number: int) -> torch.Tensor:
    """Codes of float16 inputs times a reciprocal from 2^16 on, which is infinite."""
    stack, fmt = rules.observed.stacks[number], rules.observed.recipe.element
    if rules.observed.recipe.scale is not E8M0 or stack.x.dtype is not torch.float16:
        return torch.zeros_like(stack.codes, dtype=torch.bool)
    largest = stack.codes == fmt.max_code + stack.x.signbit().byte() * fmt.sign_code
    made = torch.where(stack.x == 0, (stack.codes & (fmt.sign_code - 1)) > fmt.max_code, largest)
    return made & rules.of_elements(number, stack.scales < 127 - 15)


def _is_zero(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is FP32:
        return scales == 0
    return (scales & 0x7F) == 0 if fmt.signed else torch.zeros_like(scales, dtype=torch.bool)


def _beside_tie(scaled: torch.Tensor, kernel: torch.Tensor, oracle: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Number of float32 numbers from an element to the tie of two neighbouring codes, of which the quantizer has one
    and the rule the other; the largest int32 for other codes and for a tie of the other sign."""
    values = scaled.new_tensor(fmt.values)
    valid = (kernel.int() < fmt.codes) & (oracle.int() < fmt.codes)
    a, e = (values[codes.int().clamp(max=fmt.codes - 1)] for codes in (kernel, oracle))
    tie = ((a.double() + e.double()) / 2).float()
    apart = (kernel.int() - oracle.int()).abs() == 1
    from_zero = ((kernel == 0) | (oracle == 0)) & ((a.abs() + e.abs()) == fmt.value(1))
    known = valid & (apart | from_zero) & (scaled.signbit() == tie.signbit())
    distance = (scaled.abs().view(torch.int32) - tie.abs().view(torch.int32)).abs()
    return distance.masked_fill(~known, torch.iinfo(torch.int32).max)


def _below_first_tie(scaled: torch.Tensor, kernel: torch.Tensor, oracle: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Elements that are the float32 number below the tie of 0 and code 1, with code 1 in place of 0. Above 1/2 of the
    smallest number the sum |x| + 1/2 is exact beside ties."""
    tie = scaled.new_tensor(fmt.value(1) / 2)
    magnitudes = fmt.sign_code - 1
    codes = (kernel & magnitudes == 1) & (oracle & magnitudes == 0)
    return codes & (scaled.abs() == torch.nextafter(tie, torch.zeros_like(tie)))
