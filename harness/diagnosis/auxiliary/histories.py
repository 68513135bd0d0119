"""Updates of delayed scaling that kernels do in place of that of their recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from narrowgauge.reference.quantize.delayed import FLT_MAX, update_scale
from narrowgauge.reference.quantize.scaling import divide
from narrowgauge.spec.formats import E4M3, E5M2
from narrowgauge.spec.recipe import Delayed
from narrowgauge.spec.recipes import Recipe

Updated = tuple[str, str, Callable[[], torch.Tensor]]
"""A cause, its sentence, and what makes the tensor that it leaves."""


# Rows that one of several threads, which take them in turn, is to look at.
_PARTS = tuple(
    (f"row {first} of every {count}", slice(first, None, count))
    for count in (2, 4, 8, 16, 32)
    for first in range(count)
)


def deviating_histories(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe) -> Iterator[Updated]:
    """Histories (H, N), float32, after a step that is wrong in a known way. Source:
    docs/numerics.md#delayed-scaling."""
    zero = torch.zeros_like(history[:1])
    yield "history-not-rolled", "the history stays as it is", lambda: history
    yield "history-not-rolled", "the history is not rolled, its first row set to 0", lambda: _rows(zero, history[1:])
    yield "history-rolled-back", "the history is rolled the other way", lambda: _rows(zero, history[:-1])
    yield (
        "history-first-not-zeroed", "the first row of the rolled history is not set to 0",
        lambda: history.roll(-1, 0),
    )  # fmt: skip
    yield (
        "history-latest-lost", "the latest amax is not kept as the last row",
        lambda: _rows(zero, history[2:], history[-1:]) if len(history) > 1 else zero,
    )  # fmt: skip
    yield "history-cleared", "the history is all 0", lambda: torch.zeros_like(history)
    yield _with_field(history, scale, recipe, "update", 0)


def deviating_scales(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe) -> Iterator[Updated]:
    """Scales (N,), float32, after a step that is wrong in a known way."""
    delayed, most = _delayed(recipe), recipe.element.max
    latest, known = history[0], torch.where(history.isnan(), 0.0, history)
    amax = known.amax(0) if delayed.algorithm == "max" else latest
    counts = amax.isfinite() & (amax > 0)
    right = update_scale(history, scale, recipe)[1]

    def of(numbers: torch.Tensor, largest: float = most * 2.0**-delayed.margin) -> torch.Tensor:
        updates = numbers.isfinite() & (numbers > 0)
        if delayed.update == "bulk":
            updates &= latest != 0
        return torch.where(updates, _limited(divide(largest, numbers)), scale)

    yield "scale-not-updated", "scales stay as they are", lambda: scale
    yield _with_field(history, scale, recipe, "algorithm", 1)
    yield _with_field(history, scale, recipe, "update", 1)
    yield "margin-ignored", f"the margin {delayed.margin} is ignored", lambda: of(amax, most)
    yield (
        "margin-inverted",
        f"the margin {delayed.margin} is multiplied by",
        lambda: of(amax, most * 2.0**delayed.margin),
    )
    yield "scale-inverted", "scales are decode scales", lambda: divide(1.0, right)
    yield "amax-without-latest", "the latest amax does not count", lambda: of(_largest(known[1:], latest))
    yield "amax-without-oldest", "the oldest amax does not count", lambda: of(_largest(known[:-1], latest))
    for words, skipped in _PARTS:
        if delayed.algorithm == "max" and skipped.start < len(known):
            yield (
                "history-partial", f"{words} of the history does not count",
                lambda skipped=skipped: of(_without(known, skipped).amax(0)),  # type: ignore[misc]
            )  # fmt: skip
    yield "amax-of-all-tensors", "every tensor takes the amax of all", lambda: of(amax.amax().expand_as(amax))
    yield (
        "nan-spread", "a NaN in the history leaves the scale as it is",
        lambda: of(history.amax(0) if delayed.algorithm == "max" else latest),
    )  # fmt: skip
    other = E4M3 if recipe.element is E5M2 else E5M2
    yield (
        "max-of-other-format", f"the largest number is that of {other.name}",
        lambda: of(amax, other.max * 2.0**-delayed.margin),
    )  # fmt: skip
    yield (
        "scale-order:max*(1/amax)", "scales are max·(1/amax)",
        lambda: torch.where(counts, _limited(divide(1.0, amax) * (most * 2.0**-delayed.margin)), scale),
    )  # fmt: skip
    yield (
        "scale-not-clamped", "a scale that overflows is infinite",
        lambda: torch.where(right == FLT_MAX, torch.inf, right),
    )  # fmt: skip
    yield (
        "zero-amax-updates", "an amax of 0 makes a scale too",
        lambda: torch.where(amax == 0, FLT_MAX, right),
    )  # fmt: skip
    yield "zero-amax-updates", "an amax of 0 makes the scale 1", lambda: torch.where(amax == 0, 1.0, right)
    yield "infinite-amax-updates", "an infinite amax makes the scale 0", lambda: torch.where(amax.isinf(), 0.0, right)
    yield "infinite-amax-updates", "an infinite amax makes the scale 1", lambda: torch.where(amax.isinf(), 1.0, right)


def _without(history: torch.Tensor, skipped: slice) -> torch.Tensor:
    cut = history.clone()
    cut[skipped] = 0
    return cut


def _rows(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _largest(rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return rows.amax(0) if len(rows) else torch.zeros_like(otherwise)


def _limited(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.isinf(), FLT_MAX, scale)


def _delayed(recipe: Recipe) -> Delayed:
    assert recipe.delayed is not None
    return recipe.delayed


def _with_field(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe, name: str, which: int) -> Updated:
    """The update with the other choice of a field of `Recipe.delayed`: its history (0) or its scales (1)."""
    choices = {"update": ("single", "bulk"), "algorithm": ("max", "most-recent")}[name]
    delayed = _delayed(recipe)
    other = next(choice for choice in choices if choice != getattr(delayed, name))
    changed = replace(recipe, delayed=replace(delayed, **{name: other}))  # type: ignore[arg-type]
    return f"{name}:{other}", f"the {name} is {other}", lambda: update_scale(history, scale, changed)[which]
