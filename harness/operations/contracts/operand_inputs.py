"""Operands of products that set codes and scales themselves: families in which every sum is exact.

A quantizer makes few of the scales that a kernel may be given, and hides which scale a kernel took.
"""

from __future__ import annotations

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import power_of_two
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.reference.quantize.scaling import over_elements, used_tensor_scale
from narrowgauge.spec.formats import E8M0, FP32, INT8, Format
from narrowgauge.spec.quantized import Quantized, amax_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

ONE_HOT = ("one-hot-k", "codes")
"""Families whose first operand has one nonzero number in each row: an output is one product."""
_EDGE = 2**24
"""The number of `integer-edge` beside which sums lie: float32 has every whole number up to it."""


def plain_operand(family: str, draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """The first operand (M, K), float32: a power of two at another k of each row, or small integers."""
    if family in ONE_HOT:
        x, row = torch.zeros(rows, columns), torch.arange(rows)
        if columns:
            x[row, (37 * row + draw.index(columns)) % columns] = power_of_two(row % 4 - 1) * draw.signs(rows)
        return x
    return (1 + draw.below(2, rows, columns)) * draw.signs(rows, columns)


def edge_operand(draw: Draw, element: Format, rows: int, columns: int, *, first: bool) -> torch.Tensor:
    """Operands (rows, columns) of whole numbers, float32, whose sums are 2^24 + d, d from −4 to 4, and one more for
    each column that is left, which float32 sums lose. Fewer columns have sums as large as they can be.

    A row of the first operand has 1, the largest number in as many columns as 2^24 needs, and 1 behind them, all with
    one sign. A row of the second one has the largest number, what is missing in two columns, and 1 behind them.
    """
    largest, row, place = element.max, torch.arange(rows).unsqueeze(1), torch.arange(columns)
    whole, rest = divmod(_EDGE, int(largest) ** 2)
    more, last = divmod(rest, int(largest))
    found = torch.where(place < 2 + whole, largest, 1.0).expand(rows, columns).clone()
    if first:
        found[:, :1] = 1
        return found * draw.signs(rows, 1)
    found[:, 1:2] = more
    found[:, :1] = last + row % 9 - 4
    return found


def quantized_operand(
    family: str, draw: Draw, recipe: Recipe, rows: int, columns: int, *, first: bool = False, number: int = 0
) -> Quantized:
    """A quantized operand (rows, columns) of a family. `first`: of the first operand of a product. `number`: of the
    product in a batch."""
    edge = family == "integer-edge" and recipe.integer and recipe.element.bits == 8
    if edge or first:
        given = (
            edge_operand(draw, INT8, rows, columns, first=first) if edge else plain_operand(family, draw, rows, columns)
        )
        codes = given if recipe.zero_points else encode(given, recipe.element)
    elif family in ONE_HOT:
        # Neighbours differ, and the codes of a row are all codes of the element that are finite.
        finite = _finite_codes(recipe)
        place = torch.arange(columns) + 5 * torch.arange(rows).unsqueeze(1) + draw.index(len(finite))
        codes = finite[place % len(finite)]
    elif recipe.zero_points:
        codes = draw.below(recipe.element.codes, rows, columns).to(torch.uint8)
    else:
        codes = encode(plain_operand(family, draw, rows, columns), recipe.element)
    amax, zeros = None, None
    if recipe.zero_points:  # of neighbouring groups the least, the middle and the largest, and others
        of_scales = scales_shape((rows, columns), recipe)
        place = torch.arange(of_scales[0]).unsqueeze(1) + torch.arange(of_scales[1]) + draw.index(4)
        middle, most = recipe.element.codes // 2, recipe.element.codes - 1
        some = (
            [middle] * 4 if edge else [middle // 2, middle, middle + middle // 2, 5] if first else [0, middle, most, 5]
        )
        zeros = torch.tensor(some, dtype=torch.uint8)[place % 4]
        if edge or first:  # codes of given numbers
            codes = over_elements(codes, zeros.float(), recipe, torch.add).to(torch.uint8)
    if recipe.scale is not FP32 and recipe.tensor_scale != "none":
        factor = 1.0 if family == "smallest-scale" else float(2.0 ** (draw.index(4) + 1))
        amax = torch.full(amax_shape((rows, columns), recipe), recipe.max_product * factor)
    scales = _scales(family, recipe, rows, columns, first=first, number=number)
    found = Quantized(pack_codes(codes, recipe), scales, amax, recipe, (rows, columns), zeros=zeros)
    found.tensor_scale = None if amax is None else used_tensor_scale(found)
    return found


def _finite_codes(recipe: Recipe) -> torch.Tensor:
    """All codes of an element but infinities and NaN, uint8."""
    values = [(code, recipe.element.value(code)) for code in range(1 << recipe.element.bits)]
    return torch.tensor([code for code, value in values if abs(value) <= recipe.element.max], dtype=torch.uint8)


def _scales(family: str, recipe: Recipe, rows: int, columns: int, *, first: bool, number: int) -> torch.Tensor:
    """Stored scales: powers of two, or every scale that is finite, or the smallest."""
    shape = scales_shape((rows, columns), recipe)
    row, block = torch.arange(shape[0]).unsqueeze(1), torch.arange(shape[1])
    with_mantissa = recipe.scale not in (E8M0, FP32)
    if family == "smallest-scale":
        if with_mantissa:
            return torch.ones(shape, dtype=torch.uint8)
        power = torch.full(shape, -16)
    elif family == "codes" and not first:
        place = (row * shape[1] + block) * 7 + number
        if with_mantissa:
            return (1 + place % recipe.scale.max_code).to(torch.uint8)
        power = place % 24 - 12
    else:
        # Neighbouring rows, blocks and products have other powers, of three: sums of 13 fraction bits stay exact.
        place = (1 + number % 2) * row + (1 + number // 2 % 2) * block + number // 4
        power = place % 3 - 1 if family != "lattice" else torch.zeros(shape, dtype=torch.int64)
    scales = power_of_two(power.expand(shape))
    return scales.contiguous() if recipe.scale is FP32 else encode(scales, recipe.scale)
