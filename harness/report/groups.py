"""Groups of records that fail in the same way, and the dimensions that records have in common."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.harness.diagnosis.assign_causes import SO_IN, assign_causes
from narrowgauge.harness.diagnosis.cause_names import is_pattern
from narrowgauge.harness.diagnosis.explanation import gives_every_byte
from narrowgauge.harness.operations.stages.possible_cause import GIVES_EVERY_BYTE
from narrowgauge.harness.records.record import outcome
from narrowgauge.harness.report.tables import recipe_family
from narrowgauge.harness.report.text import OF_EARLIER_CASES, number, plural, sentence

SEVERITY = ("fail", "crash", "error", "timeout", "unexpected", "unsupported", "known", "pass")
"""Outcomes, worst first: a wrong result is worse than a missing result."""
SHOWN = 50
"""Largest number of groups in a summary or on a page, which count the omitted groups."""
_LISTED = 3
"""Largest number of values of a dimension that are named. More values are counted."""
_LONGEST = 120
"""Largest length of a message in a title."""
_SHAPE = re.compile(r"([(\[])[\d, ]*\d[, ]*([)\]])|\b\d+(?:x\d+)+\b|\b0x[0-9a-fA-F]+\b")
"""Shapes and addresses in the message of an exception. Messages that differ in them are equal for a group."""


@dataclass(frozen=True)
class Group:
    """Records that fail in the same way (`group`). The worst record is first."""

    verdict: str
    """Outcome (`harness.records.record.outcome`) of all records."""
    records: list[dict[str, Any]]
    explanation: dict[str, Any] | None = None
    """Explanation of all records."""

    @property
    def mismatches(self) -> int:
        """Wrong elements of all records."""
        return sum(record["mismatches"] for record in self.records)

    @property
    def failure(self) -> str:
        """The first wrong stage and the cause: `codes wrong, explained exactly by elements: ties round away from zero`.
        For records without a result the verdict and the message."""
        if self.verdict == "unexpected":
            return "passed though known to fail"
        stages = _values(self.records, "stage", "stages")
        if not _is_judged(self.records[0]):
            message = textwrap.shorten(_SHAPE.sub(_ellipsis, sentence(self.records[0])), _LONGEST, placeholder=" ...")
            return f"{self.verdict}: {message}" if message else self.verdict
        known = "known failure: " if self.verdict == "known" else ""
        return f"{known}{stages} wrong, {self._cause}"

    @property
    def _cause(self) -> str:
        if self.explanation is None or self.explanation["cause"] == "no-diagnosis":
            return "no cause known"
        cause, words = str(self.explanation["cause"]), str(self.explanation["sentence"])
        if is_pattern(cause):
            words = words.partition(" (")[0]  # its counts are of one record
        elif cause not in OF_EARLIER_CASES:
            exactly = bool(self.explanation["exact"])
            possible = words.partition("; explains ")[0].partition(GIVES_EVERY_BYTE)[0].partition(SO_IN)[0]
            words = f"explained exactly by {words}" if exactly else f"possible cause: {possible}"
        return textwrap.shorten(words, _LONGEST, placeholder=" ...")

    @property
    def title(self) -> str:
        """`failure`, the number of records, and their common dimensions: `…: 12 cases, quantize nvfp4 bf16`."""
        return f"{self.failure}: {', '.join(filter(None, (plural(len(self.records), 'case'), common(self.records))))}"


def common(records: Sequence[dict[str, Any]]) -> str:
    """Dimensions that records have in common: `gemm nvfp4 bf16, inputs ties` or `gemm, nvfp4 (12 recipes), bf16`.

    Up to three operations, recipes and dtypes are named, more are counted. Shape and inputs are named if all of several
    records have the same.
    """
    nouns = {"operation": "operations", "recipe": "recipes", "dtype": "dtypes"}
    parts = [part for name, noun in nouns.items() if (part := _values(records, name, noun))]
    shared = parts if any(" " in part for part in parts) else [" ".join(parts)]
    if len(records) > 1:
        for name in ("shape", "inputs"):
            values = {record[name] for record in records}
            shared += [f"{name} {value}" for value in values if value and len(values) == 1]
    return ", ".join(filter(None, shared))


def _values(records: Iterable[dict[str, Any]], name: str, plural_noun: str) -> str:
    values = sorted({str(record[name]) for record in records} - {""})
    if len(values) <= _LISTED:
        return " and ".join(values)
    families = {recipe_family(value) for value in values}
    count = f"{number(len(values))} {plural_noun}"
    return f"{families.pop()} ({count})" if name == "recipe" and len(families) == 1 else count


def group(records: Iterable[dict[str, Any]]) -> list[Group]:
    """Groups of the records that did not pass, and of unexpected passes: sorted by severity, number of cases, wrong
    elements.

    Records with the same exact deviation form a group, even with different recipes. Other records with a wrong stage
    form a group if operation, recipe, stage and cause are equal; records without a result if operation and message are
    equal. Known failures form separate groups.
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
        of_cause = [e for record in members for e in record["explanations"] if e["cause"] == explanation["cause"]]
        if any(map(gives_every_byte, of_cause)):
            exactly_explained |= {id(record) for record in members}
            groups.append(Group(outcome(members[0]), sorted(members, key=_badness), explanation))
    by_key: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in failed:
        if id(record) not in exactly_explained:
            cause = explanation_of[id(record)]["cause"] if id(record) in explanation_of else ""
            by_key[*_key(record), cause].append(record)
    for members in by_key.values():
        groups.append(Group(outcome(members[0]), sorted(members, key=_badness), explanation_of.get(id(members[0]))))
    return groups


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    if _is_judged(record):
        return outcome(record), record["operation"], record["recipe"], record["stage"]
    return outcome(record), record["operation"], _SHAPE.sub(_ellipsis, sentence(record))


def _is_judged(record: dict[str, Any]) -> bool:
    """Whether a wrong stage says how a record fails: a host can be lost, and a GPU can report an error, after it."""
    return bool(record["stage"]) and record["verdict"] == "fail"


def _ellipsis(match: re.Match[str]) -> str:
    return f"{match[1]}...{match[2]}" if match[1] else "..."


def _badness(record: dict[str, Any]) -> tuple[int, int, str]:
    return -record["mismatches"], -(record["max_ulp"] or 0), record["case"]
