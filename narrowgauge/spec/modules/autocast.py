"""Autocast: the training recipe of the modules in a block of code, per thread; and recomputation by `checkpoint`.

Reference and native modules share it: it contains no arithmetic. A backward pass may run in a different thread, so a
module reads the recipe in its forward and stores it for the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe

__all__ = ["at_exit", "autocast", "checkpoint", "current", "recomputing", "remember"]

T = TypeVar("T")


class _Region:
    """A call of `checkpoint`: the values remembered by the first forward, replayed in order by the second forward.

    The second forward runs inside the region as a context manager, once for every repetition by torch.
    """

    def __init__(self, recipe: TrainingRecipe | None) -> None:
        self.recipe = recipe
        self.remembered: list[Any] = []
        self.next: int | None = None
        """Index of the next value to replay; None during the first forward."""

    def __enter__(self) -> None:
        self.next = 0
        self._before = (_state.recipes, _state.regions, _state.callbacks)
        # The state of the first forward replaces the state of the surrounding backward pass.
        _state.recipes, _state.regions, _state.callbacks = [self.recipe], [self], {}

    def __exit__(self, *exception: object) -> None:
        self.next = None
        _state.recipes, _state.regions, _state.callbacks = self._before


class _State(threading.local):
    def __init__(self) -> None:
        self.recipes: list[TrainingRecipe | None] = []
        """Recipes of the active autocasts, the innermost last."""
        self.regions: list[_Region] = []
        self.callbacks: dict[Callable[[], None], None] = {}
        """Callbacks as keys, in order of first registration."""


_state = _State()


@contextmanager
def autocast(recipe: TrainingRecipe | str | None) -> Iterator[None]:
    """Modules in this block and thread quantize by `recipe`, a training recipe or its name; with None, not at all.

    The previous recipe is restored at the end of the block, also after an exception. Raises ValueError for an unknown
    name, TypeError if `recipe` is no training recipe, name or None.
    """
    if isinstance(recipe, str):
        recipe = training_recipe(recipe)
    if not (recipe is None or isinstance(recipe, TrainingRecipe)):
        raise TypeError(f"autocast takes a training recipe, the name of one or None, not {type(recipe).__name__}")
    _state.recipes.append(recipe)
    ended = False
    try:
        yield
        ended = True
    finally:
        _state.recipes.pop()
        if not _state.recipes:
            callbacks, _state.callbacks = _state.callbacks, {}
    if ended and not _state.recipes:
        for callback in callbacks:
            callback()


def current() -> TrainingRecipe | None:
    """The recipe of the innermost autocast of this thread; None (high precision) outside all autocasts."""
    return _state.recipes[-1] if _state.recipes else None


def at_exit(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the outermost active autocast, unless the autocast ends by an exception.

    Callbacks run in the order of their first registration, once, even if registered several times. Raises RuntimeError
    outside all autocasts.
    """
    if not _state.recipes:
        raise RuntimeError("at_exit has no end of an autocast to wait for: no autocast is active in this thread")
    _state.callbacks.setdefault(callback)


def recomputing() -> bool:
    """Whether this is the second forward of a `checkpoint`."""
    return any(region.next is not None for region in _state.regions)


def remember(value: T) -> T:
    """`value`, or in the second forward of a `checkpoint` the value that the first forward passed at this point.

    Both forwards then use the same scales, even if a scale was updated between them. Outside a checkpoint no value is
    stored.
    """
    for region in _state.regions:
        if region.next is None:
            region.remembered.append(value)
        else:
            value = region.remembered[region.next]
            region.next += 1
    return value


@contextmanager
def _remembering(region: _Region) -> Iterator[None]:
    _state.regions.append(region)
    try:
        yield
    finally:
        _state.regions.pop()


def checkpoint(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """`function(*tensors)` without stored intermediate tensors: the backward computes them by a second forward.

    The second forward runs under the recipe of the first forward, even if a different autocast is active. During the
    second forward `recomputing()` is True, and `remember` replays the values of the first forward.
    """
    region = _Region(current())
    return torch_checkpoint(function, *tensors, use_reentrant=False, context_fn=lambda: (_remembering(region), region))
