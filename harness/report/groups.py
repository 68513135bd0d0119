"""Groups: records that did not pass, together where they fail in the same way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from narrowgauge.harness.diagnosis.causes import assign
from narrowgauge.harness.records.record import outcome

SEVERITY = ("fail", "crash", "error", "timeout", "unexpected", "unsupported", "known", "pass")
"""Outcomes, worst first: a wrong result before one that is missing."""
SHOWN = 50
"""Groups that a summary or a page shows; it says how many it left out."""


@dataclass(frozen=True)
class Group:
    """Records that fail in the same way: of one cause, else of one outcome, operation, recipe, stage and rule.

    What they do not share is empty. The worst comes first.
    """

    verdict: str
    """The outcome (`harness.records.record.outcome`) of all."""
    operation: str
    recipe: str
    stage: str
    rule: str
    records: list[dict[str, Any]]
    explanation: dict[str, Any] | None = None
    """What explains them all."""

    @property
    def mismatches(self) -> int:
        """Wrong elements of all records."""
        return sum(record["mismatches"] for record in self.records)

    @property
    def title(self) -> str:
        """What the records share: `quantize nvfp4, codes (exact)`."""
        where = self.stage + (f" ({self.rule})" if self.rule else "")
        shared = " ".join(filter(None, (self.operation, self.recipe)))
        return ", ".join(filter(None, (shared, where))) or "several operations"


def group(records: Iterable[dict[str, Any]]) -> list[Group]:
    """Groups of the records that did not pass, or against the ledger: by severity, most cases, most wrong elements.

    A deviation that gives the very bytes of records makes them one group, whatever their recipes. Others are one group
    where operation, recipe and stage are the same, and what explains them, if anything does. What the ledger knows is
    apart from what it does not.
    """
    bad: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = []
    for record in records:
        if (what := outcome(record)) != "pass":
            (known if what == "known" else bad).append(record)
    groups = [*_alike(bad), *_alike(known)]
    return sorted(groups, key=lambda g: (SEVERITY.index(g.verdict), -len(g.records), -g.mismatches, g.title))


def _alike(bad: list[dict[str, Any]]) -> list[Group]:
    groups = []
    named: dict[int, dict[str, Any]] = {}
    together: set[int] = set()
    for explanation, members in assign(bad):
        named |= {id(record): explanation for record in members}
        if explanation["exact"]:
            together |= {id(record) for record in members}
            groups.append(Group(*_shared(members), sorted(members, key=_badness), explanation))
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in bad:
        if id(record) not in together:
            cause = named[id(record)]["cause"] if id(record) in named else ""
            found[*_key(record), cause].append(record)
    for members in found.values():
        groups.append(Group(*_key(members[0]), sorted(members, key=_badness), named.get(id(members[0]))))
    return groups


def _key(record: dict[str, Any]) -> tuple[str, str, str, str, str]:
    stage = record["stage"]
    return outcome(record), record["operation"], record["recipe"], stage, _rule(record, stage)


def _shared(records: list[dict[str, Any]]) -> tuple[str, str, str, str, str]:
    """What all records have; nothing where they differ."""
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
