"""Autocast: the training recipe of the modules in a block of code, of this thread alone; and recomputation under it.

Both rooms use it: it holds no arithmetic. Backward passes may run in other threads, so a module asks for the recipe in
its forward and keeps it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowgauge.spec.training import TrainingRecipe, training_recipe

__all__ = ["at_exit", "autocast", "checkpoint", "current", "recomputing", "remember"]

T = TypeVar("T")


class _Region:
    """One `checkpoint`: what its first forward remembered, in order; while it is entered again, the next of it.

    Entered as a context of its second forward, as often as torch repeats that one.
    """

    def __init__(self, recipe: TrainingRecipe | None) -> None:
        self.recipe = recipe
        self.remembered: list[Any] = []
        self.next: int | None = None

    def __enter__(self) -> None:
        self.next = 0
        self._before = (_state.recipes, _state.regions, _state.callbacks)
        # The first forward's surroundings, not those of the backward pass in which this one runs.
        _state.recipes, _state.regions, _state.callbacks = [self.recipe], [self], {}

    def __exit__(self, *exception: object) -> None:
        self.next = None
        _state.recipes, _state.regions, _state.callbacks = self._before


class _State(threading.local):
    def __init__(self) -> None:
        self.recipes: list[TrainingRecipe | None] = []
        """Of the autocasts that are active, the innermost last."""
        self.regions: list[_Region] = []
        self.callbacks: dict[Callable[[], None], None] = {}
        """In order of registration, each once."""


_state = _State()


@contextmanager
def autocast(recipe: TrainingRecipe | str | None) -> Iterator[None]:
    """Modules in this block, in this thread, quantize by `recipe`, or one's name; by None they do not quantize.

    The recipe from before comes back at the end, whatever ends the block. Raises ValueError for an unknown name,
    TypeError for what is no training recipe.
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
    """The recipe of the innermost autocast of this thread; None is high precision, as it is outside all of them."""
    return _state.recipes[-1] if _state.recipes else None


def at_exit(callback: Callable[[], None]) -> None:
    """Calls `callback` when the outermost autocast that is now active ends, unless an exception ends it.

    Callbacks are called in the order of their first registration, each once, however often it was registered. Raises
    RuntimeError outside all autocasts.
    """
    if not _state.recipes:
        raise RuntimeError("at_exit has no end of an autocast to wait for: no autocast is active in this thread")
    _state.callbacks.setdefault(callback)


def recomputing() -> bool:
    """Whether this is the second forward of a `checkpoint`."""
    return any(region.next is not None for region in _state.regions)


def remember(value: T) -> T:
    """`value`; in the second forward of a `checkpoint` what its first one remembered at this point.

    So a scale that has moved since is what it was. Outside a checkpoint nothing is kept.
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
    """`function(*tensors)`, whose intermediate tensors are not kept but computed again when a backward needs them.

    The second forward runs under the recipe of the first, whatever autocast is active then; `recomputing()` is True in
    it, and `remember` gives what it was in the first.
    """
    region = _Region(current())
    return torch_checkpoint(function, *tensors, use_reentrant=False, context_fn=lambda: (_remembering(region), region))
