"""Signatures: what all wrong elements of a stage have in common."""

from __future__ import annotations

from math import exp, lgamma, log

import torch

from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.patterns.classes import classes
from narrowgauge.harness.diagnosis.patterns.places import Place, places
from narrowgauge.harness.operations.stages.outcome import Outcome

MOST = 3
WIDEST = 0.55
"""Share of all elements that a signature holds at most: half, and what as many random signs may exceed it by."""
CHANCE = 1e-6
"""Probability that as many random elements all share it, below which a signature is no chance."""
CHANCE_OF_AN_END = 1e-3
"""The same of a last or first row, column or tile: they are few, and where kernels go wrong."""


def signatures(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """At most three places or classes that hold every wrong element, the smallest first.

    One is told where it holds no more than about half of all elements and chance does not explain it. Of n elements of
    which k have it, all of w drawn without replacement have it with probability C(k, w)/C(n, w) (hypergeometric), times
    the number of places of its kind, since any of them would have been told (Bonferroni). What holds all of another of
    its sort, and therefore says less, is left out.
    """
    mask = wrong.wrong
    if mask is None or not bool(mask.any()):
        return []
    grid = mask.view(1, -1) if mask.dim() == 1 else mask
    count, total = int(grid.sum()), grid.numel()
    told: list[tuple[int, str, str]] = []
    kept: list[Place] = []
    for place in sorted(places(grid), key=lambda place: place.size):
        likely = _likely(count, place.size, total, place.like_it)
        sure = place.cause == "place:last-element" or likely < (CHANCE_OF_AN_END if place.end else CHANCE)
        if sure and place.size <= WIDEST * total and not any(one.within(place) for one in kept):
            kept.append(place)
            told.append((place.size, place.cause, place.words))
    masks: list[torch.Tensor] = []
    for size, name, words, of_class in sorted(_held(outcome, wrong, mask), key=lambda one: one[0]):
        if _likely(count, size, total) < CHANCE and not any(not bool((one & ~of_class).any()) for one in masks):
            masks.append(of_class)
            told.append((size, f"only:{name}", words))
    return [
        Explanation(cause, _sentence(words, size, count, total), wrong.stage, exact=False)
        for size, cause, words in sorted(told, key=lambda one: one[0])[:MOST]
    ]


def _held(outcome: Outcome, wrong: StageResult, mask: torch.Tensor) -> list[tuple[int, str, str, torch.Tensor]]:
    """Classes of no more than their share of all elements that hold all wrong ones: size, name, words and mask."""
    found = []
    for name, words, of_class in classes(outcome, wrong):
        size = int(of_class.sum())
        if size <= WIDEST * mask.numel() and not bool((mask & ~of_class).any()):
            found.append((size, name, words, of_class))
    return found


def _likely(wrong: int, size: int, total: int, like_it: int = 1) -> float:
    """The probability that `wrong` random elements of `total` all lie in some place of `size`, of `like_it` such."""
    if wrong > size:
        return 0.0
    ways = [lgamma(n + 1) - lgamma(n - wrong + 1) for n in (size, total)]
    return exp(min(0.0, ways[0] - ways[1] + log(like_it)))


def _sentence(words: str, size: int, count: int, total: int) -> str:
    wrong = f"{spaced(count)} of {spaced(count)} wrong element{'s' if count != 1 else ''}"
    return f"only {words} ({wrong}; it holds {100 * size / total:.3g} % of all)"
