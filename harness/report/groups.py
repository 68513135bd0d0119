"""Groups: records that did not pass, together where they fail in the same way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SEVERITY = ("fail", "crash", "error", "timeout", "unsupported", "pass")
"""Verdicts, worst first: a wrong result before one that is missing."""
SHOWN = 50
"""Groups that a summary or a page shows; it says how many it left out."""


@dataclass(frozen=True)
class Group:
    """Records of one verdict, operation, recipe, stage and rule. The worst comes first."""

    verdict: str
    operation: str
    recipe: str
    stage: str
    rule: str
    records: list[dict[str, Any]]

    @property
    def mismatches(self) -> int:
        """Wrong elements of all records."""
        return sum(record["mismatches"] for record in self.records)

    @property
    def title(self) -> str:
        """What the records share: `quantize nvfp4, codes (exact)`."""
        where = self.stage + (f" ({self.rule})" if self.rule else "")
        return " ".join(filter(None, (self.operation, self.recipe))) + (f", {where}" if where else "")


def group(records: Iterable[dict[str, Any]]) -> list[Group]:
    """Groups of the records that did not pass: by severity, then most cases, then most wrong elements."""
    found: dict[tuple[str, str, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["verdict"] != "pass":
            stage = record["stage"]
            found[record["verdict"], record["operation"], record["recipe"], stage, _rule(record, stage)].append(record)
    groups = [Group(*key, sorted(members, key=_badness)) for key, members in found.items()]
    return sorted(groups, key=lambda g: (SEVERITY.index(g.verdict), -len(g.records), -g.mismatches, g.title))


def _rule(record: dict[str, Any], stage: str) -> str:
    entries = [*record["findings"], *record["stages"]]
    return next((entry["rule"] for entry in entries if entry.get("stage") == stage and entry.get("rule")), "")


def _badness(record: dict[str, Any]) -> tuple[int, int, str]:
    return -record["mismatches"], -(record["max_ulp"] or 0), record["case"]
