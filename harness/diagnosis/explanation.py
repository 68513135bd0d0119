"""One explanation of a wrong result, and the explanations that the diagnosis of a backend has tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True)
class Explanation:
    """What would make a right kernel give what this one gave."""

    cause: str
    """A name in lower case with hyphens, what varies after a colon: `ties-away`, `place:last-row`."""
    sentence: str
    """The same for people: `elements: ties round away from zero`."""
    stage: str
    """The first wrong stage that it explains, as the record names it: `x.codes`."""
    exact: bool
    """Whether it gives the kernel's very bytes; else it says where the wrong elements are, or what they are."""

    def to_dict(self) -> dict[str, Any]:
        """As a record keeps it."""
        return asdict(self)


RECENT = 8
"""Causes that are tried first, and alone once searches are used up: the last that explained something."""
SEARCHES = 6
"""Full searches of one stage of one recipe that may find nothing, and as many that may find something."""


@dataclass
class Tried:
    """What explained earlier cases, and how much was searched."""

    recent: list[str] = field(default_factory=list)
    searches: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """Full searches by recipe and stage, and by whether they found something."""
    work: int = 0
    """Elements times deviations that were looked at."""

    def found(self, causes: Sequence[str]) -> None:
        """Keep what explained a case, the best foremost."""
        self.recent = list(dict.fromkeys([*causes, *self.recent]))[:RECENT]


_TRIED: WeakKeyDictionary[object, Tried] = WeakKeyDictionary()


def tried_of(backend: object) -> Tried:
    """What was tried for this backend in this process: what another one's cases showed has no part in its diagnosis."""
    return _TRIED.setdefault(backend, Tried())
