"""The ledger of known failures: allowed entries, and their effect on a record and on a run."""

import csv
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cases.case_file import CaseFileError, load_all
from narrowgauge.harness.cases.keys import Autograd
from narrowgauge.harness.cli import app
from narrowgauge.harness.diagnosis import cause_names
from narrowgauge.harness.diagnosis.cause_names import CAUSES, FAMILIES
from narrowgauge.harness.diagnosis.explain_memory import ALIAS_CAUSES
from narrowgauge.harness.diagnosis.formulas.explain_formula import wrong_formulas
from narrowgauge.harness.gate.ledger import Entry, Ledger, LedgerError, is_link, load, load_beside
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.repeated import REPEAT_CAUSES
from narrowgauge.harness.records.record import Record, outcome, succeeded
from narrowgauge.harness.report import groups, markdown, tables, text
from narrowgauge.harness.report.page import page
from narrowgauge.harness.tools.mutants.mutant import load_all as load_mutants
from tests.harness import small_toml
from tests.harness.backends.test_module_uses import USES
from tests.harness.diagnosis.test_explain_formula import RIGHT
from tests.harness.sample_backends import QUANTIZE
from tests.harness.small_toml import ISSUE
from tests.harness.small_toml import known as known_table
from tests.matrix import all_cases
from tests.paths import ROOT

ENTRY = Entry("quantize/*/bf16/*", "native", ISSUE, "ties", location="cases/known.toml: [[known]] 2")
STAGE = {"stage": "codes", "rule": "exact", "compared": 9, "mismatches": 1, "max_ulp": 1, "sentence": ""}


def record(verdict: str = "fail", case: str = "quantize/nvfp4/1x2/bf16/a", **changes: Any) -> dict[str, Any]:
    given = {"verdict": verdict, "compared": 9, "stages": [STAGE], **changes}
    return Record(case, "", "quantize", "nvfp4", "1x2", "bf16", "a", "", "", "native", "cpu", 0, **given).to_dict()


def marked(entries: list[Entry], result: dict[str, Any]) -> dict[str, Any]:
    Ledger(tuple(entries)).mark(result)
    return result


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[know]]\n", "unknown key 'know' (did you mean 'known'?); a ledger holds [[known]] tables"),
        ("known = 3\n", "known is int; a ledger holds [[known]] tables"),
        ("known = [3]\n", "[[known]] 1: is 3; an entry is a table of keys"),
        ("[[known]\n", "not TOML: "),
        (
            known_table() + known_table(reson="x"),
            "[[known]] 2: unknown key 'reson' (did you mean 'reason'?); an entry has case, ",
        ),
        (known_table(reason=None), "[[known]] 1: reason is missing; an entry needs case, backend, issue, reason"),
        (known_table(reason="  "), "[[known]] 1: reason is '  '; it is text, and not empty"),
        (known_table().replace('"ties"', "3"), "[[known]] 1: reason is 3; it is text, and not empty"),
        (known_table(issue="kernels#12"), "[[known]] 1: issue is 'kernels#12'; it is a link: https://…"),
        (
            known_table(verdict="fial"),
            "verdict is 'fial' (did you mean 'fail'?); it can be fail, error, crash, timeout",
        ),
        (known_table(verdict="unsupported"), "verdict is 'unsupported'; it can be fail, error, crash, timeout"),
        (known_table(device="gpu"), "device is 'gpu'"),
        (
            known_table(stage="code"),
            "stage is 'code' (did you mean 'codes'?); of quantize it can be amax, tensor scale, ",
        ),
        (
            known_table(case="swizzle/*", stage="codes"),
            "stage is 'codes'; of swizzle it can be layout, unswizzle, memory",
        ),
        (known_table(cause="tie-away"), "cause is 'tie-away' (did you mean 'ties-away'?); it is one of the column "),
        (known_table(cause="place:"), "cause is 'place:' (did you mean 'place:…'?)"),
        (known_table(verdict="crash", stage="codes"), "stage says how a fail is wrong, and the verdict is crash"),
    ],
)
def test_a_malformed_ledger_is_one_error_that_names_the_entry(tmp_path, content, message):
    (tmp_path / "known.toml").write_text(content)
    with pytest.raises(LedgerError) as raised:
        load(tmp_path / "known.toml")
    assert str(raised.value).startswith(f"{tmp_path / 'known.toml'}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"stage": "codes", "cause": "ties-away"},
        {"stage": "columnwise.layout", "cause": "place:last-row"},
        {"case": "gemm-grouped/*", "stage": "unpadded", "cause": "scale-of-next-block"},
        {"case": "*/nvfp4/*", "stage": "whatever it is", "cause": "dialect:torchao"},
    ],
)
def test_a_stage_and_a_cause_that_there_are(tmp_path, keys):
    """A pattern without an operation may have any stage."""
    (tmp_path / "known.toml").write_text(known_table(**keys))
    (entry,) = load(tmp_path / "known.toml").entries
    assert (entry.stage, entry.cause) == (keys["stage"], keys["cause"])


