"""Coverage of numbers: cells counted by hand, and the new cells of input families."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.certify.coverage import Reached, by_family, has_coverage, lines, reachable, reached
from narrowgauge.harness.certify.proof import SIDES, boundaries
from narrowgauge.harness.cli import app
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.spec.formats import E2M1, E4M3, Format
from narrowgauge.spec.recipes import find_recipe


@pytest.mark.parametrize("fmt", [E2M1, E4M3])
def test_sides_of_boundaries(fmt: Format) -> None:
    points = torch.tensor(fmt.values[: fmt.max_code + 1])
    codes = torch.arange(fmt.max_code + 1)
    middles = (points[:-1] + points[1:]) / 2
    for numbers, side in ((points, 0), (middles, 1), (middles.nextafter(points[:-1]), 2), (middles * 1.01, 3)):
        for sign in (1, -1):
            lower, found = boundaries(sign * numbers, fmt)
            assert lower.tolist() == codes[: len(numbers)].tolist()
            assert set(found.tolist()) == {side}
    special = torch.tensor([torch.inf, 2 * fmt.max, torch.nan])
    assert [SIDES[side] for side in boundaries(special, fmt)[1].tolist()] == ["above the largest"] * 2 + ["NaN"]


def test_cells_of_one_block() -> None:
    """Scale 1 under the tensor scale 1/448: 6 is exact, 0.25 a tie, 0.3 above and 0.2 below the midpoint."""
    x = torch.zeros(2, 20)
    x[0, :4] = torch.tensor([6, 0.25, -0.3, 0.2])
    x[1, 3] = 2688.0
    found = reached(x, find_recipe("nvfp4"))
    one, width = E4M3.values.index(1.0), 16 * 5
    cells = [cell - one * width for cell in found.cells.nonzero().flatten().tolist() if cell // width == one]
    assert cells == [0, 1, 2, 3, 7 * 5]
    assert found.places.nonzero().flatten().tolist() == [0, 3]
    assert found.tails.nonzero().flatten().tolist() == [4]
    assert bool(found.pairs[7 + 16 * 0])


@pytest.mark.long
def test_all_pairs_reach_all_that_is_reachable() -> None:
    """Every bfloat16 number beside every power of two is in a block of MXFP4."""
    recipe = find_recipe("mxfp4")
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    union = Reached.nothing(recipe)
    for exponent in range(-120, 127, 3):
        top = torch.tensor(1.5 * 2.0**exponent).bfloat16()  # the largest amax of a class
        some = x[x.abs() <= top]
        some = torch.nn.functional.pad(some, (0, -len(some) % 31)).view(-1, 31)
        union.add(reached(torch.cat([some, top.expand(len(some), 1)], 1), recipe))
    possible = reachable(recipe)
    assert not bool((union.cells & ~possible).any())
    scales = union.cells.view(256, -1).any(1)
    assert int(scales.sum()) > 70
    width = 16 * 5
    mine = union.cells.view(256, width)[scales]
    assert int((mine != possible.view(256, width)[scales]).sum()) == 0


def test_empty_matrices_reach_their_tail_alone() -> None:
    found = reached(torch.zeros(0, 33), find_recipe("mxfp8-e4m3"))
    assert [int(part.sum()) for part in found.parts()] == [0, 0, 0, 1]


def cases(*families: str) -> list[QuantizeCase]:
    return [QuantizeCase(recipe="nvfp4", shape=(16, 64), dtype="bf16", inputs=family) for family in families]


def test_families_and_what_they_add() -> None:
    found = by_family(cases("normal", "ties", "normal"))
    (recipe,) = found
    assert list(found[recipe]) == ["normal", "ties"]
    text = list(lines(cases("normal", "ties", "zeros")))
    assert text[0].startswith("nvfp4: ")
    assert "of 127 scales" in text[0]
    assert {line.split(":")[0].strip() for line in text[1:]} == {"normal", "ties", "zeros"}
    assert text[-1].endswith("zeros: 1, 1 of these alone")


def test_recipes_without_coverage() -> None:
    names = ("nvfp4-rht", "nvfp4-sr", "fp8-row-e4m3")
    assert not any(has_coverage(find_recipe(name)) for name in names)
    chosen = [QuantizeCase(recipe="fp8-row-e4m3", shape=(16, 64), dtype="bf16", inputs="normal")]
    assert list(lines(chosen)) == ["no rowwise case of quantize has byte scales, rounding to nearest and no rotation"]


@pytest.mark.long
def test_the_command_prints_coverage() -> None:
    result = CliRunner().invoke(app, ["list", "--coverage", "-k", "quantize/mxfp4/128x128/bf16/normal"])
    assert result.exit_code == 0, result.output
    assert "pairs of a scale and a side of a boundary" in result.output
