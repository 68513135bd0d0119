"""Mistakes in the update of delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.delayed import FLT_MAX, update_scale
from narrowgauge.reference.quantize.scaling import divide
from narrowgauge.spec.formats import E4M3, E5M2
from narrowgauge.spec.recipe import Delayed
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True)
class Update:
    """The update of delayed scaling of a history (H, N) and scales (N,), float32: docs/numerics.md#delayed-scaling."""

    history: torch.Tensor
    scale: torch.Tensor
    recipe: Recipe

    @property
    def by(self) -> Delayed:
        """The rule of the recipe."""
        assert self.recipe.delayed is not None
        return self.recipe.delayed

    @property
    def zero(self) -> torch.Tensor:
        """A row of zeros."""
        return torch.zeros_like(self.history[:1])

    @property
    def latest(self) -> torch.Tensor:
        """The latest amaxes."""
        return self.history[0]

    @property
    def without_nan(self) -> torch.Tensor:
        """The history with 0 in place of NaN."""
        return torch.where(self.history.isnan(), 0.0, self.history)

    @property
    def amax(self) -> torch.Tensor:
        """The amaxes that make the scales."""
        return self.without_nan.amax(0) if self.by.algorithm == "max" else self.latest

    @property
    def correct(self) -> torch.Tensor:
        """The correct scales."""
        return update_scale(self.history, self.scale, self.recipe)[1]

    def scales(
        self, numbers: torch.Tensor, largest: float | None = None, *, margin: float | None = None
    ) -> torch.Tensor:
        """Scales by wrong amaxes, a wrong largest number of the format, or a wrong exponent of the margin."""
        updates = numbers.isfinite() & (numbers > 0)
        if self.by.update == "bulk":
            updates &= self.latest != 0
        top = (self.recipe.element.max if largest is None else largest) * 2.0 ** (
            -self.by.margin if margin is None else margin
        )
        return torch.where(updates, _saturated(divide(top, numbers)), self.scale)

    def with_choice(self, name: str, choice: str, result: int) -> torch.Tensor:
        """The update with another value of a field of `Recipe.delayed`. `result`: 0 for history, 1 for scales."""
        changed = replace(self.recipe, delayed=replace(self.by, **{name: choice}))  # type: ignore[arg-type]
        return update_scale(self.history, self.scale, changed)[result]

    def by_reciprocal(self) -> torch.Tensor:
        """Scales that are the largest number times 1/amax."""
        amax = self.amax
        scale = _saturated(divide(1.0, amax) * (self.recipe.element.max * 2.0**-self.by.margin))
        return torch.where(amax.isfinite() & (amax > 0), scale, self.scale)


def _other_choice(name: str) -> Callable[[Update], dict[str, str]]:
    """The other value of a field of `Recipe.delayed`."""
    choices = {"update": ("single", "bulk"), "algorithm": ("max", "most-recent")}[name]
    return lambda u: {choice: choice for choice in choices if choice != getattr(u.by, name)}


def _margin(u: Update) -> dict[str, int]:
    return {str(u.by.margin): u.by.margin}


def _skipped_rows(u: Update) -> dict[str, slice]:
    """Rows of a single thread, if several threads take the rows in turn."""
    return {
        f"row {first} of every {count}": slice(first, None, count)
        for count in (2, 4, 8, 16, 32)
        for first in range(min(count, len(u.history)))
    }


def _other_format(u: Update) -> dict[str, float]:
    other = E4M3 if u.recipe.element is E5M2 else E5M2
    return {other.name: other.max}


