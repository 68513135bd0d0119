"""Operands of products with codes and scales of their own: families with exact sums.

A quantizer makes few of the scales that a kernel may be given, and hides which scale a kernel took.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import power_of_two
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.reference.quantize.scaling import over_elements, used_tensor_scale
from narrowgauge.spec.formats import E8M0, FP32, INT8, Format
from narrowgauge.spec.program import CODES, OF_EXPERT, QUANTIZE, Program
from narrowgauge.spec.quantized import Quantized, amax_shape, scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe

ONE_HOT = ("one-hot-k", "codes")
"""Families whose first operand has one nonzero number in each row: an output is a single product."""
_EDGE = 2**24
"""The number near the sums of `integer-edge`: float32 has every whole number up to it."""


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
    each column that is left, which float32 sums lose. With fewer columns, the sums are as large as possible.

    A row of the first operand has 1, the largest number in as many columns as 2^24 needs, and 1 behind them, all with
    one sign. A row of the second operand has the largest number, the missing rest in two columns, and 1 behind.
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
    """Stored scales: powers of two, or every finite scale, or the smallest."""
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


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


def mixture(program: Program, sizes: Mapping[str, int], family: str, draw: Draw) -> dict[str, torch.Tensor | Quantized]:
    """The arguments of a mixture of experts by name, on the CPU, of a family of `harness.cases.families.MIXTURES`.

    The hidden steps have a single result: gates are from 16 on, an activation has few bits, and a row of w2 has one
    number. Matrices of neighbouring experts have different powers of two. One token has no expert; its row is NaN,
    unless the scale of the tensor would be. Expert 1 of several has no token, and the last choice repeats an expert.
    """
    tokens, columns, experts, hidden, choices = (sizes[n] for n in ("tokens", "K", "experts", "F", "choices"))
    kinds = {argument.kind: argument for argument in program.arguments}
    codes = {s.options["name"]: find_recipe(s.options["recipe"]) for s in program.steps if s.function == CODES}
    one, other = codes
    ids = (draw.index(experts) + torch.arange(tokens).unsqueeze(1) + torch.arange(choices)) % experts
    ids = ids.where(ids != 1, ids.new_tensor(-1 if experts == 1 else 0)) if experts > 2 else ids
    ids[draw.one_in(8, tokens, choices)] = -1
    if family == "one-expert":
        ids = torch.full_like(ids, experts - 1)
    ids[-1] = ids[-1, 0]
    dense = family == "exact-sums"
    x = (1 + draw.below(2, tokens, columns)).float() if dense else _one_in_each_row(
        power_of_two(3 + torch.arange(tokens) % 2), tokens, columns, draw.index(columns)
    )  # fmt: skip
    recipe = find_recipe(next(s.options["recipe"] for s in program.steps if s.function == QUANTIZE))
    whole = recipe.tensor_scale != "none" or recipe.whole
    if whole and tokens > 2:  # a power of two as the scale of the tensor, from a token without an expert, and of blocks
        x[0], ids[0] = recipe.max_product * 2.0**-8, -1
        x[1:, :: recipe.block[1]] = recipe.element.max if dense else x[1:, :: recipe.block[1]]
    if tokens > 2 and family != "one-expert":
        ids[1] = -1
        x[1] = 0.0 if whole else torch.nan
    gate, up = _gates(draw, experts * hidden, columns, dense=dense)
    first, layout = (s.options for s in program.steps if s.function == OF_EXPERT and s.options.get("part") is not None)
    parts = [part.view(experts, hidden, columns) for part in ((gate, up) if first["part"] == 0 else (up, gate))]
    width = {"joined": hidden, "interleaved": 1, "interleaved-8": 8}[layout["layout"]]
    w13 = torch.stack([part.view(experts, hidden // width, width, columns) for part in parts], 2).flatten(0, 3)
    place = torch.arange(experts * columns)
    w2 = _one_in_each_row(1 + draw.below(2, len(place)).float() / 2, len(place), hidden, 5 * (place // columns))
    found: dict[str, torch.Tensor | Quantized] = {
        kinds["Matrix"].name: x.to(DTYPES[kinds["Matrix"].dtype]), kinds["Positions"].name: ids,
        kinds["RouterWeights"].name: power_of_two(-(torch.arange(tokens * choices) % 4)).view(tokens, choices),
    }  # fmt: skip
    for name, numbers in ((one, w13), (other, w2 * draw.signs(len(place), 1))):
        found[name] = _of_experts(numbers, codes[name], experts)
    return found


def _one_in_each_row(numbers: torch.Tensor, rows: int, columns: int, first: int | torch.Tensor) -> torch.Tensor:
    """A matrix (rows, columns) with one of the numbers (rows,) in each row, in other columns than its neighbours."""
    x, row = torch.zeros(rows, columns), torch.arange(rows)
    x[row, (37 * row + first) % columns] = numbers.float()
    return x


def _gates(draw: Draw, rows: int, columns: int, *, dense: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of all experts (rows, columns): numbers of E2M1; gates of neighbouring columns differ.

    Ups are as large as gates, of either sign. SiLU of a negative up is nearly 0: a kernel that exchanges them is known.
    """
    if dense:
        gate = (1 + draw.below(2, rows, columns)).float()
        return gate, _one_in_each_row(draw.signs(rows), rows, columns, draw.index(columns))
    place = torch.arange(columns) + 3 * torch.arange(rows).unsqueeze(1) + draw.index(4)
    numbers, signs = torch.tensor([2.0, 3.0, 4.0, 6.0]), draw.signs(rows, columns)
    signs[::8] = 1  # every block has an up that SiLU does not change
    return numbers[place % 4], numbers[place // 2 % 4] * signs


def _of_experts(numbers: torch.Tensor, recipe: Recipe, experts: int) -> Quantized:
    """Stacked matrices (experts·N, K) of numbers of the element, under scales that are other powers of two for each
    expert."""
    rows, columns = numbers.shape
    shape = scales_shape((rows, columns), recipe)
    expert = torch.arange(shape[0]) * experts // shape[0]
    power = (expert.unsqueeze(1) + torch.arange(shape[1])) % 3
    scales = power_of_two(power.expand(shape))
    stored = scales.contiguous() if recipe.scale is FP32 else encode(scales, recipe.scale)
    amax = None
    if recipe.scale is not FP32 and recipe.tensor_scale != "none":
        amax = torch.full(amax_shape((rows, columns), recipe), recipe.max_product)
    found = Quantized(pack_codes(encode(numbers, recipe.element), recipe), stored, amax, recipe, (rows, columns))
    found.tensor_scale = None if amax is None else used_tensor_scale(found)
    return found
