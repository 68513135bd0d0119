"""One explanation of a wrong result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
