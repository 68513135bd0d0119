"""Probabilities of a sampler: the results of all bytes, and the number of calls with these results."""

import pytest
import torch

from narrowgauge.harness.checks.statistics.rounding_choices import UNKNOWN, RoundingChoices, rounding_choices
from narrowgauge.harness.checks.statistics.rounding_tests import required_calls
from narrowgauge.harness.operations.stages.black_box import OTHER_SEEDS, bits_of
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.spec.recipes import find_recipe


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["nvfp4-sr", "mxfp8-e4m3-sr", "mxfp8-e5m2-sr", "mxfp6-e3m2-sr", "mxfp6-e2m3-sr"])
def test_odds_are_what_all_256_bytes_give(name):
    recipe = find_recipe(name)
    top = recipe.element.max
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(300, generator=generator) * torch.tensor(
        [1.0, top / 4, 2.0 ** (1 - recipe.element.bias)]
    ).repeat(100)
    marks = (
        torch.arange(0, 1025) / 256 * 2.0 ** (1 - recipe.element.bias)
    )  # multiples of 1/256 of a step and beside them
    beside = torch.cat([marks, torch.nextafter(marks, torch.tensor(0.0)), torch.nextafter(marks, torch.tensor(1e9))])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, top, -top, top * 1.01, top * 0.999])
    scaled = torch.cat([spread, beside, -beside, special]).view(1, -1)
    odds = rounding_choices(scaled, scaled, recipe)
    every = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, *scaled.shape)
    codes = element_codes(scaled.expand(256, *scaled.shape), recipe, every.contiguous())
    assert not odds.outside(codes, recipe).any()
    count = odds.rounded_up(codes, recipe).sum(0)
    assert torch.equal(odds.outside((codes[0] ^ recipe.element.sign_code), recipe) > 0, torch.ones_like(scaled).bool())
    known = odds.up_bytes != UNKNOWN
    assert torch.equal(count[known], odds.up_bytes[known].long())
    moves = odds.least != odds.greatest
    assert not (known & ~moves).any()
    assert torch.equal(moves, (count > 0) | known)  # a magnitude that never goes up has probability 0, and is known
    lifted = moves & ~known
    magnitude = scaled[lifted].abs().double()
    assert 0 < int(lifted.sum()) < 0.4 * scaled.numel()
    # Left out: the sum of the rule rounds up to the grid point, and a comparison of bits does not reach the point.
    assert bool(((count[lifted] >= 1) & (magnitude < top)).all())


def test_odds_of_an_interval_are_those_of_both_ends():
    recipe = find_recipe("nvfp4-sr")
    lower, upper = torch.tensor([[0.4, -0.1, 1.0, -0.0, 2.2]]), torch.tensor([[0.6, 0.1, 1.2, 0.0, 2.2]])
    odds = rounding_choices(lower, upper, recipe)
    order = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    right = [
        [code for code in order if not odds.outside(torch.full((1, 5), code, dtype=torch.uint8), recipe)[0, column]]
        for column in range(5)
    ]
    assert right == [[0, 1, 2], [9, 8, 0, 1], [2, 3], [8, 0], [4, 5]]
    assert (odds.up_bytes[0, :4] == UNKNOWN).all()
    assert int(odds.up_bytes[0, 4]) == 51


def test_calls_are_as_many_as_a_case_is_worth():
    def odds(count):
        return RoundingChoices(*[torch.zeros(1, count)] * 3, torch.ones(1, count, dtype=torch.int16))

    assert [required_calls(odds(count)) for count in (1, 10_000, 100_000, 4_000_000)] == [512, 497, 50, 4]
    nothing = odds(8)
    nothing.up_bytes[:] = UNKNOWN
    assert required_calls(nothing) == 1


def test_calls_have_separate_offsets_and_a_second_seed():
    bits = [bits_of((5, 10), call) for call in (0, 1, 2, *OTHER_SEEDS)]
    assert bits == [(5, 10), (5, 12), (5, 14), (4, 10), (5 + (1 << 32), 10), (7, 10)]
    assert bits_of(((1 << 63) - 1, 0), -3) == (1, 0)  # seeds stay below 2^63
