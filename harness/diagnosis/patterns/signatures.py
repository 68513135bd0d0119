"""Signatures: places and classes that contain all wrong elements of a stage."""

from __future__ import annotations

from math import exp, lgamma, log

import torch

from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.patterns.element_classes import element_classes
from narrowgauge.harness.diagnosis.patterns.places import Place, places
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Outcome

MAX_SIGNATURES = 3
_SAMPLED_WRONG = 64
"""Wrong elements on which a class is tried first."""
LARGEST_SHARE = 0.55
"""Largest share of all elements in a signature: half, and a margin for the share of negative random numbers."""
CHANCE = 1e-6
"""Significance level of a place or a class: a pattern is reported if random elements have it with a smaller
probability, corrected for the number of similar places, or of classes, that are tried."""
CHANCE_OF_AN_END = 1e-3
"""Significance level for the first or last row, column or tile: a matrix has few of these places, and kernels often
fail in them."""
CHANCE_OF_LINES = 1e-3
"""Significance level of a place if whole rows or columns are wrong by chance, corrected for all places that are
tried."""
_ENDS = 16
"""Ends of a matrix: the first, the last, and four tails of rows and of columns, four last tiles."""
_KINDS = 18
"""Kinds of places along rows and columns: a line, four lanes and four blocks of lines each; each has a period."""
_CLASSES = 16
"""Largest number of classes of elements of a stage, without sections."""
PLACE: Deviation[StageResult] = Deviation("place:{}", "all wrong elements lie in this place", "elements", exact=False)
CLASS: Deviation[StageResult] = Deviation("only:{}", "all wrong elements are of this class", "elements", exact=False)


def signatures(outcome: Outcome, wrong_stage: StageResult) -> list[Explanation]:
    """At most three places or classes that contain every wrong element, the smallest first.

    A signature is reported if it contains at most about half of all elements and chance does not explain it. If k of n
    elements are in it, w elements drawn without replacement are all in it with probability C(k, w)/C(n, w)
    (hypergeometric). The probability is multiplied by the number of similar places, because each of them could have
    been reported (Bonferroni). Wrong elements often fill whole rows or columns, and are then not independent of each
    other: rows that contain elements from several rows are therefore tested by the number of these rows; columns alike.
    A band of each period ("rows 96 to 127 of every 128") is tested by the number of wrong blocks of rows.
    A place that contains a reported place is left out; the same for classes.
    """
    mask = wrong_stage.wrong_elements
    if mask is None or not bool(mask.any()):
        return []
    grid = mask.view(1, -1) if mask.dim() == 1 else mask
    count, total = int(grid.count_nonzero()), grid.numel()
    if count > LARGEST_SHARE * total:  # every place and class with so many elements is too large
        return []
    reported_signatures: list[tuple[int, str, str]] = []
    reported_places: list[Place] = []
    for place in sorted(places(grid), key=lambda place: place.size):
        significant = _is_significant(grid, place)
        redundant = any(reported.within(place) for reported in reported_places)
        if significant and place.size <= LARGEST_SHARE * total and not redundant:
            reported_places.append(place)
            reported_signatures.append((place.size, place.cause, place.phrase))
    reported_masks: list[torch.Tensor] = []
    classes = sorted(_covering_classes(outcome, wrong_stage, mask), key=lambda element_class: element_class[0])
    for size, name, phrase, class_mask in classes:
        redundant = any(not bool((reported & ~class_mask).any()) for reported in reported_masks)
        if _chance_probability(count, size, total, _CLASSES) < CHANCE and not redundant:
            reported_masks.append(class_mask)
            reported_signatures.append((size, CLASS.cause.format(name), phrase))
    smallest = sorted(reported_signatures, key=lambda signature: signature[0])[:MAX_SIGNATURES]
    return [
        Explanation(cause, _sentence(phrase, size, count, total), wrong_stage.stage, exact=False)
        for size, cause, phrase in smallest
    ]


def _covering_classes(
    outcome: Outcome, wrong_stage: StageResult, mask: torch.Tensor
) -> list[tuple[int, str, str, torch.Tensor]]:
    """Classes that contain all wrong elements, and at most LARGEST_SHARE of all: size, name, phrase and mask."""
    covering = []
    wrong_numbers = mask.nonzero()
    sampled = wrong_numbers[:: -(-len(wrong_numbers) // _SAMPLED_WRONG)].unbind(1)
    for name, phrase, class_mask in element_classes(outcome, wrong_stage):
        if not bool(class_mask[sampled].all()):
            continue
        size = int(class_mask.count_nonzero())
        if size <= LARGEST_SHARE * mask.numel() and not bool((mask & ~class_mask).any()):
            covering.append((size, name, phrase, class_mask))
    return covering


def _is_significant(grid: torch.Tensor, place: Place) -> bool:
    """Whether chance does not explain that all wrong elements of `grid` lie in `place`."""
    last_element = place.cause == "place:last-element"
    tried = 1 if last_element else _ENDS if place.is_end else place.similar_places
    probability = _chance_probability(int(grid.count_nonzero()), place.size, grid.numel(), tried)
    if probability >= (CHANCE_OF_AN_END if place.is_end else CHANCE):
        return False
    if place.blocks is not None:
        return _chance_probability(*place.blocks, place.similar_places) < CHANCE
    # Wrong rows and columns. A single one is a place by its elements; numbers of elements in memory have neither.
    of_lines = 1.0
    lines = [(count, *extents) for count, *extents in _lines(grid, place) if count > 1]
    for count, size, extent in lines:
        of_lines *= _chance_probability(count, size, extent)
    return not lines or of_lines * (_ENDS if place.is_end else place.similar_places * _KINDS) < CHANCE_OF_LINES


def _lines(grid: torch.Tensor, place: Place) -> list[tuple[int, int, int]]:
    """For rows and columns that the place restricts: the number of wrong ones, of those in the place, and of all."""
    if -1 in place.rows:
        return []
    return [
        (int(grid.any(1 - axis).count_nonzero()), len(numbers), grid.shape[axis])
        for axis, numbers in enumerate((place.rows, place.columns))
        if len(numbers) < grid.shape[axis]
    ]


def _chance_probability(wrong: int, size: int, total: int, similar_places: int = 1) -> float:
    """Probability that `wrong` random elements of `total` all lie in one of `similar_places` places of `size`."""
    if wrong > size:
        return 0.0
    log_counts = [lgamma(n + 1) - lgamma(n - wrong + 1) for n in (size, total)]
    return exp(min(0.0, log_counts[0] - log_counts[1] + log(similar_places)))


def _sentence(phrase: str, size: int, count: int, total: int) -> str:
    elements = f"{format_count(count)} of {format_count(count)} wrong element{'s' if count != 1 else ''}"
    return f"only {phrase} ({elements}; it holds {100 * size / total:.3g} % of all)"
