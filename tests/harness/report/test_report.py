from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rich.console import Console

from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.operations import OPERATIONS, stage_names
from narrowgauge.harness.machine import processors
from narrowgauge.harness.records.environment import USER_COMMIT, user_commit
from narrowgauge.harness.records.record import NESTED, SCHEMA, VERDICTS, Record
from narrowgauge.harness.report import (
    accuracy,
    failure_view,
    groups,
    markdown,
    replace_files,
    report,
    tables,
    text,
    times,
)
from narrowgauge.harness.report.failure_view import first_failure, reproduction, saved_lines
from narrowgauge.harness.report.page import page
from narrowgauge.harness.report.page.failure import failure
from narrowgauge.harness.report.text import expected_stages
from tests.paths import CASES, ROOT

QUANTIZE = ("amax", "tensor scale", "scales", "codes", "values")
"""Stages of a quantize."""
NASTY = """<script>alert(1)</script>&"'"""
ENVIRONMENT = {"torch": "2.9.1", NASTY: f"label and value {NASTY}"}
ELEMENT = {"row": 3, "column": 517, "input": 0.625, "expected": "0010", "actual": "0011", "decoded": {"expected": 1.0}}
FINDING: dict[str, Any] = {
    "stage": "codes",
    "rule": "exact",
    "sentence": "37 of 1024 codes differ",
    "elements": [{"which": "first", **ELEMENT}, {"which": "worst", **ELEMENT, "column_in_block": 7}],
    "modulo": {"row": {"16": [0] * 15 + [37], "128": [1] * 128}, "column": {"16": [3, 0] * 8, "128": [0] * 128}},
    "heat": {"rows": 16, "columns": 16, "counts": [[0, 30], [7, 0]]},
}


def record(inputs: str = "normal", **changes: Any) -> dict[str, Any]:
    names = {"operation": "quantize", "recipe": "nvfp4", "shape": "64x128", "dtype": "bf16", **changes}
    case = "/".join([*(names[key] for key in ("operation", "recipe", "shape", "dtype")), inputs])
    given: dict[str, Any] = {
        "case": case, "file": "cases/a.toml", "inputs": inputs, "flags": "", "tier": "quick", "backend": "native",
        "device": "cpu", "seed": 2**53 + 1, "compared": 1024, "sqnr_db": math.inf, "seconds": 0.1 + 0.2, **names,
    }  # fmt: skip
    return Record(**given).to_dict()


def failing(inputs: str = "e2m1-ties", **changes: Any) -> dict[str, Any]:
    given = {"verdict": "fail", "stage": "codes", "message": "37 of 1024 codes differ", "mismatches": 37, "max_ulp": 1}
    stages = [{"stage": "codes", "rule": "exact", "compared": 1024, "mismatches": 37, "max_ulp": 1, "sentence": ""}]
    return record(inputs, **{"findings": [FINDING], "stages": stages, "sqnr_db": 20.5, **given, **changes})


def mixed() -> list[dict[str, Any]]:
    others = [record(verdict, verdict=verdict, compared=0, sqnr_db=None) for verdict in VERDICTS[2:]]
    nasty = failing(NASTY, message=NASTY, backend=NASTY, findings=[{**FINDING, "sentence": NASTY, NASTY: NASTY}])
    nasty["findings"][0]["elements"] = [{"which": NASTY, NASTY: NASTY}]
    nasty["explanations"] = [{"cause": NASTY, "sentence": NASTY, "stage": "codes", "exact": True}]
    return [record(), failing(), nasty, *others]


def write(records: list[dict[str, Any]], directory: Path) -> str:
    path = report.write(records, ENVIRONMENT, directory, elapsed=12.5)
    assert path == directory / "index.html"
    return path.read_text(encoding="utf-8")


def printed(records: list[dict[str, Any]], encoding: str = "utf-8", width: int = 100, *, details: bool = False) -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        report.print_summary(records, Console(file=file, width=width), details=details)
        file.flush()
        return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("count", [0, 6])
def test_parquet_schema(tmp_path: Path, count: int) -> None:
    write(mixed()[:count], tmp_path)
    schema = pyarrow.parquet.read_schema(tmp_path / "records.parquet")
    assert schema.metadata[b"narrowgauge_schema"] == str(SCHEMA).encode()
    types = {"int": "int64", "float": "double", "bool": "bool"}
    expected = [(f.name, types.get(str(f.type).removesuffix(" | None"), "string")) for f in fields(Record)]
    assert [(field.name, str(field.type)) for field in schema] == [("schema", "int64"), *expected]