def test_the_page_of_causes_is_that_of_the_rows():
    again = "python -m narrowgauge.harness.diagnosis.cause_names"
    assert cause_names.PAGE.read_text() == cause_names.page(), f"run {again} to write the page again"


def test_every_table_of_deviations_is_on_the_page():
    """Every row at the top level of a module of the diagnosis or of the deviations of an operation."""
    collected = {id(row) for rows in cause_names.tables().values() for row in rows}
    harness = ROOT / "harness"
    lost = []
    for path in (*(harness / "diagnosis").rglob("*.py"), *(harness / "operations").glob("*/deviations.py")):
        module = import_module(".".join(("narrowgauge", *path.relative_to(ROOT).with_suffix("").parts)))
        for name, value in vars(module).items():
            rows = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
            lost += [name for row in rows if isinstance(row, Deviation) and id(row) not in collected]
    assert lost == ["_CORRECT"]


def test_every_cause_has_a_mutant_or_a_test():
    """A cause without a test can be wrong unnoticed. Two tests produce every name of a table."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    formulas = {row.cause for name, given, _ in RIGHT.values() for row, _ in wrong_formulas(name, given)}
    produced = {
        *re.findall(r'"([^"\n]+)"', tests), *(cause for mutant in load_mutants() for cause in mutant.causes),
        *formulas, *ALIAS_CAUSES, *REPEAT_CAUSES.values(), *(f"use:{use}" for use in USES),
        *(f"autograd:{mode}" for mode in get_args(get_args(Autograd)[0])),
    }  # fmt: skip
    assert set(CAUSES) <= produced
    assert [name for name in FAMILIES if not any(cause.startswith(name) for cause in produced)] == []


@pytest.mark.parametrize("link", ["ftp://a/b", "https://", "http://[", "https://a b", "//a/b", "a"])
def test_what_is_no_link(link):
    assert not is_link(link)
    assert is_link(ISSUE)


def test_the_projects_own_ledger_is_right_and_no_case_file():
    cases = all_cases()
    load_beside([ROOT / "cases"]).check(cases)
    assert not any(case.file.endswith("known.toml") for case in cases)
    with pytest.raises(CaseFileError, match=r"known.toml: holds known failures, and no case"):
        load_all([ROOT / "cases" / "known.toml"])


@pytest.mark.parametrize(
    ("entry", "result", "known"),
    [
        ({}, {}, True),
        ({}, {"case": "quantize/nvfp4/1x2/fp32/a"}, False),
        ({"backend": "mine:Backend"}, {}, False),
        ({"device": "cuda"}, {}, False),
        ({"device": "cpu"}, {}, True),
        ({}, {"verdict": "crash"}, False),
        ({"verdict": "error"}, {"verdict": "error"}, True),
        ({"stage": "codes"}, {"stage": "codes"}, True),
        ({"stage": "codes"}, {"stage": "scales"}, False),
        ({"cause": "ties-away"}, {"explanations": [{"cause": "x"}, {"cause": "ties-away"}]}, True),
        ({"cause": "ties-away"}, {"explanations": [{"cause": "x"}]}, False),
        ({}, {"verdict": "unsupported"}, False),
    ],
)
def test_a_known_failure_is_as_its_entry_expects(entry, result, known):
    other = replace(ENTRY, case="gemm/*", reason="another")
    one = marked([other, replace(ENTRY, **entry)], record(**{"message": "wrong", **result}))
    assert one["known"] == (f"ties ({ISSUE})" if known else "")
    assert one["message"] == "wrong"
    assert succeeded([record("pass"), one]) is (known or one["verdict"] == "unsupported")
    assert not succeeded([one])  # no case passed


def test_a_pass_against_the_ledger_names_the_entry_to_delete():
    broad = marked([ENTRY], record("pass"))
    assert broad["message"] == (
        "passes, though it is known to fail: delete cases/known.toml: [[known]] 2, or narrow its pattern"
    )
    exact = marked([replace(ENTRY, case=broad["case"])], record("pass"))
    assert exact["message"] == "passes, though it is known to fail: delete cases/known.toml: [[known]] 2"
    assert outcome(exact) == "unexpected"
    assert not succeeded([exact])


def test_crashes_and_timeouts_are_not_launched():
    case = replace(QUANTIZE, inputs="e2m1-ties")
    where = {"backend": "native", "device": "cpu", "seed": 3}
    for verdict in ("crash", "timeout"):
        ledger = Ledger((replace(ENTRY, verdict="fail"), replace(ENTRY, verdict=verdict)))
        made = ledger.stand_in(case, **where)
        assert made is not None
        assert (made["case"], made["seed"], made["verdict"]) == (case.id, 3, verdict)
        assert (made["message"], made["known"]) == ("not run: ties", f"ties ({ISSUE})")
        assert ledger.stand_in(case, **{**where, "backend": "reference"}) is None
        assert not succeeded([made])  # no element was compared
        assert succeeded([made, record("pass", stages=[STAGE])])
    assert Ledger((ENTRY,)).stand_in(case, **where) is None


def test_an_entry_without_a_case_is_an_error_that_names_it(tmp_path):
    stale = [replace(ENTRY, case=f"quantise/{n}/*", location=f"l: [[known]] {n}") for n in range(7)]
    with pytest.raises(LedgerError) as raised:
        Ledger((ENTRY, *stale)).check([QUANTIZE])
    message = str(raised.value)
    assert message.startswith("l: [[known]] 0: case 'quantise/0/*' matches no case")
    assert message.endswith("; and 2 more: correct or narrow the pattern, or delete the entry")
    near = replace(ENTRY, case="quantize/nvfp4/32x48/bf16/norml")
    with pytest.raises(
        LedgerError, match=re.escape("matches no case (did you mean 'quantize/nvfp4/32x48/bf16/normal'?)")
    ):
        Ledger((near,)).check([QUANTIZE])
    (tmp_path / "other.toml").write_text(
        '[[matrix]]\noperation = "swizzle"\ntier = "full"\nshape = [3, 4]\ninputs = "bytes"'
    )
    Ledger((replace(ENTRY, case="swizzle/*"),)).check([QUANTIZE], [tmp_path])


# Output for people.


def test_reports_keep_what_is_known_apart():
    known = record(known="ties (https://x)", message="3 of 9 wrong", mismatches=3)
    records = [
        record("pass"),
        known,
        record("pass", known="why (https://y)", message="passes, though"),
        record("error"),
    ]
    assert text.verdict_line(records) == (
        "1 of 4 cases did not pass: 1 error; 1 case passed though known to fail; 1 known failure"
    )
    assert text.verdict_line(records[:2]) == "1 case passed, 18 elements compared; 1 known failure"
    assert [one.verdict for one in groups.group(records)] == ["error", "unexpected", "known"]
    (row,) = tables.summary(records)
    assert [row[name] for name in ("cases", "pass", "fail", "error", "unexpected", "known")] == [4, 1, 0, 1, 1, 1]
    for shown in (markdown.render(records, {}, 1.0), page.render(records, {}, 1.0)):
        assert shown.find("ties (https://x)") > shown.find("passes, though") > 0
    assert markdown.render(records[:2], {}, 1.0).startswith("# ✓ ")


# Runs.

CASES = small_toml.matrix()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`narrowgauge run` in a folder with four cases; the cases of 48 columns fail. Also the ids of launched cases."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "a.toml").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    launched = []

    def run_cases(cases, settings, on_record, on_loaded):
        for case in cases:
            launched.append(case.id)
            on_record(record("fail" if "48" in case.id else "pass", case.id))

    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.run_cases", run_cases)

    def invoke(*message: str, ledger: str = "", file: str = "cases/known.toml"):
        launched.clear()
        (tmp_path / file).write_text(ledger)
        return CliRunner().invoke(app, ["run", *message]), launched

    return invoke


def test_a_run_succeeds_where_its_failures_are_known_and_says_so(run):
    result, launched = run(ledger=known_table(case="quantize/*/16x48/*"))
    assert result.exit_code == 0, result.output
    assert len(launched) == 4
    assert "2 cases passed, 36 elements compared; 2 known failures" in " ".join(result.stdout.split())
    with Path("reports/latest/records.csv").open(encoding="utf-8", newline="") as file:
        assert [row["known"] for row in csv.DictReader(file)] == [f"ties ({ISSUE})" if n > 1 else "" for n in range(4)]


def test_a_run_fails_if_a_known_failure_passes_or_differs(run):
    result, _ = run(ledger=known_table(case="quantize/*") + known_table(case="quantize/*/16x32/*"))
    assert result.exit_code == 2
    assert "cases/known.toml: [[known]] 1: case 'quantize/*' matches all 4 cases: " in result.stderr
    assert "narrow the pattern" in result.stderr
    result, _ = run(ledger=known_table(case="quantize/*/16x32/*") + known_table(case="quantize/*/16x48/*"))
    assert result.exit_code == 1
    assert "2 cases passed though known to fail; 2 known failures" in " ".join(result.stdout.split())
    assert "delete cases/known.toml: [[known]] 1, or narrow its pattern" in " ".join(result.stdout.split())
    result, _ = run(ledger=known_table(case="quantize/*/16x48/fp32/*"))
    assert result.exit_code == 1
    assert "1 of 4 cases did not pass: 1 fail; 1 known failure" in " ".join(result.stdout.split())


def test_a_run_does_not_launch_what_is_known_to_crash(run):
    result, launched = run(ledger=known_table(case="quantize/*/16x48/*", verdict="crash"))
    assert result.exit_code == 0, result.output
    assert [case for case in launched if "48" in case] == []
    assert "2 cases passed, 18 elements compared; 2 known failures" in " ".join(result.stdout.split())


def test_a_link_is_the_last_line_of_the_summary(run):
    result, _ = run("--link", "https://ci.example/7", ledger=known_table(case="quantize/*/16x48/*"))
    assert result.exit_code == 0, result.output
    assert Path("reports/latest/summary.md").read_text(encoding="utf-8").endswith("<https://ci.example/7>\n")
    result, launched = run("--link", "ci/7")
    assert result.exit_code == 2
    assert "--link is 'ci/7'; it is the address of a page: https://…" in result.stderr
    assert not launched
