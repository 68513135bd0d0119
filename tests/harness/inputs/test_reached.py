"""Coverage of numbers: bit sets, cells counted by hand, all cells that are reachable, and the family `boundaries`."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.inputs.reached import SIDES, BitSet, Reached, joined
from narrowgauge.harness.operations.quantize.reach import NAN, boundaries, has_coverage, reachable, reached
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.formats import E2M1, E4M3, Format
from narrowgauge.spec.recipes import find_recipe

WIDTH = E2M1.codes * len(SIDES)


def numbers(found: BitSet) -> list[int]:
    return [number for number in range(found.size) if found.bits >> number & 1]


def of(x: torch.Tensor, recipe: str) -> Reached:
    return reached(x, quantize(x, recipe))


@pytest.mark.parametrize("fmt", [E2M1, E4M3])
def test_sides_of_boundaries(fmt: Format) -> None:
    points = torch.tensor(fmt.values[: fmt.max_code + 1])
    codes = torch.arange(fmt.max_code + 1)
    middles = (points[:-1] + points[1:]) / 2
    for values, side in ((points, 0), (middles.nextafter(points[:-1]), 1), (middles, 2), (middles * 1.01, 3)):
        for sign in (1, -1):
            lower, found = boundaries(sign * values, fmt)
            assert lower.tolist() == codes[: len(values)].tolist()
            assert set(found.tolist()) == {side}
    special = torch.tensor([torch.inf, 2 * fmt.max, torch.nan])
    assert boundaries(special, fmt)[1].tolist() == [4, 4, NAN]


def test_sets_are_packed_without_loss() -> None:
    found = of(torch.arange(-40.0, 40).view(4, 20), "nvfp4")
    assert Reached.unpack(found.pack()) == found
    assert joined([("a", found.pack()), ("a", ""), ("b", "text"), ("b", "E2M1 9:QUJD 1:1 1:1 1:1 1:1")]) == {"a": found}
    other = of(torch.ones(4, 20), "nvfp4")
    assert joined([("a", found.pack()), ("a", other.pack())])["a"].cells.bits == found.cells.bits | other.cells.bits
    with pytest.raises(ValueError, match="a number is not below 3"):
        BitSet.unpack("3:" + BitSet(8, 255).pack().partition(":")[2])


def test_cells_of_one_block() -> None:
    """Scale 1 under the tensor scale 1/448: 6 is exact, 0.25 a tie, 0.3 above and 0.2 below the midpoint."""
    x = torch.zeros(2, 20)
    x[0, :4] = torch.tensor([6, 0.25, -0.3, 0.2])
    x[0, 4] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # NaN with every bit of its payload
    x[1, 3] = 2688.0
    found = of(x, "nvfp4")
    one = E4M3.values.index(1.0)
    cells = [cell - one * WIDTH for cell in numbers(found.cells) if cell // WIDTH == one]
    assert cells == [0, 1, 2, 3, 7 * 5]
    assert numbers(found.places) == [0, 3]
    assert numbers(found.tails) == [4]
    assert found.pairs.bits >> 7 & 1
    row = found.cells.rows(WIDTH)[one]
    assert row.bit_count() == len(cells)
    shares = [line[one] for line in found.levels()]
    assert len(shares) == 4
    assert shares[1:] == [0.0, 0.0, 1 / 6]  # of 4 with its four sides, 6 and above 6, 6 is reached


def test_empty_matrices_reach_their_tail_alone() -> None:
    found = of(torch.zeros(0, 33), "mxfp8-e4m3")
    assert [len(each) for each in (found.cells, found.places, found.tails)] == [0, 0, 1]
    assert len(found.possible) == 124_992


def test_recipes_without_coverage() -> None:
    names = ("nvfp4-rht", "nvfp4-sr", "fp8-row-e4m3")
    assert not any(has_coverage(find_recipe(name)) for name in names)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4@even", "mxfp6-e2m3", "mxfp8-e4m3@ocp"])
def test_all_numbers_reach_what_is_reachable(name: str) -> None:
    """Blocks of the largest amax of a scale with every smaller bfloat16 number. No other cell is reachable."""
    recipe = find_recipe(name)
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    scales = quantize(torch.nn.functional.pad(x.view(-1, 1), (0, 31)), recipe).scales.flatten()
    found = 0
    for top in [*scales.diff().nonzero().flatten().tolist(), 0x7F7F][::17]:
        some = torch.nn.functional.pad(x[: top + 1], (0, -(top + 1) % 31)).view(-1, 31)
        union = of(torch.cat([some, x[top].expand(len(some), 1)], 1), name)
        width = recipe.element.codes * len(SIDES)
        mine, possible = (each.rows(width)[int(scales[top])] for each in (union.cells, reachable(recipe)))
        assert mine == possible, top
        found += 1
    assert found > 10


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("nvfp4", (256, 256)), ("mxfp4", (256, 128)),
        *(pytest.param(name, (1024, 512), marks=pytest.mark.long)
          for name in ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8-e4m3@ocp", "mxfp8-2d")),
    ],
)  # fmt: skip
def test_boundaries_reach_nearly_all_cells(name: str, shape: tuple[int, int]) -> None:
    found = of(make_inputs(case_from_labels("quantize", name, shape, "bf16", "boundaries", ())).x, name)
    assert found.share > 0.99
