"""Explanation of a wrong result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """A mistake that would make a correct kernel give the result of the wrong kernel."""

    cause: str
    """Name in lower case with hyphens. A variable part follows a colon: `ties-away`, `place:last-row`."""
    sentence: str
    """Sentence for people: `elements: ties round away from zero`."""
    stage: str
    """First wrong stage, by its name in the record: `x.codes`. The explanation is for this stage."""
    exact: bool
    """Whether the mistake gives the kernel's bytes. If not, the explanation names the place or the class of the wrong
    elements."""

    def to_dict(self) -> dict[str, Any]:
        """The explanation as an entry of the record's `explanations`."""
        return asdict(self)
