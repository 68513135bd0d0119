"""Causes that explained earlier cases of a backend, and how often searches found none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

RECENT_CAUSES = 8
"""Causes that a search tries first. After `SEARCHES` full searches it tries only these causes."""
SEARCHES = 6
"""Full searches of a stage of a recipe that find nothing, and as many full searches that find a cause."""
Name = tuple[str, str, int]
"""Cause and sentence of a deviation, and number among the deviations with the same cause and sentence."""


@dataclass
class SearchHistory:
    """Causes that explained earlier cases of a backend, and number of its searches."""

    recent_causes: list[str] = field(default_factory=list)
    searches: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """Number of full searches, by recipe, stage, and whether the search found a cause."""
    earlier_amaxes: frozenset[float] = frozenset()
    """Correct amaxes that a kernel may have kept from calls before those of the last case: of its first call, of its
    first call with a tensor of the same shape, of the case before, and the largest of all."""
    amaxes_of_case: frozenset[float] = frozenset()
    """Correct amaxes of all tensors of this case."""
    left_out: list[tuple[Any, tuple[int, int]]] = field(default_factory=list)
    """Elements above wrong amaxes of earlier cases: their numbers in memory, int64 (n,), and the shape."""
    signs: dict[bytes, tuple[bool, int, int]] = field(default_factory=dict)
    """By the bytes of wrong amaxes of earlier cases: whether each is the largest element of its tensor, or 0 if all
    elements are negative; the number of elements with a larger magnitude, and of the negative ones among them."""
    refuted_by: dict[tuple[tuple[str, ...], Name], str] = field(default_factory=dict)
    """Families of further inputs that refuted a deviation, by recipe, dtype and matrix, and by the deviation. Empty if
    all families confirmed it."""
    confirmable: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Causes of earlier cases that `Outcome.confirms` can try without a search, by contract and name, and whether they
    are exact."""
    ambiguous: dict[str, dict[str, bool]] = field(default_factory=dict)
    """The causes, by contract, that one search found together and that no later case refuted, and whether each is
    exact but for the others."""
    separated: dict[tuple[str | Name, ...], list[Name]] = field(default_factory=dict)
    """Deviations that special inputs left, by dtype and deviations."""
    confirmed: Counter[str] = field(default_factory=Counter)
    """Cases in which further inputs confirmed a cause of a product or a formula."""
    conditions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of searches for conditions, by operation, recipe and stage."""
    _amaxes: list[float] = field(default_factory=list)
    _of_shapes: dict[tuple[int, ...], float] = field(default_factory=dict)

    def begin_case(self, amaxes: Sequence[float], shapes: Sequence[tuple[int, ...]] = ()) -> None:
        """Begin a case whose tensors have these correct amaxes, and shapes, if they are known: the amaxes of the case
        before become earlier ones."""
        kept = self._amaxes
        of_shapes = [self._of_shapes.setdefault(shape, amax) for shape, amax in zip(shapes, amaxes, strict=False)]
        self.earlier_amaxes, self.amaxes_of_case = frozenset([*kept, *of_shapes]), frozenset(amaxes)
        self._amaxes = [*kept[:1], *([max(kept)] if kept else []), *amaxes] if amaxes else kept

    def remember(self, causes: Sequence[str]) -> None:
        """Put the causes that explained a case, best first, before the recent causes."""
        self.recent_causes = list(dict.fromkeys([*causes, *self.recent_causes]))[:RECENT_CAUSES]


_HISTORIES: WeakKeyDictionary[object, SearchHistory] = WeakKeyDictionary()


def history_of(backend: object) -> SearchHistory:
    """The history of a backend in this process. Cases of another backend do not affect its diagnosis."""
    return _HISTORIES.setdefault(backend, SearchHistory())
