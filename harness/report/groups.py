"""Groups of records that fail in the same way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from narrowgauge.harness.diagnosis.assign_causes import assign_causes
from narrowgauge.harness.records.record import outcome

SEVERITY = ("fail", "crash", "error", "timeout", "unexpected", "unsupported", "known", "pass")
"""Outcomes, worst first: a wrong result is worse than a missing result."""
SHOWN = 50
"""Largest number of groups in a summary or on a page, which count the omitted groups."""


@dataclass(frozen=True)
class Group:
    """Records that fail in the same way: with the same exact cause, or with the same outcome, operation, recipe, stage
    and rule.

    A field is empty if its value differs between the records. The worst record is first.
    """

    verdict: str
    """Outcome (`harness.records.record.outcome`) of all records."""
    operation: str
    recipe: str
    stage: str
    rule: str
    records: list[dict[str, Any]]
    explanation: dict[str, Any] | None = None
    """Explanation of all records."""

    @property
    def mismatches(self) -> int:
        """Wrong elements of all records."""
        return sum(record["mismatches"] for record in self.records)

    @property
    def title(self) -> str:
        """Common fields of the records: `quantize nvfp4, codes (exact)`."""
        stage = self.stage + (f" ({self.rule})" if self.rule else "")
        shared = " ".join(filter(None, (self.operation, self.recipe)))
        return ", ".join(filter(None, (shared, stage))) or "several operations"


def group(records: Iterable[dict[str, Any]]) -> list[Group]:
    """Groups of the records that did not pass, and of unexpected passes: sorted by severity, number of cases, wrong
    elements.

    Records with the same exact deviation form a group, even with different recipes. Other records form a group if
    operation, recipe, stage and cause are equal. Known failures form separate groups.
    """
    failed: list[dict[str, Any]] = []
    known_failures: list[dict[str, Any]] = []
    for record in records:
        if (record_outcome := outcome(record)) != "pass":
            (known_failures if record_outcome == "known" else failed).append(record)
    groups = [*_alike(failed), *_alike(known_failures)]
    return sorted(groups, key=lambda g: (SEVERITY.index(g.verdict), -len(g.records), -g.mismatches, g.title))


def _alike(failed: list[dict[str, Any]]) -> list[Group]:
    groups = []
    explanation_of: dict[int, dict[str, Any]] = {}
    exactly_explained: set[int] = set()
    for explanation, members in assign_causes(failed):
        explanation_of |= {id(record): explanation for record in members}
        if any(entry["exact"] and entry["cause"] == explanation["cause"] for entry in members[0]["explanations"]):
            exactly_explained |= {id(record) for record in members}
            groups.append(Group(*_shared(members), sorted(members, key=_badness), explanation))
    by_key: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in failed:
        if id(record) not in exactly_explained:
            cause = explanation_of[id(record)]["cause"] if id(record) in explanation_of else ""
            by_key[*_key(record), cause].append(record)
    for members in by_key.values():
        groups.append(Group(*_key(members[0]), sorted(members, key=_badness), explanation_of.get(id(members[0]))))
    return groups


def _key(record: dict[str, Any]) -> tuple[str, str, str, str, str]:
    stage = record["stage"]
    return outcome(record), record["operation"], record["recipe"], stage, _rule(record, stage)


def _shared(records: list[dict[str, Any]]) -> tuple[str, str, str, str, str]:
    """Fields shared by all records, empty if they differ."""
    keys = [_key(record) for record in records]
    verdict, operation, recipe, stage, rule = (
        values[0] if len(set(values)) == 1 else "" for values in zip(*keys, strict=True)
    )
    return verdict or outcome(records[0]), operation, recipe, stage, rule


def _rule(record: dict[str, Any], stage: str) -> str:
    entries = [*record["findings"], *record["stages"]]
    return next((entry["rule"] for entry in entries if entry.get("stage") == stage and entry.get("rule")), "")


def _badness(record: dict[str, Any]) -> tuple[int, int, str]:
    return -record["mismatches"], -(record["max_ulp"] or 0), record["case"]
