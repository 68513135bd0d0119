"""Stochastic rounding by random bits of the backend's own: draws, and the stage that judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.checks.bit_equality import with_nans_of
from narrowgauge.harness.checks.distance import measure
from narrowgauge.harness.checks.finding import Describe, make_finding, sentence
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.correlations import HIGH_SEED, PLAIN_SEED, SEED_AS_OFFSET, Roundings
from narrowgauge.harness.checks.statistics.rounding_choices import RoundingChoices, rounding_choices
from narrowgauge.harness.checks.statistics.rounding_tests import RoundingCounts, required_calls
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.spec.recipes import Recipe

Draw = Callable[[int], torch.Tensor | None]
"""The number of a call to its codes, uint8 (M, K), one an element; see `bits_of`. None for a number of OTHER_SEEDS
unknown to the source of the calls."""
OTHER_SEEDS = {-1: PLAIN_SEED, -2: HIGH_SEED, -3: SEED_AS_OFFSET}
"""Numbers of the calls with another seed, and the kind of the seed."""
_AT_ONCE = 1 << 22
"""Roundings that are counted at once, to bound memory; but two calls at least."""


def makes_own_bits(backend: Backend, recipe: Recipe) -> bool:
    """Whether the backend draws the random bits of stochastic rounding itself, unknown to the harness."""
    return recipe.rounding == "stochastic" and backend.declares.get("random") == "own"


def refuse_words(case: QuantizeCase, backend: Backend, recipe: Recipe) -> None:
    """Raises Unsupported if a case gives random words to a backend that draws its own random bits."""
    if case.random == "words" and makes_own_bits(backend, recipe):
        raise Unsupported(f"backend {backend.name} makes its own random bits; it takes no words")


def bits_of(random: tuple[int, int], call: int) -> tuple[int, int]:
    """Seed and offset of a further call: two offsets on, since two halves use two; or another seed alone."""
    seed, offset = random
    if call >= 0:
        return seed, offset + 2 * call
    seeds = {PLAIN_SEED: seed ^ 1, HIGH_SEED: seed ^ 1 << 32, SEED_AS_OFFSET: (seed + 2) % (1 << 63)}
    return seeds[OTHER_SEEDS[call]], offset


def distribution_stage(
    stage: str,
    found: torch.Tensor,
    scaled: tuple[torch.Tensor, torch.Tensor],
    recipe: Recipe,
    draw: Draw | None,
    *,
    transposed: bool,
    describe: Describe,
    halves: list[Roundings] | None = None,
) -> StageResult:
    """Judge codes `found` (M, K), one an element, of scaled values between two tensors:
    docs/tolerance.md#stochastic-rounding.

    Every code is one of the two neighbours of its value. Whether the kernel chooses as it should is a matter of chance,
    left to `decide`: of these codes alone, or with `draw` of as many calls as the case needs. Findings are in the
    coordinates of the transpose where `transposed`. `halves`: roundings of the second half of the call, if judged
    before; these are added.
    """
    choices = rounding_choices(*scaled, recipe)
    counts = RoundingCounts(choices, recipe, scaled[0].signbit())
    result = StageResult(stage, "statistics", found.numel())
    calls = 1 if draw is None else required_calls(choices)
    for number, drawn in _calls(found, draw, calls):
        codes = with_nans_of(choices.below.expand(drawn.shape), drawn, recipe.element)
        outside = choices.outside(codes, recipe)
        if bool(outside.any()):
            which = int(outside.flatten(1).any(1).int().argmax())
            _refuse(result, outside[which], choices, number + which, transposed, describe)
            return result
        up = choices.rounded_up(codes, recipe)
        counts.add(up)
        if number == 0 and halves is not None:
            for other in halves:
                counts.add_half(up[0], other)
            halves.append(counts.roundings(up[0]))
    if calls > 1 and draw is not None:
        for call, kind in OTHER_SEEDS.items():
            if (codes_of_seed := draw(call)) is not None:
                counts.add_seed(kind, choices.rounded_up(codes_of_seed, recipe))
    result.tests, result.draws = counts.tests(), counts.draws
    return result


def _calls(found: torch.Tensor, draw: Draw | None, calls: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Codes (calls, M, K) in parts, each with the number of its first call; that of the first is `found`."""
    together = max(2, _AT_ONCE // max(1, found.numel()))
    for first in range(0, calls, together):
        numbers = range(first, min(first + together, calls))
        codes = [found if n == 0 or draw is None else draw(n) for n in numbers]
        yield first, torch.stack([one for one in codes if one is not None])


def _refuse(
    result: StageResult,
    outside: torch.Tensor,
    choices: RoundingChoices,
    call: int,
    transposed: bool,
    describe: Describe,
) -> None:
    """Say which codes no random bits give."""
    wrong = outside > 0
    still = bool((choices.least == choices.greatest)[wrong].all())
    wrong, distance = ((t.T.contiguous() if transposed else t) for t in (wrong, outside.masked_fill(outside == 0, -1)))
    result.mismatches, result.max_ulp, result.wrong_elements = int(wrong.sum()), int(distance.amax()), wrong
    why = "each has a single right code" if still else "no random bits give them"
    when = f" (call {call})" if call else ""
    distances = measure(wrong, distance, None)
    result.sentence = f"{sentence(wrong, distances, 'codes')}; {why}{when}"
    # Its elements show the codes of the first call.
    result.finding = make_finding(result.stage, result.rule, result.sentence, wrong, distances, describe=describe)
