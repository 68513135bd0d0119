"""A line of a journal has the same value by msgspec as by json, and the same text."""

import json
import math

import pytest

from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.records.json_line import parse_line, parse_record, record_json
from tests.harness.reach import many_records

RECORD = next(iter(many_records(1)))
VALUES = {
    "record": RECORD,
    "infinite": {**RECORD, "budget_max": math.inf},
    "findings": list(many_records(2))[1],
    "accuracy": {**RECORD, "sqnr_db": None, "accuracy": [{"tensor": "y", "sqnr_db": math.inf, "cosine": 1.0}]},
    "colon": {**RECORD, "message": ": Infinity", "stage": ':"sqnr_db": Infinity, "sweep": '},
    "command": {**RECORD, "message": "::error::"},
    "escape": {**RECORD, "message": "\x1b[31m"},
    "long": {**RECORD, "message": "m" * (1 << 17)},
    "not ASCII": {**RECORD, "message": "≥ 1"},
    "unknown column": {**RECORD, "more": 1},
    "unknown key": {**RECORD, "stages": [{**RECORD["stages"][0], "more": {"a": 1}}]},
    "large": {**RECORD, "compared": 1 << 80},
    "nested": {"": [[{"a": [{"b": 1}, 2]}]]},
    "no object": [1, "a"],
}
QUICK = ("record", "findings")
"""Records that msgspec reads."""


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_line_has_the_value_of_json(name: str, ascii_only: bool) -> None:
    line = json.dumps(VALUES[name], ensure_ascii=ascii_only).encode() + b"\n"
    expected = repr(plain_value(json.loads(line)))
    assert repr(parse_line(line)) == expected
    assert repr(parse_record(line) or parse_line(line)) == expected
    assert (parse_record(line) is not None) == (name in QUICK)


@pytest.mark.parametrize("name", sorted({*VALUES} - {"nested", "no object"}))
def test_text_of_a_record_is_that_of_json(name: str) -> None:
    stages = [*RECORD["stages"], {"stage": '≥ "\\', "compared": 1 << 70}]
    for record in (VALUES[name], VALUES[name] | {"stages": stages}, VALUES[name] | {"stages": []}):
        assert record_json(record) == json.dumps(record)


TWICE = {
    "record": ('"verdict": ', '"verdict": "fail", "verdict": '),
    "stage": ('"stage": "memory"', '"stage": "memory", "stage": "memory"'),
    "colon in a string": ('"message": ""', '"message": ":", "message": ""'),
    "space": ('"verdict": ', '"verdict" : "fail", "verdict": '),
    "spaces": ('"verdict": ', '"verdict": "fail", "verdict"   : '),
}


@pytest.mark.parametrize("name", TWICE)
def test_key_that_is_there_twice_is_refused(name: str) -> None:
    text = json.dumps(RECORD)
    twice = text.replace(*TWICE[name], 1)
    assert twice != text
    assert parse_record(twice.encode() + b"\n") is None
    with pytest.raises(ValueError, match="twice in an object"):
        parse_line(twice.encode() + b"\n")
