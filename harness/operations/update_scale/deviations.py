"""Mistakes in the update of delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.delayed import FLT_MAX, update_scale
from narrowgauge.reference.quantize.scaling import divide
from narrowgauge.spec.formats import E4M3, E5M2
from narrowgauge.spec.recipe import Delayed
from narrowgauge.spec.recipes import Recipe

Updated = tuple[str, str, Callable[[], torch.Tensor]]
"""Cause, sentence, and function to the updated tensor."""


# Rows of a single thread, if several threads take the rows in turn.
_SKIPPED_ROWS = tuple(
    (f"row {first} of every {count}", slice(first, None, count))
    for count in (2, 4, 8, 16, 32)
    for first in range(count)
)


def deviating_histories(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe) -> Iterator[Updated]:
    """Histories (H, N), float32, after an update with a known mistake. Source: docs/numerics.md#delayed-scaling."""
    zero = torch.zeros_like(history[:1])
    yield "history-not-rolled", "the history stays as it is", lambda: history
    yield (
        "history-not-rolled",
        "the history is not rolled, its first row set to 0",
        lambda: _join_rows(zero, history[1:]),
    )
    yield "history-rolled-back", "the history is rolled the other way", lambda: _join_rows(zero, history[:-1])
    yield (
        "history-first-not-zeroed", "the first row of the rolled history is not set to 0",
        lambda: history.roll(-1, 0),
    )  # fmt: skip
    yield (
        "history-latest-lost", "the latest amax is not kept as the last row",
        lambda: _join_rows(zero, history[2:], history[-1:]) if len(history) > 1 else zero,
    )  # fmt: skip
    yield "history-cleared", "the history is all 0", lambda: torch.zeros_like(history)
    yield _with_other_choice(history, scale, recipe, "update", 0)


def deviating_scales(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe) -> Iterator[Updated]:
    """Scales (N,), float32, after an update with a known mistake."""
    delayed, element_max = _delayed(recipe), recipe.element.max
    latest, without_nan = history[0], torch.where(history.isnan(), 0.0, history)
    amax = without_nan.amax(0) if delayed.algorithm == "max" else latest
    valid = amax.isfinite() & (amax > 0)
    correct = update_scale(history, scale, recipe)[1]

    def updated_scale(numbers: torch.Tensor, largest: float = element_max * 2.0**-delayed.margin) -> torch.Tensor:
        updates = numbers.isfinite() & (numbers > 0)
        if delayed.update == "bulk":
            updates &= latest != 0
        return torch.where(updates, _saturated(divide(largest, numbers)), scale)

    yield "scale-not-updated", "scales stay as they are", lambda: scale
    yield _with_other_choice(history, scale, recipe, "algorithm", 1)
    yield _with_other_choice(history, scale, recipe, "update", 1)
    yield "margin-ignored", f"the margin {delayed.margin} is ignored", lambda: updated_scale(amax, element_max)
    yield (
        "margin-inverted",
        f"the margin {delayed.margin} is multiplied by",
        lambda: updated_scale(amax, element_max * 2.0**delayed.margin),
    )
    yield "scale-inverted", "scales are decode scales", lambda: divide(1.0, correct)
    yield (
        "amax-without-latest",
        "the latest amax does not count",
        lambda: updated_scale(_largest(without_nan[1:], latest)),
    )
    yield (
        "amax-without-oldest",
        "the oldest amax does not count",
        lambda: updated_scale(_largest(without_nan[:-1], latest)),
    )
    for phrase, skipped in _SKIPPED_ROWS:
        if delayed.algorithm == "max" and skipped.start < len(without_nan):
            yield (
                "history-partial", f"{phrase} of the history does not count",
                lambda skipped=skipped: updated_scale(_without_rows(without_nan, skipped).amax(0)),  # type: ignore[misc]
            )  # fmt: skip
    yield (
        "amax-of-all-tensors",
        "every tensor takes the amax of all",
        lambda: updated_scale(amax.amax().expand_as(amax)),
    )
    yield (
        "nan-spread", "a NaN in the history leaves the scale as it is",
        lambda: updated_scale(history.amax(0) if delayed.algorithm == "max" else latest),
    )  # fmt: skip
    other_format = E4M3 if recipe.element is E5M2 else E5M2
    yield (
        "max-of-other-format", f"the largest number is that of {other_format.name}",
        lambda: updated_scale(amax, other_format.max * 2.0**-delayed.margin),
    )  # fmt: skip
    yield (
        "scale-order:max*(1/amax)", "scales are max·(1/amax)",
        lambda: torch.where(valid, _saturated(divide(1.0, amax) * (element_max * 2.0**-delayed.margin)), scale),
    )  # fmt: skip
    yield (
        "scale-not-clamped", "a scale that overflows is infinite",
        lambda: torch.where(correct == FLT_MAX, torch.inf, correct),
    )  # fmt: skip
    yield (
        "zero-amax-updates", "an amax of 0 makes a scale too",
        lambda: torch.where(amax == 0, FLT_MAX, correct),
    )  # fmt: skip
    yield "zero-amax-updates", "an amax of 0 makes the scale 1", lambda: torch.where(amax == 0, 1.0, correct)
    yield "infinite-amax-updates", "an infinite amax makes the scale 0", lambda: torch.where(amax.isinf(), 0.0, correct)
    yield "infinite-amax-updates", "an infinite amax makes the scale 1", lambda: torch.where(amax.isinf(), 1.0, correct)


