"""What kernels do in place of the choice between 4 and 6 that their recipe makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Store
from narrowgauge.harness.diagnosis.quantize.elements.grids import Rounding
from narrowgauge.reference.numbers.blocks import of_rows, over_tiles, pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import element_factors, unrounded_scales
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True)
class _Choice:
    """How a block's scale is chosen; the defaults are those of the recipes."""

    pick: str = "smaller"
    """`smaller`: 4 where its error is smaller; `tied`: or equal; `larger`: 4 where it is larger; `4`; `6`."""
    fused: bool = False
    """Whether a squared error is added by a fused multiply-add."""
    fused_difference: bool = False
    """Whether the division by 6E is a multiplication that is fused with the subtraction of x."""
    reciprocal: bool = False
    """Whether the division by 6E is a multiplication by its reciprocal."""
    tree: bool = False
    """Whether the errors of a block are added in a tree."""
    each_row: bool = False
    """Whether every row of a tile chooses for itself."""


def choosing_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of the choice of a 4over6 recipe, the most plausible first; none of another recipe."""
    if recipe.candidates == "6":
        return
    yield _of("four-over-six-ties", "4 is chosen where both errors are equal", _Choice(pick="tied"))
    if recipe.candidates.endswith("mse"):
        yield _of("four-over-six-fma", "squared errors are added by a fused multiply-add", _Choice(fused=True))
    yield _of("four-over-six-fma", "the error is one fused multiply-add", _Choice(fused_difference=True))
    yield _of(
        "four-over-six-reciprocal", "the error multiplies by 1/(6E) and does not divide", _Choice(reciprocal=True)
    )
    yield _of("four-over-six-never-4", "the scale of 6 is always chosen", _Choice(pick="6"))
    yield _of("four-over-six-always-4", "the scale of 4 is always chosen", _Choice(pick="4"))
    yield _of("four-over-six-larger-error", "the larger error is chosen", _Choice(pick="larger"))
    yield _of("four-over-six-order:tree", "errors of a block are added in a tree", _Choice(tree=True))
    if recipe.block[0] > 1:
        yield _of("four-over-six-each-row", "each row of a tile chooses for itself", _Choice(each_row=True))


def _of(cause: str, sentence: str, choice: _Choice) -> QuantizeDeviation:
    store = chosen(encode, choice)
    return QuantizeDeviation(
        cause, f"4over6: {sentence}", frozenset({"scales"}), hooks={"scales": lambda run: run.stored(store)}
    )


def chosen(rounding: Rounding, choice: _Choice | None = None) -> Store:
    """The stored scales of a 4over6 recipe, with another rounding of scales, or another choice."""
    how = choice or _Choice()

    def store(
        x: torch.Tensor,
        blocks: torch.Tensor,
        amax: torch.Tensor | None,
        tensor: torch.Tensor | None,
        recipe: Recipe,
    ) -> torch.Tensor:
        assert amax is not None
        base = unrounded_scales(blocks, tensor, recipe)
        six, four = rounding(base, recipe.scale), rounding(base * 1.5, recipe.scale)
        if how.pick in "46":
            return four if how.pick == "4" else six
        errors = [_error(x, scales, amax, tensor, recipe, how) for scales in (six, four)]
        if recipe.block[0] > 1 and not how.each_row:
            errors = [over_tiles(error, recipe.block[0], _tree) for error in errors]
        if how.pick == "larger":
            return torch.where(errors[1] > errors[0], four, six)
        return torch.where(errors[1] <= errors[0] if how.pick == "tied" else errors[1] < errors[0], four, six)

    return store


def _error(
    x: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, how: _Choice
) -> torch.Tensor:
    """Each block's error under `scales`, float32 (M, ⌈K/16⌉)."""
    width = recipe.block[1]
    values = pad_columns(x.float(), width)
    values = values.view(values.shape[0], -1, width)
    codes = encode(values * element_factors(scales, tensor, recipe).unsqueeze(2), recipe.element)
    back = decode(codes, recipe.element) * decode(scales, recipe.scale).unsqueeze(2)
    back = back * of_rows(amax, slice(0, len(x))).view(-1, 1, 1)
    largest = recipe.max_product
    if how.fused_difference:
        inverse = float(torch.tensor(1.0) / torch.tensor(largest))
        # A product of two float32 numbers is exact in float64.
        error = (back.double() * inverse - values.double()).float()
    else:
        error = (back * (1.0 / largest) if how.reciprocal else back / torch.full_like(back, largest)) - values
    squared = recipe.candidates == "4-or-6-mse"
    if how.fused and squared:
        total = torch.zeros_like(error[:, :, 0])
        for element in error.unbind(2):
            total = (element.double().square_() + total.double()).float()
        return total
    error = error.square_() if squared else error.abs_()
    return _tree(error.transpose(1, 2)) if how.tree else _in_turn(error.transpose(1, 2))


def _tree(rows: torch.Tensor) -> torch.Tensor:
    """(T, N, B) to (T, B): sums in a tree, N/2 to N/2, then N/4 and so on."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _in_turn(rows: torch.Tensor) -> torch.Tensor:
    """(T, N, B) to (T, B): sums one after the other."""
    total = torch.zeros_like(rows[:, 0])
    for row in rows.unbind(1):
        total = total + row
    return total