HISTORIES: tuple[Deviation[Update], ...] = (
    Deviation("history-not-rolled", "the history stays as it is", "history", lambda u: u.history),
    Deviation("history-not-rolled", "the history is not rolled, its first row set to 0", "history",
              lambda u: torch.cat([u.zero, u.history[1:]])),
    Deviation("history-rolled-back", "the history is rolled the other way", "history",
              lambda u: torch.cat([u.zero, u.history[:-1]])),
    Deviation("history-first-not-zeroed", "the first row of the rolled history is not set to 0", "history",
              lambda u: u.history.roll(-1, 0)),
    Deviation("history-latest-lost", "the latest amax is not kept as the last row", "history",
              lambda u: torch.cat([u.zero, u.history[2:], u.history[-1:]]) if len(u.history) > 1 else u.zero),
    Deviation("history-cleared", "the history is all 0", "history", lambda u: torch.zeros_like(u.history)),
    Deviation("update:{}", "the update is {}", "history", lambda choice, u: u.with_choice("update", choice, 0),
              _other_choice("update")),
)  # fmt: skip
"""Wrong histories (H, N), float32, after an update."""
SECTION_AMAXES: tuple[Deviation[Update], ...] = (
    Deviation("amax-of-first-section", "the latest amax is that of the first section alone", "history",
              lambda sections, history: torch.cat([sections[:1], history[1:]])),
    Deviation("amax-of-last-section", "the latest amax is that of the last section alone", "history",
              lambda sections, history: torch.cat([sections[-1:], history[1:]])),
)  # fmt: skip
"""Wrong histories before an update, from the latest amaxes of each section, (G, N), and a history with their maxima."""
SCALES: tuple[Deviation[Update], ...] = (
    Deviation("scale-not-updated", "scales stay as they are", "scale", lambda u: u.scale),
    Deviation("algorithm:{}", "the algorithm is {}", "scale", lambda choice, u: u.with_choice("algorithm", choice, 1),
              _other_choice("algorithm")),
    Deviation("update:{}", "the update is {}", "scale", lambda choice, u: u.with_choice("update", choice, 1),
              _other_choice("update")),
    Deviation("margin-ignored", "the margin {} is ignored", "scale", lambda _, u: u.scales(u.amax, margin=0), _margin),
    Deviation("margin-inverted", "the margin {} is multiplied by", "scale",
              lambda margin, u: u.scales(u.amax, margin=margin), _margin),
    Deviation("scale-inverted", "scales are decode scales", "scale", lambda u: divide(1.0, u.correct)),
    Deviation("amax-without-latest", "the latest amax does not count", "scale",
              lambda u: u.scales(_largest(u.without_nan[1:], u.latest))),
    Deviation("amax-without-oldest", "the oldest amax does not count", "scale",
              lambda u: u.scales(_largest(u.without_nan[:-1], u.latest))),
    Deviation("history-partial", "{} of the history does not count", "scale",
              lambda skipped, u: u.scales(_without_rows(u.without_nan, skipped).amax(0)), _skipped_rows,
              when=lambda u: u.by.algorithm == "max"),
    Deviation("amax-of-all-tensors", "every tensor takes the amax of all", "scale",
              lambda u: u.scales(u.amax.amax().expand_as(u.amax))),
    Deviation("nan-spread", "a NaN in the history leaves the scale as it is", "scale",
              lambda u: u.scales(u.history.amax(0) if u.by.algorithm == "max" else u.latest)),
    Deviation("max-of-other-format", "the largest number is that of {}", "scale",
              lambda largest, u: u.scales(u.amax, largest), _other_format),
    Deviation("scale-order:max*(1/amax)", "scales are max·(1/amax)", "scale", lambda u: u.by_reciprocal()),
    Deviation("scale-not-clamped", "a scale that overflows is infinite", "scale",
              lambda u: torch.where(u.correct == FLT_MAX, torch.inf, u.correct)),
    Deviation("zero-amax-updates", "an amax of 0 makes {}", "scale",
              lambda number, u: torch.where(u.amax == 0, number, u.correct),
              {"a scale too": FLT_MAX, "the scale 1": 1.0}),
    Deviation("infinite-amax-updates", "an infinite amax makes the scale {1:g}", "scale",
              lambda number, u: torch.where(u.amax.isinf(), number, u.correct), {"0": 0.0, "1": 1.0}),
)  # fmt: skip
"""Wrong scales (N,), float32, after an update."""


def _without_rows(history: torch.Tensor, skipped: slice) -> torch.Tensor:
    cut = history.clone()
    cut[skipped] = 0
    return cut


def _largest(rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return rows.amax(0) if len(rows) else torch.zeros_like(otherwise)


def _saturated(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.isinf(), FLT_MAX, scale)


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
        for row in SECTION_AMAXES:
            updated = update_scale(row.result(of_sections, history), scale, recipe)[0]
            if not bool(right.all()) and equal_bits(torch.where(right, correct, updated), kernel):
                yield row.cause, row.sentence
    yield from _matching(kernel, HISTORIES, Update(history, scale, recipe))


def wrong_scales(
    history: torch.Tensor, scale: torch.Tensor, kernel: torch.Tensor, recipe: Recipe, _: StageResult, __: Limit
) -> Iterator[Cause]:
    """Mistakes that give the updated scales (N,) of the kernel."""
    yield from _matching(kernel, SCALES, Update(history, scale, recipe))


def _matching(kernel: torch.Tensor, table: tuple[Deviation[Update], ...], update: Update) -> Iterator[Cause]:
    for row in rows_of(table, update):
        if equal_bits(row.result(update), kernel):
            yield row.cause, row.sentence
