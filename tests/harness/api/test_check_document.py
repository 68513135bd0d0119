"""The document of `narrowgauge check`: verdicts, failures and the published schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.api.check_document.document import CHEATS, check_document, with_refusals
from narrowgauge.harness.cases.operations import case_from_id
from tests.harness.runs import record
from tests.paths import ROOT

SCHEMA = json.loads((ROOT / "harness" / "api" / "check_document" / "schema.json").read_text(encoding="utf-8"))
SUBJECT = {
    "function": "k.py:f", "operation": "quantize", "recipes": ["nvfp4"], "device": "cpu", "seed": 0,
    "untrusted": False, "secret": None,
}  # fmt: skip
_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def problems(value: Any, schema: Any, place: str = "$") -> list[str]:
    """Where a value differs from a schema: the keywords that schema.json has."""
    unknown = schema.keys() - {
        "$schema", "title", "description", "type", "const", "enum", "minimum", "properties", "required", "items",
        "additionalProperties", "anyOf",
    }  # fmt: skip
    assert not unknown, unknown
    if "anyOf" in schema:
        every = [problems(value, each, place) for each in schema["anyOf"]]
        return [] if [] in every else every[-1]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{place} is {value!r}, not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} is {value!r}, none of {schema['enum']}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = [isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds]
    if kinds and not any(known):
        return [*found, f"{place} is {value!r}, not {kinds}"]
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place} is {value}")
    for name in schema.get("required", []):
        found += [] if name in value else [f"{place} lacks {name}"]
    properties = schema.get("properties", {})
    if isinstance(value, dict):
        for name, each in value.items():
            if name in properties:
                found += problems(each, properties[name], f"{place}.{name}")
            elif schema.get("additionalProperties") is False:
                found.append(f"{place} has {name}")
    for number, each in enumerate(value if isinstance(value, list) and "items" in schema else ()):
        found += problems(each, schema["items"], f"{place}[{number}]")
    return found


def explained(cause: str, *, exact: bool = True) -> dict[str, Any]:
    return {"cause": cause, "sentence": f"about {cause}", "stage": "codes", "exact": exact}


def failed(*explanations: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record of a wrong case."""
    given = {"verdict": "fail", "stage": "codes", "message": "codes: 9 of 100 differ", "mismatches": 9} | changes
    return record("ties", explanations=list(explanations), **given)


def unjudged(verdict: str, message: str) -> dict[str, Any]:
    return record("ties", verdict=verdict, message=message, stages=[], compared=0)


GOOD = record("normal")
EMPTY = record("normal", stages=[], compared=0)
VERDICTS: dict[str, tuple[list[dict[str, Any]], int, str]] = {
    # name: records, untried cases, verdict
    "all pass": ([GOOD], 0, "pass"),
    "some unsupported": ([GOOD, unjudged("unsupported", "no tails")], 0, "pass"),
    "untried": ([GOOD], 1, "incomplete"),
    "nothing tried": ([], 1, "incomplete"),
    "all unsupported": ([unjudged("unsupported", "no")], 0, "unsupported"),
    "nothing compared": ([EMPTY], 0, "unsupported"),
    "a wrong case": ([GOOD, failed()], 0, "fail"),
    "a wrong case and untried ones": ([GOOD, failed()], 3, "fail"),
    "a wrong case and a crash": ([failed(), unjudged("crash", "died")], 0, "fail"),
    "a crash": ([GOOD, unjudged("crash", "died")], 0, "crash"),
    "a crash and an error": ([unjudged("error", "raised"), unjudged("crash", "died")], 0, "crash"),
    "a timeout": ([GOOD, unjudged("timeout", "60 s")], 0, "timeout"),
    "a timeout and an error": ([unjudged("timeout", "60 s"), unjudged("error", "raised")], 0, "timeout"),
    "an error": ([GOOD, unjudged("error", "raised")], 0, "error"),
    "an error and untried ones": ([unjudged("error", "raised")], 2, "error"),
}
CERTAINTIES: dict[str, tuple[list[dict[str, Any]], str, list[str], int]] = {
    # name: explanations, certainty, causes, places
    "none": ([], "unknown", [], 0),
    "no diagnosis": ([explained("no-diagnosis", exact=False)], "unknown", [], 0),
    "one": ([explained("ties-away")], "exact", ["ties-away"], 0),
    "two": ([explained("ties-away"), explained("rounded-up")], "one of", ["ties-away", "rounded-up"], 0),
    "possible": ([explained("ties-away", exact=False)], "possible", ["ties-away"], 0),
    "exact and possible": ([explained("a"), explained("b", exact=False)], "exact", ["a"], 0),
    "a place": ([explained("place:last-row", exact=False)], "unknown", [], 1),
    "a cause and a place": ([explained("ties-away"), explained("place:row-1", exact=False)], "exact", ["ties-away"], 1),
}


