"""Operands of products that set codes and scales themselves: families in which every sum is exact.

A quantizer makes few of the scales that a kernel may be given, and hides which scale a kernel took.
"""

from __future__ import annotations

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import power_of_two
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import used_tensor_scale
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized, amax_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

ONE_HOT = ("one-hot-k", "codes")
"""Families whose first operand has one nonzero number in each row: an output is one product."""


def plain_operand(family: str, draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """The first operand (M, K), float32: a power of two at another k of each row, or small integers."""
    if family in ONE_HOT:
        x, row = torch.zeros(rows, columns), torch.arange(rows)
        if columns:
            x[row, (37 * row + draw.index(columns)) % columns] = power_of_two(row % 4 - 1) * draw.signs(rows)
        return x
    return (1 + draw.below(2, rows, columns)) * draw.signs(rows, columns)


def quantized_operand(
    family: str, draw: Draw, recipe: Recipe, rows: int, columns: int, *, first: bool = False
) -> Quantized:
    """A quantized operand (rows, columns) of a family. `first`: of the first operand of a product."""
    if first:
        codes = encode(plain_operand(family, draw, rows, columns), recipe.element)
    elif family in ONE_HOT:
        # Neighbours differ, and the codes of a row are all codes of the element that are finite.
        finite = _finite_codes(recipe)
        place = torch.arange(columns) + 5 * torch.arange(rows).unsqueeze(1) + draw.index(len(finite))
        codes = finite[place % len(finite)]
    else:
        codes = encode(plain_operand(family, draw, rows, columns), recipe.element)
    if recipe.element.bits == 4:
        codes = torch.nn.functional.pad(codes, (0, columns % 2))
        low, high = (
            (codes[:, ::2], codes[:, 1::2]) if recipe.packing == "low-first" else (codes[:, 1::2], codes[:, ::2])
        )
        codes = low | high << 4
    amax = None
    if recipe.scale is not FP32 and recipe.tensor_scale != "none":
        factor = 1.0 if family == "smallest-scale" else float(2.0 ** (draw.index(4) + 1))
        amax = torch.full(amax_shape((rows, columns), recipe), recipe.max_product * factor)
    scales = _scales(family, recipe, rows, columns, first=first)
    found = Quantized(codes, scales, amax, recipe, (rows, columns))
    found.tensor_scale = None if amax is None else used_tensor_scale(found)
    return found


def _finite_codes(recipe: Recipe) -> torch.Tensor:
    """All codes of an element but infinities and NaN, uint8."""
    values = [(code, recipe.element.value(code)) for code in range(1 << recipe.element.bits)]
    return torch.tensor([code for code, value in values if abs(value) <= recipe.element.max], dtype=torch.uint8)


def _scales(family: str, recipe: Recipe, rows: int, columns: int, *, first: bool) -> torch.Tensor:
    """Stored scales: powers of two, or every scale that is finite, or the smallest."""
    shape = scales_shape((rows, columns), recipe)
    row, block = torch.arange(shape[0]).unsqueeze(1), torch.arange(shape[1])
    if family == "smallest-scale":
        if recipe.scale is E4M3:
            return torch.ones(shape, dtype=torch.uint8)
        power = torch.full(shape, -16)
    elif family == "codes" and not first:
        number = (row * shape[1] + block) * 7
        if recipe.scale is E4M3:
            return (1 + number % 126).to(torch.uint8)
        power = number % 24 - 12
    else:
        # Neighbouring rows and blocks have other powers, of three: sums of 13 fraction bits stay exact.
        power = (row + block) % 3 - 1 if family != "lattice" else torch.zeros(shape, dtype=torch.int64)
    scales = power_of_two(power.expand(shape))
    return encode(scales, recipe.scale) if recipe.scale in (E4M3, E8M0) else scales.contiguous()
