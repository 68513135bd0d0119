"""Mistakes in the choice between scales for 4 and for 6 (4over6 recipes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay, ScaleFunction
from narrowgauge.harness.diagnosis.quantize.elements.roundings import Rounding
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.numbers.blocks import of_rows, over_tiles, pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import element_factors, unrounded_scales
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True)
class _Choice:
    """Choice of a block's scale. The defaults are the choice of the recipes."""

    pick: str = "smaller"
    """`smaller`: 4 if its error is smaller; `tied`: smaller or equal; `larger`: larger; `4` and `6`: always."""
    fused: bool = False
    """Squared errors are added by a fused multiply-add."""
    fused_difference: bool = False
    """The division by 6E is a multiplication fused with the subtraction of x."""
    reciprocal: bool = False
    """The division by 6E is a multiplication by the reciprocal."""
    errors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """The changed errors of the elements (M, blocks, elements of a block), with their signs, from the errors and the
    decoded scales (M, blocks, 1)."""
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The error of a block, from the errors (M, elements of a block, blocks). None: their sum in order."""
    each_row: bool = False
    """Every row of a tile has its own choice."""


_RECIPE_CHOICE = _Choice()


def choose_scales(rounding: Rounding, choice: _Choice = _RECIPE_CHOICE) -> ScaleFunction:
    """Stored scales of a 4over6 recipe, with this rounding of scales and this choice."""

    def scale_function(
        x: torch.Tensor,
        blocks: torch.Tensor,
        amax: torch.Tensor | None,
        tensor: torch.Tensor | None,
        recipe: Recipe,
    ) -> torch.Tensor:
        assert amax is not None
        unrounded = unrounded_scales(blocks, tensor, recipe)
        six, four = rounding(unrounded, recipe.scale), rounding(unrounded * 1.5, recipe.scale)
        if choice.pick in "46":
            return four if choice.pick == "4" else six
        errors = [_error(x, scales, amax, tensor, recipe, choice) for scales in (six, four)]
        if recipe.block[0] > 1 and not choice.each_row:
            errors = [over_tiles(error, recipe.block[0], _tree_sum) for error in errors]
        if choice.pick == "larger":
            return torch.where(errors[1] > errors[0], four, six)
        return torch.where(errors[1] <= errors[0] if choice.pick == "tied" else errors[1] < errors[0], four, six)

    return scale_function


def _by(choice: _Choice) -> Callable[[Replay], torch.Tensor]:
    return lambda r: r.store_scales(choose_scales(encode, choice))


def _chooses(recipe: Recipe) -> bool:
    return recipe.candidates != "6"


def _tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum over N of (T, N, B) in a tree: the halves are added, then the halves of the result, and so on."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _sequential_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum over N of (T, N, B), in order."""
    total = torch.zeros_like(rows[:, 0])
    for row in rows.unbind(1):
        total = total + row
    return total


_ERRORS = {
    "rounded to bfloat16": lambda errors, scales: errors.bfloat16().float(),
    "rounded to float16": lambda errors, scales: errors.half().float(),
    "in units of the block scale": lambda errors, scales: errors / scales,
    "of the first half of the block": lambda errors, scales: errors[..., : errors.shape[-1] // 2],
    "of the second half of the block": lambda errors, scales: errors[..., errors.shape[-1] // 2 :],
    "of the even elements of the block": lambda errors, scales: errors[..., ::2],
    "of the odd elements of the block": lambda errors, scales: errors[..., 1::2],
}
_TOTALS = {
    "the largest error": lambda rows: rows.amax(1),
    "the sum rounded to bfloat16": lambda rows: _sequential_sum(rows).bfloat16().float(),
    "the sum rounded to float16": lambda rows: _sequential_sum(rows).half().float(),
}
FOUR_OVER_SIX: tuple[QuantizeDeviation, ...] = (
    Deviation("four-over-six-ties", "4over6: 4 is chosen where both errors are equal", "scales",
              _by(_Choice(pick="tied")), when=_chooses),
    Deviation("four-over-six-fma", "4over6: squared errors are added by a fused multiply-add", "scales",
              _by(_Choice(fused=True)), when=lambda recipe: recipe.candidates.endswith("mse")),
    Deviation("four-over-six-fma", "4over6: the error is one fused multiply-add", "scales",
              _by(_Choice(fused_difference=True)), when=_chooses),
    Deviation("four-over-six-reciprocal", "4over6: the error multiplies by 1/(6E) and does not divide", "scales",
              _by(_Choice(reciprocal=True)), when=_chooses),
    Deviation("four-over-six-never-4", "4over6: the scale of 6 is always chosen", "scales", _by(_Choice(pick="6")),
              when=_chooses),
    Deviation("four-over-six-always-4", "4over6: the scale of 4 is always chosen", "scales", _by(_Choice(pick="4")),
              when=_chooses),
    Deviation("four-over-six-larger-error", "4over6: the larger error is chosen", "scales", _by(_Choice(pick="larger")),
              when=_chooses),
    Deviation("four-over-six-order:{}", "4over6: errors of a block are added in a {}", "scales",
              lambda total, r: _by(_Choice(total=total))(r), {"tree": _tree_sum}, _chooses),
    Deviation("four-over-six-errors", "4over6: the errors that are added are {}", "scales",
              lambda errors, r: _by(_Choice(errors=errors))(r), _ERRORS, _chooses),
    Deviation("four-over-six-total", "4over6: {} decides", "scales",
              lambda total, r: _by(_Choice(total=total))(r), _TOTALS, _chooses),
    Deviation("four-over-six-each-row", "4over6: each row of a tile chooses for itself", "scales",
              _by(_Choice(each_row=True)), when=lambda recipe: _chooses(recipe) and recipe.block[0] > 1),
)  # fmt: skip
"""Wrong choices of a 4over6 recipe."""


def _error(
    x: torch.Tensor,
    scales: torch.Tensor,
    amax: torch.Tensor,
    tensor: torch.Tensor | None,
    recipe: Recipe,
    choice: _Choice,
) -> torch.Tensor:
    """Error of each block with `scales`, float32 (M, ⌈K/16⌉)."""
    width = recipe.block[1]
    values = pad_columns(x.float(), width)
    values = values.view(values.shape[0], -1, width)
    codes = encode(values * element_factors(scales, tensor, recipe).unsqueeze(2), recipe.element)
    dequantized = decode(codes, recipe.element) * decode(scales, recipe.scale).unsqueeze(2)
    dequantized = dequantized * of_rows(amax, slice(0, len(x))).view(-1, 1, 1)
    largest = recipe.max_product
    if choice.fused_difference:
        inverse = float(torch.tensor(1.0) / torch.tensor(largest))
        # A product of two float32 numbers is exact in float64.
        error = (dequantized.double() * inverse - values.double()).float()
    elif choice.reciprocal:
        error = dequantized * (1.0 / largest) - values
    else:
        error = dequantized / torch.full_like(dequantized, largest) - values
    if choice.errors is not None:
        error = choice.errors(error, decode(scales, recipe.scale).unsqueeze(2))
    squared = recipe.candidates == "4-or-6-mse"
    if choice.fused and squared:
        total = torch.zeros_like(error[:, :, 0])
        for element in error.unbind(2):
            total = (element.double().square_() + total.double()).float()
        return total
    error = error.square() if squared else error.abs()
    return (choice.total or _sequential_sum)(error.transpose(1, 2))