def document(records: list[dict[str, Any]], untried: int = 0, **options: Any) -> dict[str, Any]:
    case = case_from_id("quantize/nvfp4/64x128/bf16/normal")
    assert case is not None
    cases = [case] * (len(records) + untried)
    return check_document(SUBJECT, cases, records, seconds=1.5, **options)


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_of_a_check(name: str) -> None:
    records, untried, verdict = VERDICTS[name]
    found = document(records, untried)
    assert found["verdict"] == verdict
    assert found["cases"]["selected"] - found["cases"]["tried"] == untried
    assert not problems(json.loads(json.dumps(found)), SCHEMA)


@pytest.mark.parametrize("name", CERTAINTIES)
def test_how_certain_a_cause_is(name: str) -> None:
    explanations, certainty, causes, places = CERTAINTIES[name]
    (found,) = document([failed(*explanations)])["failures"]
    assert (found["certainty"], [cause["name"] for cause in found["causes"]]) == (certainty, causes)
    assert len(found["places"]) == places
    assert found["reproduce"].startswith("narrowgauge show quantize/nvfp4/64x128/bf16/ties")


@pytest.mark.parametrize("cause", CHEATS)
def test_results_that_do_not_follow_from_inputs_are_listed(cause: str) -> None:
    found = document([failed(explained("ties-away"), explained(cause)), failed(explained(cause))])
    assert [entry["cause"] for entry in found["cheats"]] == [cause]
    assert not problems(found, SCHEMA)


def test_refused_cases_are_unsupported() -> None:
    raised, optional = unjudged("error", "quantize raised ValueError: no"), unjudged("error", "gave no tensor")
    case = raised["case"]
    assert with_refusals([raised], {case: True}, "quantize")[0]["verdict"] == "unsupported"
    assert with_refusals([raised], {case: False}, "quantize")[0]["verdict"] == "error"
    assert with_refusals([optional], {case: True}, "quantize")[0]["verdict"] == "error"
    found = document(with_refusals([raised], {case: True}, "quantize"))
    assert found["unsupported"] == [{"reason": "quantize raised ValueError: no", "cases": 1}]


def test_coverage_names_what_is_missing() -> None:
    found = document([], 2)
    assert found["coverage"]["inputs"] == {"compared": [], "missing": ["normal"]}
    found = document([GOOD])
    assert found["coverage"]["inputs"] == {"compared": ["normal"], "missing": []}
    assert found["coverage"]["compared"] == 90


def test_the_schema_finds_wrong_documents() -> None:
    found = document([failed(explained("ties-away"))])
    strength = {"known": 3, "shown": 2, "hidden": ["a"], "cases": ["x"]}
    assert not problems(document([GOOD], strength=strength), SCHEMA)
    for name, wrong in {
        "schema": 2, "verdict": "ok", "seconds": "1", "cases": {}, "cheats": [{}], "strength": {"known": 1},
    }.items():  # fmt: skip
        assert problems(found | {name: wrong}, SCHEMA), name
    assert problems({name: value for name, value in found.items() if name != "coverage"}, SCHEMA)
    assert problems(found | {"more": 1}, SCHEMA)


def test_the_page_names_every_field() -> None:
    page = Path(ROOT / "docs" / "schema.md").read_text(encoding="utf-8").partition("## Result of check")[2]
    page = page.partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", page))
    fields = set(SCHEMA["properties"])
    for each in SCHEMA["properties"].values():
        for part in (each, each.get("items", {}), *each.get("anyOf", [])):
            fields |= part.get("properties", {}).keys()
    assert fields <= named, fields - named