def test_parquet_and_csv_hold_the_records(tmp_path: Path) -> None:
    records = mixed()
    write(records, tmp_path)
    plain = ({k: json.dumps(v) if k in NESTED else v for k, v in r.items()} for r in records)
    expected = {r["case"]: {"schema": SCHEMA, **r} for r in plain}
    rows = pyarrow.parquet.read_table(tmp_path / "records.parquet").to_pylist()
    assert {row["case"]: row for row in rows} == expected
    with (tmp_path / "records.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    flat = ({k: "" if v is None else str(v) for k, v in r.items() if k not in NESTED} for r in expected.values())
    assert {line["case"]: line for line in lines} == {line["case"]: line for line in flat}
    assert {float(line["seconds"]) for line in lines} == {0.1 + 0.2}


def test_groups_worst_first() -> None:
    records = [
        record(),
        failing("a", mismatches=5, max_ulp=None),
        failing("b", mismatches=50),
        failing("c", stage="block scales", mismatches=900, findings=[], stages=[]),
        record("d", verdict="timeout"),
        *(record(f"e{n}", verdict="crash", message="signal 11") for n in range(9)),
    ]
    result = groups.group(records)
    assert [one.title.partition(":")[0].split()[0] for one in result] == ["codes", "block", "crash", "timeout"]
    assert "9 cases" in result[2].title
    assert "signal 11" in result[2].title
    assert [one.verdict for one in result] == ["fail", "fail", "crash", "timeout"]
    assert [r["inputs"] for r in result[0].records] == ["b", "a"]
    assert result[0].mismatches == 55


def test_markdown_groups_and_limits(tmp_path: Path) -> None:
    records = [failing(f"i{n}", recipe=f"r{n % 53}", message=f"a | b {NASTY}") for n in range(53 * 13)]
    html = write(records, tmp_path)
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("# ✗ narrowgauge: 689 of 689 cases did not pass in 12.5 s: 689 fail\n")
    assert summary.count("\n## ") == groups.SHOWN == 50
    assert "3 more groups with 39 cases left out." in summary
    assert "3 more groups with 39 cases left out" in html
    assert summary.count("\n- and 3 more cases") == 50
    assert summary.count("`narrowgauge show quantize/r0/") == 1
    assert "\n| quantize | r0 | bf16 | 13 | 0 | 13 |" in summary
    assert r"a \| b \<script\>" in summary
    assert "\\<script\\>alert" in summary
    assert not re.search(r"(?<!\\)<script", summary)


def test_widths_of_intervals_are_in_every_report(tmp_path: Path) -> None:
    def of(operation: str, widest: int, mean: float) -> dict[str, Any]:
        return record(operation=operation, interval_ulps_max=widest, interval_ulps_mean=mean)

    records = [record(), of("attention", 14, 1.5), of("attention", 3, 0.5), of("gemm", 20, 2.0)]
    line = "Widest accepted interval: gemm 20 ulp, 2 on average; attention 14 ulp, 1 on average."
    assert text.interval_widths(records) == line
    assert line in write(records, tmp_path)
    assert line in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert not text.interval_widths([record()])
    several = [of(f"operation-{number}", number, 1.0) for number in range(1, 8)]
    assert text.interval_widths(several).endswith("operation-3 3 ulp, 1 on average; 2 more operations.")


def test_not_compared(tmp_path: Path) -> None:
    shown = [{"stage": stage, "compared": 5} for stage in QUANTIZE]
    assert text.not_compared([record(stages=shown)]) == "Every stage of every case was compared."
    empty = [{"stage": stage, "compared": 0} for stage in QUANTIZE]
    assert text.not_compared([record(shape="0x128", stages=empty)]) == "Every stage of every case was compared."
    assert text.not_compared([]) == "Not compared: everything."
    hidden = [{"stage": "amax", "compared": 0}, *shown[2:]]
    unknown = record("c", operation="other", stages=[{"stage": "one", "compared": 0}])
    without = [record(verdict, verdict=verdict, compared=0) for verdict in VERDICTS[2:]]
    records = [record("a", stages=hidden), record("b", stages=shown[1:]), record(compared=0, stages=shown), unknown]
    line = (
        "5 cases (1 crash, 1 error, 1 timeout, 1 unsupported, 1 without a compared element); stages not observed: "
        "quantize amax (2 cases), quantize tensor scale (1 case), other one (1 case)."
    )
    assert text.not_compared([*records, *without]) == f"Not compared: {line}"
    assert line in write([*records, *without], tmp_path)
    assert line in (tmp_path / "summary.md").read_text(encoding="utf-8")


def test_a_swap_that_stops_half_way_leaves_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").touch()

    def stop(*_: object) -> Path:
        raise OSError("the disk is full")

    def swapped() -> None:
        with replace_files.replace_files(tmp_path, last="index.html") as fresh:
            (fresh / "index.html").touch()
            (fresh / "records.csv").touch()
            monkeypatch.setattr(Path, "replace", stop)

    with pytest.raises(OSError, match="full"):
        swapped()
    assert not list(tmp_path.iterdir())


def test_a_passing_run_is_a_line_for_each_operation() -> None:
    recipes = [f"nvfp4-{n}" for n in range(30)] + [f"mxfp8-{n}" for n in range(12)]
    records = [record(str(n), recipe=recipe, dtype=("bf16", "fp32")[n % 2]) for n, recipe in enumerate(recipes)]
    records += [record(str(n), operation="transform", recipe=f"nvfp4-{n}") for n in range(3)]
    rows = tables.fold_rows(tables.summary(records))
    assert [(row["operation"], row["recipe"], row["pass"]) for row in rows] == [
        ("quantize", "42 recipes", 42), ("transform", "nvfp4 (3 recipes)", 3),
    ]  # fmt: skip
    assert sum(row["compared"] for row in rows) == sum(one["compared"] for one in records)
    # The guards and the repeated call are no comparison with an expected value, in a row as in the last line.
    stages = [
        {"stage": "codes", "rule": "exact", "compared": 1000},
        {"stage": "memory", "rule": "guard", "compared": 24},
    ]
    assert tables.summary([record(stages=stages)])[0]["compared"] == 1000
    out = printed(records, width=80)
    assert len(out.splitlines()) < 10
    for title in (accuracy.TITLE, times.TITLE):
        assert title not in out
    detailed = printed(records, width=80, details=True)
    assert all(recipe in detailed for recipe in recipes)


def test_details_have_the_accuracy_and_all_groups_of_failures() -> None:
    measured = [{"tensor": "dx", "sqnr_db": 18.25, "relative_error": None, "cosine": 0.5}]
    layers = [record(str(n), operation="linear", recipe="MXFP8BlockScaling", accuracy=measured) for n in range(2)]
    wrong = [failing(str(n), explanations=[explained(f"cause-{n}")]) for n in range(40)]
    brief, detailed = (printed(layers + wrong, width=80, details=details) for details in (False, True))
    assert accuracy.TITLE not in brief
    row = next(line for line in detailed.splitlines() if line.startswith("MXFP8BlockScaling linear"))
    assert row.split()[2:] == ["18.2", "0.5000"]
    assert "more groups with " in brief
    assert "more groups with " not in detailed
    assert all(f"cause-{n}:" in " ".join(detailed.split()) for n in range(40))


def test_every_failing_group_has_a_title_and_a_command() -> None:
    records = [
        failing("a", explanations=[explained("ties-away")]),
        failing("b", explanations=[explained("ties-away")], recipe="nvfp4-2d", dtype="bf16"),
        failing("c", stage="scales"),
        failing("d", stage="scales", recipe="mxfp8-e4m3"),
        failing("e", stage="layout", explanations=[explained("place:lane-3", exact=False)]),
        record("f", verdict="crash", message="signal 11"),
        record("g", verdict="crash", message="signal 6"),
        *(record(f"h{n}", verdict="error", message=f"no kernel for shape ({n}, 7)") for n in range(3)),
        record("i", verdict="timeout", message="300 s"),
        record("j", verdict="unsupported", message="no such method"),
    ]
    found = groups.group(records)
    assert len({one.title for one in found}) == len(found) == 9
    assert found[0].title.startswith("codes wrong, explained exactly by sentence of ties-away: 2 cases")
    out = printed(records, width=200)
    assert out.count("  narrowgauge show ") == len(found) - 1  # an unsupported case is no failure
    for word in ("ties-away", "sentence of place:lane-3", "signal 11", "signal 6", "no kernel", "300 s"):
        assert word in out


def test_terminal_without_glyphs() -> None:
    out = printed(mixed(), "ascii")
    assert out.endswith("fail 5 of 7 cases did not pass: 2 fail, 1 error, 1 crash, 1 timeout; 1 unsupported\n")


@pytest.mark.parametrize(("case", "quoted"), [("a/b", "a/b"), ("it's", "'it'\"'\"'s'"), ("$(rm) `x`", "'$(rm) `x`'")])
def test_reproduction_line_is_safe_in_a_shell(case: str, quoted: str) -> None:
    line = reproduction({**record(), "case": case, "backend": "a.b:C", "device": "cuda:0 x"})
    assert line == f"narrowgauge show {quoted} --backend a.b:C --device 'cuda:0 x' --seed {2**53 + 1}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", []),
        ("--schedules 4 --after 'a b/$(rm)'", ["--schedules", "4", "--after", "a b/$(rm)"]),
        ("--path x; rm -rf / & `y`", ["--path", "x;", "rm", "-rf", "/", "&", "`y`"]),
        ("--path 'x", ["--path", "'x"]),
    ],
)
def test_options_of_a_record_are_words_of_the_line(options: str, words: list[str]) -> None:
    """Whatever a changed journal has: no word is a command of the shell. A saved failure has no earlier cases."""
    failed = {**failing(), "options": options, "saved": "f.safetensors"}
    arguments = shlex.split(reproduction(failed))
    assert arguments[len(arguments) - len(words) :] == words
    assert not {";", "&"} & set(shlex.shlex(reproduction(failed), punctuation_chars=True))
    (saved,) = [line for line in saved_lines(failed) if "--saved" in line]
    kept = words[: words.index("--after")] if "--after" in words else words
    assert shlex.split(saved.partition(": ")[2])[9:] == kept