def _without_rows(history: torch.Tensor, skipped: slice) -> torch.Tensor:
    cut = history.clone()
    cut[skipped] = 0
    return cut


def _join_rows(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _largest(rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return rows.amax(0) if len(rows) else torch.zeros_like(otherwise)


def _saturated(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.isinf(), FLT_MAX, scale)


def _delayed(recipe: Recipe) -> Delayed:
    assert recipe.delayed is not None
    return recipe.delayed


def _with_other_choice(
    history: torch.Tensor, scale: torch.Tensor, recipe: Recipe, name: str, result_index: int
) -> Updated:
    """The update with the other value of a field of `Recipe.delayed`. `result_index`: 0 for history, 1 for scales."""
    choices = {"update": ("single", "bulk"), "algorithm": ("max", "most-recent")}[name]
    delayed = _delayed(recipe)
    other_choice = next(choice for choice in choices if choice != getattr(delayed, name))
    changed = replace(recipe, delayed=replace(delayed, **{name: other_choice}))  # type: ignore[arg-type]
    return (
        f"{name}:{other_choice}",
        f"the {name} is {other_choice}",
        lambda: update_scale(history, scale, changed)[result_index],
    )


def wrong_histories(
    history: torch.Tensor,
    scale: torch.Tensor,
    kernel: torch.Tensor,
    recipe: Recipe,
    _: StageResult,
    __: Limit,
    *,
    of_sections: torch.Tensor | None = None,
) -> Iterator[Cause]:
    """Mistakes that give the updated history (H, N) of the kernel. `of_sections`: latest amaxes of each section,
    (G, N); the first row of the history has their maxima."""
    if of_sections is not None and len(of_sections) > 1:
        correct = update_scale(history, scale, recipe)[0]
        right = (correct == kernel).all(0)  # by tensor
        for number, cause, phrase in ((0, "amax-of-first-section", "first"), (-1, "amax-of-last-section", "last")):
            of_section = torch.cat([of_sections[number].unsqueeze(0), history[1:]])
            updated = update_scale(of_section, scale, recipe)[0]
            if not bool(right.all()) and equal_bits(torch.where(right, correct, updated), kernel):
                yield cause, f"the latest amax is that of the {phrase} section alone"
    yield from _matching(kernel, deviating_histories(history, scale, recipe))


def wrong_scales(
    history: torch.Tensor, scale: torch.Tensor, kernel: torch.Tensor, recipe: Recipe, _: StageResult, __: Limit
) -> Iterator[Cause]:
    """Mistakes that give the updated scales (N,) of the kernel."""
    yield from _matching(kernel, deviating_scales(history, scale, recipe))


def _matching(kernel: torch.Tensor, deviations: Iterable[Updated]) -> Iterator[Cause]:
    for cause, sentence, compute in deviations:
        if equal_bits(compute(), kernel):
            yield cause, sentence
