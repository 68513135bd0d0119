"""The result of `narrowgauge check` as one document for programs, by `schema.json` (docs/schema.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.diagnosis.cause_names import is_pattern
from narrowgauge.harness.diagnosis.explain_memory import ALIAS_CAUSES, SAME_RESULT
from narrowgauge.harness.diagnosis.gemm.wider_format import WIDER_FORMAT
from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.records.coverage import shape_classes
from narrowgauge.harness.records.record import elements_compared
from narrowgauge.harness.report.failure_view import reproduction
from narrowgauge.harness.report.groups import Group, group
from narrowgauge.spec import VERSION

SCHEMA = 1
"""Version of the document."""
CHEATS = (*ALIAS_CAUSES, SAME_RESULT.cause, WIDER_FORMAT.cause)
"""Causes of results without regard to the inputs: docs/untrusted.md#findings."""
_WORST = ("fail", "crash", "timeout", "error")
"""Verdicts of cases in order: the first verdict of any case is the verdict of the check."""
_LISTED = 20
"""Most failures and reasons in the document."""


def with_refusals(records: Iterable[dict[str, Any]], optional: Mapping[str, bool], method: str) -> list[dict[str, Any]]:
    """The records, with the verdict unsupported if the function raised an exception in a case that kernels may refuse.

    `optional`: by id, whether a kernel may refuse the case.
    """
    found = []
    for record in records:
        raised = record["verdict"] == "error" and record["message"].startswith(f"{method} raised ")
        refused = raised and optional[record["case"]]
        found.append(record | {"verdict": "unsupported"} if refused else record)
    return found


def check_document(
    subject: Mapping[str, Any],
    cases: Sequence[Case],
    records: Sequence[dict[str, Any]],
    *,
    seconds: float,
    strength: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a check, as `schema.json` describes it.

    subject: the field `subject`. cases: the selected cases. records: the records of the tried cases.
    seconds: the time of the check. strength: the field `strength`, or None.
    """
    counts = Counter(record["verdict"] for record in records)
    failed = [record for record in records if record["verdict"] in _WORST]
    compared = sum(map(elements_compared, records))
    reasons = Counter(record["message"] for record in records if record["verdict"] == "unsupported")
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "subject": subject,
        "verdict": _verdict(counts, compared, complete=len(records) == len(cases)),
        "cases": {
            "selected": len(cases), "tried": len(records), "passed": counts["pass"], "failed": len(failed),
            "unsupported": counts["unsupported"],
        },
        "seconds": seconds,
        "failures": [_failure(entry) for entry in group(failed)[:_LISTED]],
        "cheats": _cheats(records),
        "coverage": {"compared": compared, **_coverage(cases, records)},
        "unsupported": [{"reason": reason, "cases": count} for reason, count in reasons.most_common(_LISTED)],
        "strength": strength,
    }  # fmt: skip
    found: dict[str, Any] = plain_value(document)
    return found


def _verdict(counts: Mapping[str, int], compared: int, *, complete: bool) -> str:
    """The verdict of all tried cases. With untried cases there is no pass: a slow kernel would profit."""
    worst = next((verdict for verdict in _WORST if counts.get(verdict)), None)
    if worst is not None:
        return worst
    if not complete:
        return "incomplete"
    return "pass" if counts.get("pass") and compared else "unsupported"


def _failure(entry: Group) -> dict[str, Any]:
    """A group of cases that fail in the same way."""
    first = next((r for r in entry.records if entry.explanation in r["explanations"]), entry.records[0])
    explained = [e for e in first["explanations"] if not is_pattern(e["cause"]) and e["cause"] != "no-diagnosis"]
    exact = [e for e in explained if e["exact"]]
    certainty = "exact" if len(exact) == 1 else "one of" if exact else "possible" if explained else "unknown"
    findings = first["findings"]
    return {
        "verdict": first["verdict"],
        "stage": first["stage"],
        "sentence": first["message"],
        "certainty": certainty,
        "causes": [{"name": e["cause"], "sentence": e["sentence"]} for e in exact or explained],
        "places": [e["sentence"] for e in first["explanations"] if is_pattern(e["cause"])],
        "elements": findings[0]["elements"] if findings else [],
        "case": first["case"],
        "cases": len(entry.records),
        "reproduce": reproduction(first),
    }


def _cheats(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings about cheating kernels by cause, with the first case of each cause."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        for entry in record["explanations"]:
            if entry["cause"] in CHEATS:
                row = {"cause": entry["cause"], "sentence": entry["sentence"], "case": record["case"]}
                found.setdefault(entry["cause"], row)
    return list(found.values())


def _coverage(cases: Sequence[Case], records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Input families, dtypes and classes of shapes: values of cases with compared elements, and missing values."""
    compared = {record["case"] for record in records if elements_compared(record)}
    values: dict[str, Callable[[Case], Iterable[str]]] = {
        "inputs": lambda case: [case.inputs],
        "shapes": shape_classes,
        "dtypes": lambda case: [case.dtype_label] if case.dtype_label else [],
    }
    found = {}
    for name, of in values.items():
        every = dict.fromkeys(value for case in cases for value in of(case))
        done = {value for case in cases if case.id in compared for value in of(case)}
        found[name] = {
            "compared": [value for value in every if value in done],
            "missing": [value for value in every if value not in done],
        }
    return found