@pytest.mark.parametrize("place", ["cases/a.toml", "own/a.toml", "shipped", "/elsewhere/a.toml"])
def test_reproduction_line_names_a_file_that_is_not_a_default(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the current folder. Cases of the package and of the folder `cases` need no name of a file."""
    monkeypatch.chdir(tmp_path)
    shipped = place == "shipped"
    file = os.path.realpath(next(CASES.glob("*.toml"))) if shipped else place
    line = reproduction({**record(), "file": file})
    start = f"narrowgauge show {record()['case']} "
    named = f"{place} " if place in ("own/a.toml", "/elsewhere/a.toml") else ""
    assert line.startswith(f"{start}{named}--backend ")
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "a.toml").write_text("[[matrix]]\n")
    failure_view._arguments.cache_clear()
    assert reproduction({**record(), "file": file}).startswith(f"{start}{named}--backend ")
    inside = reproduction({**record(), "file": str(tmp_path / "own" / "a.toml")})
    assert inside.startswith(f"{start}own/a.toml --backend ")


def test_every_operation_has_its_stages() -> None:
    unknown = {name for name, cls in OPERATIONS.items() if cls.composed or issubclass(cls, ContractCase)}
    assert {name for name in OPERATIONS if not stage_names(name)} == unknown
    both = expected_stages(record(flags="both+swizzled"))
    assert both[0] == "rowwise.amax"
    assert both[-1] == "halves"
    assert expected_stages(record(flags="columnwise+swizzled")) == QUANTIZE
    assert expected_stages(record(operation="quantize-grouped", flags="front:4+columnwise")) == QUANTIZE[:-1]
    product = {"shape": "32x48x16", "dtype": "bf16xbf16-fp32"}
    gemm = expected_stages(record(operation="gemm", flags="tn", **product))
    assert gemm == (*(f"{operand}.{stage}" for operand in "xw" for stage in QUANTIZE[:-1]), "output")
    assert expected_stages(record(operation="gemm-grouped", flags="front:4+bias", **product)) == gemm
    padded = expected_stages(record(operation="gemm-grouped", flags="front:4+padded+bias", **product))
    assert set(padded) - set(gemm) == {"padding", "rows", "unpadding"}
    fused = expected_stages(record(operation="gemm-quantized", flags="tn+nvfp4", **product))
    assert set(fused) > {*gemm, "output.scales", "fused.scales"}
    shown = [{"stage": stage, "compared": 5} for stage in both[:-1]]
    assert text.not_compared([record(flags="both", stages=shown)]) == (
        "Not compared: stages not observed: quantize halves (1 case)."
    )


def explained(cause: str, *, exact: bool = True) -> dict[str, Any]:
    return {"cause": cause, "sentence": f"sentence of {cause}", "stage": "codes", "exact": exact}


def test_one_cause_is_one_group_whatever_the_recipes(tmp_path: Path) -> None:
    """The cause of most records explains all possible records; a signature joins failures of a single place."""
    truncated, away, lane = explained("truncated"), explained("ties-away"), explained("place:lane-3", exact=False)
    records = [
        failing("a", explanations=[truncated, away]),
        failing("b", explanations=[away, lane]),
        {**failing("c", explanations=[away]), "recipe": "mxfp8-e4m3", "operation": "gemm", "stage": "x.codes"},
        failing("d", explanations=[truncated]),
        failing("e", explanations=[lane]),
        {**failing("f", explanations=[lane]), "recipe": "nvfp4-2d"},
        failing("g"),
    ]
    result = groups.group(records)
    names = [(one.explanation["cause"] if one.explanation else "", len(one.records)) for one in result]
    assert names[0] == ("ties-away", 3)
    assert sorted(names[1:]) == [("", 1), ("place:lane-3", 1), ("place:lane-3", 1), ("truncated", 1)]
    assert "codes and x.codes wrong" in result[0].title
    assert "possible cause: sentence of ties-away" in result[0].title  # some cases of these kinds have different bytes
    assert sum("codes wrong, sentence of place:lane-3: 1 case" in one.title for one in result) == 2
    html, summary = page.render(records, {}, 1.0), markdown.render(records, {}, 1.0)
    for text_of in (html, summary):
        assert "sentence of ties-away; explains 3 of 6 cases that fail at this stage" in text_of
        assert "wrong elements: sentence of place:lane-3" in text_of
    lines = first_failure(records[0]).splitlines()
    assert lines[1:3] == ["explained by one of: sentence of truncated", "                 or: sentence of ties-away"]


def test_one_commit_is_named_with_its_repository() -> None:
    own = {"backend": "native", "commit": "1ba1b3b"}
    for environment, first, folded in (
        (own, "<dt>commit of narrowgauge</dt><dd>1ba1b3b</dd>", ""),
        (
            own | {USER_COMMIT: "abc of kernels"},
            f"<dt>{USER_COMMIT}</dt><dd>abc of kernels</dd>",
            "commit of narrowgauge",
        ),
    ):
        shown, _, hidden = page.render([record()], environment, 1.0).partition("<details>")
        assert first in shown
        assert shown.count("<dt>commit") == 1
        assert folded in hidden
    assert "- commit of narrowgauge: 1ba1b3b" in markdown.render([record()], own, 1.0)


def test_the_commit_of_a_users_repository_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert user_commit() == {}
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    assert re.fullmatch(rf"[0-9a-f]{{12}} of {tmp_path.name}", user_commit()[USER_COMMIT])
    monkeypatch.chdir(ROOT)
    assert user_commit() == {}


@pytest.mark.parametrize(
    ("before", "after", "own", "others"), [(0.3, 2.2, 2, 0), (3.1, 2.0, 1, 3), (0.0, 6.9, 2, 5), (1.4, 1.0, 1, 0)]
)
def test_other_work_is_said_if_the_cores_are_too_few(
    before: float, after: float, own: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "cores", lambda: 2)
    said = processors.other_work(before, after, own)
    assert said.startswith(f"{others} other processes on 2 cores") if others else not said
    shown = page.render([record(seconds_total=1.0)], {times.BUSY: said} if said else {}, 1.0)
    assert shown.count(said or times.BUSY) == (2 if said else 0)  # above the verdicts, and beside the times


@pytest.mark.parametrize(
    ("value", "shown"),
    [(99_999, "99 999"), (1_234_567, "1.23M"), (0.25, "0.25"), (2.56e34, "2.56e34"), (1234.5, "1234"), (3e-7, "3e-7"),
     (math.inf, "inf")],
)  # fmt: skip
def test_compact_figures(value: float, shown: str) -> None:
    assert text.compact(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, ""), (0, "0"), (99, "99"), (100, "> 99"), (1 << 31, "> 99")])
def test_a_distance_in_a_table_ends_at_99_steps(value: int | None, shown: str) -> None:
    assert text.ulps(value) == shown
    row = next(line for line in printed([failing(max_ulp=value)]).splitlines() if "quantize nvfp4 bf16" in line)
    assert shown in row


def test_elements_around_the_first_wrong_one_are_on_the_page() -> None:
    table = {"title": "row 3, block 0", "rows": [["column", "x"], ["16", "0.5"]], "different": [1]}
    wrong = failing(findings=[FINDING | {"table": table}])
    (shown,) = failure(wrong, [])["findings"]
    assert shown["table"] == table


def test_declarations_are_on_the_page_and_in_the_summary(tmp_path: Path) -> None:
    """Verdicts depend on them."""
    declared = "accumulator: truncating, subnormals: flushed"
    report.write([record(declares=declared), record("uniform")], ENVIRONMENT, tmp_path, elapsed=1.0)
    assert f"declares: {declared}" in (tmp_path / "summary.md").read_text()
    assert declared in (tmp_path / "index.html").read_text()
    report.write([record()], ENVIRONMENT, tmp_path, elapsed=1.0)
    assert "declares:" not in (tmp_path / "summary.md").read_text()
