"""Explanation of a wrong result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.possible_cause import FREE, GIVES_EVERY_BYTE

UNTRIED_RIVALS = f"{GIVES_EVERY_BYTE}the diagnosis stopped before all known deviations were tried"
"""End of the sentence of a deviation that would be exact if the limit of work had not ended its search."""

NO_DIAGNOSIS: Deviation[Any] = Deviation("no-diagnosis", "the diagnosis raised an exception: {}", "diagnosis")
"""In place of an explanation (`harness.running`)."""


SEPARATE = " separate this from a correct "
"""Part of the sentence about a deviation that gives the bytes, of which too few differ from those of a right kernel."""

NOT_PROVED = "; this case does not prove it"
"""End of the sentence of a hint: a deviation that fits a case whose wrong elements are no reason to name it. It counts
if another case proves it."""


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

    @classmethod
    def of(cls, row: Deviation[Any], stage: str) -> Explanation:
        """The explanation of a wrong stage by a deviation."""
        return cls(row.cause, row.sentence, stage, row.exact)

    def with_untried_rivals(self) -> Explanation:
        """The explanation after a search that reached its limit: not exact, since other deviations may fit too."""
        return replace(self, sentence=self.sentence + UNTRIED_RIVALS, exact=False) if self.exact else self

    def to_dict(self) -> dict[str, Any]:
        """The explanation as an entry of the record's `explanations`."""
        return asdict(self)


def is_weak(entry: dict[str, Any]) -> bool:
    """Whether the deviation of an entry gives the bytes, of which too few differ from those of a right kernel."""
    return SEPARATE in str(entry["sentence"]) or is_hint(entry)


def is_hint(entry: dict[str, Any]) -> bool:
    """Whether the entry counts only if another case proves its cause."""
    return str(entry["sentence"]).endswith(NOT_PROVED)


def is_free(entry: dict[str, Any]) -> bool:
    """Whether the cause of an entry accepts almost any bytes of its case."""
    return str(entry["sentence"]).endswith(FREE)


def gives_every_byte(entry: dict[str, Any]) -> bool:
    """Whether the deviation of an entry gives the kernel's bytes, whether or not all other deviations were tried."""
    return bool(entry["exact"]) or GIVES_EVERY_BYTE in str(entry["sentence"])
