"""The schema of the tables: docs/schema.md describes the tables, and a change of a column changes the version."""

import hashlib
import json
import math
import re
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

import pyarrow.parquet

from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.pytest_plugin.junit import PROPERTIES, properties
from narrowgauge.harness.records.record import ENTRIES, NESTED, SCHEMA, Record
from narrowgauge.harness.report import tables
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, gemm, quantize
from tests.paths import ROOT

DOCUMENT = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its header and rule."""
    lines = [line for line in DOCUMENT.partition(heading)[2].partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def written(folder: Path) -> list[tuple[str, str]]:
    tables.write([], folder)
    return [(field.name, str(field.type)) for field in pyarrow.parquet.read_schema(folder / "records.parquet")]


def csv_columns(folder: Path) -> list[str]:
    tables.write([], folder)
    return (folder / "records.csv").read_text(encoding="utf-8").splitlines()[0].split(",")


def test_the_document_has_the_columns_with_their_types(tmp_path: Path) -> None:
    documented = [(name, "string" if kind == "JSON" else kind) for name, kind, *_ in rows("## Columns of a run")]
    assert documented == written(tmp_path)
    assert [name for name, kind, *_ in rows("## Columns of a run") if kind == "JSON"] == [
        f.name for f in fields(Record) if f.name in NESTED
    ]
    assert all(len(row) == 4 and row[3] for row in rows("## Columns of a run"))


def test_the_document_has_the_keys_of_what_columns_hold() -> None:
    documented = defaultdict(list)
    for column, key, kind, meaning in rows("## Columns with JSON"):
        documented[column].append(key)
        assert kind
        assert meaning
    assert documented == {column: list(keys) for column, keys in ENTRIES.items()}


def test_a_change_of_the_columns_changes_the_version(tmp_path: Path) -> None:
    """Where this fails: raise SCHEMA, and give the new version a line with this fingerprint in docs/schema.md."""
    keys = {column: list(keys) for column, keys in ENTRIES.items()}
    content = json.dumps([written(tmp_path), csv_columns(tmp_path), keys])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:12]
    versions = {int(version): known for version, known, _ in rows("## Versions")}
    assert max(versions) == SCHEMA
    assert versions[SCHEMA] == fingerprint
    assert len(set(versions.values())) == len(versions)


def test_records_have_the_documented_keys_and_no_other() -> None:
    """Of every rule with findings: bytes, bounds, guards."""

    def wrong(q):
        q.codes[2, 3] ^= 0x10

    doors = {"quantize": quantize(wrong), "dequantize": reference.dequantize, "gemm": gemm(lambda out: out * 2)}
    cases = (QUANTIZE, replace(GEMM, shape=(16, 16, 8)))
    records = [run_case(case, backend(**doors)).to_dict() for case in cases]
    assert {record["verdict"] for record in records} == {"fail"}
    seen = defaultdict(set)
    for record in records:
        assert record["stages"]
        assert record["findings"]
        for column in ("stages", "findings"):
            seen[column] |= {tuple(entry) for entry in record[column]}
    assert seen == {column: {ENTRIES[column]} for column in ("stages", "findings")}
    assert ENTRIES["explanations"] == tuple(Explanation("", "", "", True).to_dict())
    assert set(ENTRIES) < set(NESTED)


def test_properties_are_documented_and_may_be_empty() -> None:
    record = Record("a", "", "gemm", "nvfp4", "1x2x3", "", "", "", "", "native", "cpu", 0)
    result = dict(properties(record.to_dict()))
    documented = {name for row in rows("## JUnit") for name in re.findall(r"`(\w+)`", f"`{row[0]}`")}
    assert documented == set(result)
    assert set(PROPERTIES) < set(result)
    assert (result["max_ulp"], result["budget"], result["explanation"], result["compared"]) == ("", "", "", "0")
    explained = [{"cause": "a", "sentence": "ties", "stage": "codes", "exact": True}]
    full = replace(record, max_ulp=3, budget_max=1.5, explanations=explained, known="why (https://x)")
    result = dict(properties(full.to_dict()))
    assert (result["max_ulp"], result["budget"], result["known"]) == ("3", "1.5", "why (https://x)")
    assert result["explanation"] == "explained exactly by: ties"


def test_a_parquet_file_has_the_values_of_the_records(tmp_path: Path, monkeypatch) -> None:
    """In parts of three rows: no value, NaN, infinity, wide text."""
    monkeypatch.setattr(tables, "_ROWS", 3)
    empty = Record("", "", "quantize", "", "", "", "", "", "", "native", "cpu", 0).to_dict()
    changes = [
        {"case": "a", "seed": 2**62 + 1, "sqnr_db": math.nan, "max_ulp": 5, "stages": [{"stage": "codes"}]},
        {"case": "b", "message": "größer €", "sqnr_db": -math.inf, "allclose": True},
        {"case": "c", "message": "", "sqnr_db": None, "compared": 7},
        {"case": "d", "sqnr_db": 3.25, "allclose": False},
    ]  # fmt: skip
    records = [empty | change for change in changes]
    tables.write(records, tmp_path)
    read = pyarrow.parquet.read_table(tmp_path / "records.parquet").to_pylist()
    for row, record in zip(read, records, strict=True):
        for name, value in record.items():
            expected = json.dumps(value) if name in NESTED else value
            assert row[name] == (None if isinstance(value, float) and math.isnan(value) else expected), name
