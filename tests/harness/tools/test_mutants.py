"""Mutants: their files, their cases, their results, and the row of a result."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness import cli
from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.hosts.changed_source import MODULES, changed_source
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.tools.mutants import mutant as mutants
from narrowgauge.harness.tools.mutants import recorded
from narrowgauge.harness.tools.mutants.conventional_tests import ConventionalTests, Detections
from narrowgauge.harness.tools.mutants.mutant import Mutant, MutantFileError
from narrowgauge.harness.tools.mutants.processes import ENOUGH, run_mutants
from narrowgauge.harness.tools.mutants.result import MutantResult, totals
from narrowgauge.harness.tools.mutants.run_mutants import print_results
from narrowgauge.harness.tools.mutants.selection import selected, touched_by
from narrowgauge.native import ops
from narrowgauge.native.quantize import layout
from narrowgauge.native.runtime import host, sources
from tests.harness import small_toml
from tests.matrix import all_cases, quick_cases

ALL = mutants.load_all()


@pytest.fixture(scope="module")
def quick() -> list[Case]:
    return list(quick_cases())


# ---- the files ----


@pytest.mark.long
def test_every_mutant_changes_its_file_and_touches_cases(quick: list[Case]) -> None:
    of_file = {file: touched_by(file, quick) for file in {mutant.file for mutant in ALL}}
    changes = {(mutant.file, mutant.cases) for mutant in ALL}
    touched_cases = {(file, keyword): select(of_file[file], keyword=keyword) for file, keyword in changes}
    for mutant in ALL:
        folder = MODULES if mutant.of_module else sources.FOLDER
        assert mutant.changed_text() != (folder / mutant.file).read_text(encoding="utf-8"), mutant.name
        touched = touched_cases[mutant.file, mutant.cases]
        assert touched, mutant.name
        assert all(isinstance(case, ModuleCase) == mutant.of_module for case in touched), mutant.name
        url = r"(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+)?"
        assert re.fullmatch(url, mutant.url or ""), mutant.name


TABLE = """
[[mutant]]
name = "wrong"
class = "layout"
file = "layout/swizzle.cu"
find = "store_scales(of_tile, 16, target + 512 * t);"
replace = ""
imitates = "A test."
cause = "writes-outside"
door = "unswizzle"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text, encoding="utf-8")
    return path


CHECK, TWICE = "store_scales(of_tile, 16, target + 512 * t);", "if (rows == 0 || columns == 0) return;"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (CHECK, "no such text", ["occurs 0 times in layout/swizzle.cu", "'no such text'"]),
        (CHECK, TWICE, ["occurs 2 times", repr(TWICE)]),
        ("cause =", "reason =", ["unknown key 'reason'", "cause", "door"]),
        ("imitates =", "url =", ["imitates is missing"]),
        ('"layout"', '"layuot"', ["class is 'layuot' (did you mean 'layout'?)"]),
        (
            '"layout/swizzle.cu"',
            '"layout/swizle.cu"',
            ["'layout/swizle.cu'", "did you mean 'layout/swizzle.cu'"],
        ),
        ('"unswizzle"', '"unswizle"', ["door is 'unswizle' (did you mean 'unswizzle'?)"]),
        ("door =", 'recipe = "nvfp5"\ndoor =', ["recipe is 'nvfp5'"]),
        ('"A test."', "3", ["imitates is 3"]),
        ('"writes-outside"', '["writes-outside", 3]', ["cause is 3"]),
    ],
)
def test_a_mutant_that_says_something_wrong_is_refused(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    path = written(tmp_path, TABLE.replace(old, new))
    with pytest.raises(MutantFileError) as caught:
        mutants.load(path)
    assert str(caught.value).startswith(f"{path}: [[mutant]] 1, 'wrong': ")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a file of mutants holds [[mutant]] tables, at least one"),
        (f"other = 1\n{TABLE}", "unknown key 'other'; a file of mutants holds [[mutant]] tables"),
        ("mutant = [1]", "[[mutant]] 1: is 1; a mutant is a table of keys"),
        ("mutant = [", "not TOML: "),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(MutantFileError, match=re.escape(f"{path}: {message}")):
        mutants.load(path)


def test_two_of_one_name_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MutantFileError, match=r"no-checkout: there is no such folder.*checkout.*--operations FILE"):
        mutants.load_all(tmp_path / "no-checkout")
    with pytest.raises(MutantFileError, match=re.escape(f"{tmp_path}: holds no *.toml file of mutants")):
        mutants.load_all(tmp_path)
    path = written(tmp_path, TABLE + TABLE)
    with pytest.raises(MutantFileError, match=re.escape(f"{path}: two mutants are called 'wrong'")):
        mutants.load_all(tmp_path)


# ---- the text of a kernel file, replaced within a process ----


@pytest.mark.long
def test_a_replaced_text_is_compiled_into_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "scratch").mkdir()
    scales = torch.arange(12, dtype=torch.uint8).view(3, 4)
    right = layout.swizzle(scales)
    text = sources.file_text("layout/layout.cuh").replace("i % 32 * 16", "i % 32 * 8")
    flags, compiled = {}, host._compile
    monkeypatch.setattr(host, "_compile", lambda *given: (flags.update({given[0]: given[2]}), compiled(*given)))
    with sources.replaced("layout/layout.cuh", text, tmp_path / "scratch"):
        assert sources.file_text("layout/layout.cuh") == text
        assert text.splitlines()[-2] in sources.text("swizzle")
        assert not torch.equal(layout.swizzle(scales), right)
        assert sources.scratch_of("amax") is None
        ops.amax(scales.float())
    assert [path.suffix for path in (tmp_path / "scratch").iterdir()].count(".so") == 1
    assert "-O1" in flags["swizzle"], "what runs on a few cases is compiled for the time that this takes"
    assert host.OPTIMIZATION in flags.get("amax", host.FLAGS)
    # What is not replaced comes from the cache, or was loaded by an earlier test of this process.
    assert {path.name.split("-")[0] for path in (tmp_path / "cache").glob("*.so")} <= {"amax", "swizzle"}
    assert torch.equal(layout.swizzle(scales), right)


def test_what_is_no_kernel_file_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no kernel file is called 'cpu/simt\.h'; there are attention/attention\.cu, "
    ):
        sources.replaced("cpu/simt.h", "", tmp_path).__enter__()


def test_a_replaced_module_is_imported_anew_and_gone_afterwards() -> None:
    before = sys.modules["narrowgauge.native.modules.layer"], sys.modules["narrowgauge.native.ops"], ops.Linear
    text = (MODULES / "products.py").read_text(encoding="utf-8").replace("dy.sum(0,", "2 * dy.sum(0,")
    with changed_source("products.py", text, ""):
        changed = importlib.import_module("narrowgauge.native.ops")
        assert changed.Linear is not ops.Linear
        assert changed.gemm is ops.gemm
        assert sys.modules["narrowgauge.native.modules.products"].column_sums(torch.ones(3, 1)).item() == 6
        assert (
            sys.modules["narrowgauge.native.modules.linear"].column_sums
            is sys.modules["narrowgauge.native.modules.products"].column_sums
        )
    assert (
        sys.modules["narrowgauge.native.modules.layer"],
        sys.modules["narrowgauge.native.ops"],
        ops.Linear,
    ) == before
    assert importlib.import_module("narrowgauge.native").ops is ops
    assert importlib.import_module("narrowgauge.native.modules.products").column_sums(torch.ones(3, 1)).item() == 3


# ---- selected cases ----


@pytest.mark.long
@pytest.mark.parametrize("flags_apart", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_source_that_a_case_launches_is_known(
    flags_apart: bool, quick: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[str] = set()
    launch = host.launch
    monkeypatch.setattr(host, "launch", lambda source, *a, **k: (launched.add(source), launch(source, *a, **k)))
    groups: defaultdict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in quick:
        # Contracts are judged by tests of their own: mutants choose no case of them by its sources.
        if 0 < math.prod(case.shape) < 20000 and case.operation not in CONTRACTS:
            parts = [part for part in case.recipe_label.split("-") if part.startswith(("rht", "rowscaled"))]
            known = ("columnwise", "both", "strided", "transposed", "padded") if flags_apart else ("strided", "padded")
            flags = [flag for flag in case.flags if flag in known]
            groups[case.operation, case.recipe_label.split("-")[0], *parts, *flags].append(case)
    backend = load_backend("native")
    compared = 0
    for cases in groups.values():
        case = min(cases, key=lambda case: math.prod(case.shape))
        launched.clear()
        verdict = run_case(case, backend).verdict
        if verdict == "unsupported":  # a rule that the kernels refuse
            continue
        assert verdict == "pass", case.id
        compared += 1
        assert launched <= case.native_sources, case.id
        assert case.native_sources - launched <= {"amax", "amax_blocks"}, case.id
    assert compared > len(groups) / 2


def test_cases_come_in_an_order_that_shows_much_early(quick: list[Case]) -> None:
    mutant = next(mutant for mutant in ALL if mutant.name == "scale-truncated")
    cases = selected(mutant, quick)
    assert cases == selected(mutant, quick)
    groups = {(case.operation, case.recipe_label, case.inputs) for case in cases}
    first = cases[: len(groups)]
    assert {(case.operation, case.recipe_label, case.inputs) for case in first} == groups
    assert len({case.recipe_label for case in first[:ENOUGH]}) > 1
    assert len({case.inputs for case in first[:ENOUGH]}) > 1
    narrowed = selected(replace(mutant, cases="zeros and not negative and not gemm"), quick)
    assert {(case.operation, case.inputs) for case in narrowed} == {
        ("quantize", "zeros"),
        ("quantize-grouped", "zeros"),
    }


# ---- results ----

SWIZZLES = "swizzle/129x5/bytes", "swizzle/31x1/position", "swizzle/0x4/bytes"


@pytest.fixture(scope="module")
def few() -> list[Case]:
    return [case for case in all_cases() if case.id in SWIZZLES]


def made(replaced_by: str, *, equivalent: str = "") -> Mutant:
    """swizzle.cu with something in place of its bounds check."""
    check, behind = "    if (quad.row >= padded_to(rows, 128)) return;\n", "    u8* target"
    return Mutant(
        "made",
        "memory",
        "layout/swizzle.cu",
        check + behind,
        f"{replaced_by}\n{behind}",
        "A test.",
        ("writes-outside",),
        "swizzle",
        equivalent=equivalent,
    )


def examined(mutant: Mutant, cases: list[Case], timeout: float = 60.0) -> MutantResult:
    [result] = run_mutants([mutant], cases, workers=1, timeout=timeout)
    return result


@pytest.mark.long
def test_a_mutant_is_killed_and_named_and_has_a_row(few: list[Case]) -> None:
    result = examined(made("    if (quad.row >= rows) return;"), few)
    assert (result.killed, result.right, result.check, result.stage) == (True, True, "repeat", "repeat")
    assert [record["case"] for record in result.failing] == ["swizzle/129x5/bytes", "swizzle/31x1/position"]
    assert result.ran == 3
    assert 0 < result.seconds < 60
    console = Console(width=200, record=True)
    print_results([result], console)
    shown = console.export_text()
    assert re.search(r"^made +repeat +repeat +2 of 3 ", shown, re.MULTILINE)
    assert re.search(r"^ +memory, ", shown, re.MULTILINE)
    assert "caught by narrowgauge 1 of 1, by allclose " in shown


@pytest.mark.long
def test_recorded_cases_run_first_and_suffice_if_all_fail(few: list[Case]) -> None:
    by_name = {case.id: case for case in few}
    failing, passing = by_name["swizzle/31x1/position"], by_name["swizzle/0x4/bytes"]
    mutant = made("    if (quad.row >= rows) return;")

    def ran(*names: str) -> tuple[int, list[str]]:
        entry = recorded.Entry(names, Detections(False, True, False))
        [result] = run_mutants([mutant], few, workers=1, recorded={"made": entry})
        assert result.detections == entry.detections
        return result.ran, [record["case"] for record in result.failing]

    assert ran(failing.id) == (1, [failing.id])
    assert ran(failing.id, "no/such/case") == (1, [failing.id])
    number, cases = ran(failing.id, passing.id)
    assert number == len(few)
    assert set(cases) == {"swizzle/129x5/bytes", failing.id}


def test_the_cheapest_cases_with_the_cause_are_recorded(few: list[Case], tmp_path: Path) -> None:
    first, second, third = few
    path = tmp_path / "recorded.json"
    kept = {"cases": ["swizzle/2x2"], "detected": ["sqnr"]}
    path.write_text(json.dumps({"gone": kept, "other": kept}))
    other = recorded.Entry(("swizzle/2x2",), Detections(False, False, True))

    def record(case: Case, seconds: float, cause: str) -> dict[str, object]:
        explanation = {"cause": cause, "sentence": "", "stage": "repeat", "exact": True}
        return {"case": case.id, "seconds_core": seconds, "explanations": [explanation]}

    result = MutantResult(made(""))
    result.failing = [
        record(first, 3, "writes-outside"),
        record(second, 1, "nibbles"),
        record(third, 2, "writes-outside"),
    ]
    recorded.write([result], ["made", "other"], few, path)
    made_entry = recorded.Entry(tuple(sorted([first.id, third.id])), Detections(True, True, True))
    assert recorded.read(path) == {"made": made_entry, "other": other}
    result.failing = []
    recorded.write([result], ["made", "other"], few, path)
    assert recorded.read(path) == {"other": other}
    assert recorded.read(tmp_path / "none.json") == {}


def test_recorded_names_are_names_of_mutants_and_quick_cases(quick: list[Case]) -> None:
    entries = recorded.read()
    real = {mutant.name for mutant in ALL if not mutant.equivalent}
    assert set(entries) <= real
    assert {name for entry in entries.values() for name in entry.cases} <= {case.id for case in quick}
    assert {len(entry.cases) for entry in entries.values()} <= set(range(1, recorded.MOST + 1))


@pytest.mark.long
def test_an_equivalent_mutant_survives_and_says_why(few: list[Case]) -> None:
    result = examined(made("    if (quad.row >= rows - 1) return;", equivalent="No."), few)
    assert result.killed
    assert not result.right, "an equivalent mutant that is killed is none"
    same = "    const i64 end = padded_to(rows, 128);\n    if (!(quad.row < end)) return;"
    result = examined(made(same, equivalent="a >= b is not a < b for integers"), few)
    assert (result.killed, result.right, result.check, result.causes) == (False, True, "", [])
    assert result.detections == Detections(False, False, False)
    assert not examined(made(same), few).right, "one that survives"
    console = Console(width=200, record=True)
    print_results([result], console)
    assert "made is equivalent: a >= b is not a < b for integers" in console.export_text()


@pytest.mark.long
def test_a_crash_and_what_does_not_compile_are_rows(few: list[Case]) -> None:
    crash = examined(made("    *reinterpret_cast<volatile int*>(blockIdx.x) = 1;"), few)
    assert (crash.check, crash.right, crash.failing[-1]["message"]) == (
        "crash",
        True,
        "the process died (signal SIGSEGV)",
    )
    assert crash.failing[-1]["case"] in SWIZZLES
    assert crash.detections == Detections(True, True, True)
    broken = examined(made("    undeclared();"), few)
    assert not broken.right
    assert "swizzle.cu does not compile" in broken.problem


@pytest.mark.long
def test_a_hang_is_neither_caught_nor_missed(few: list[Case]) -> None:
    hang = examined(made("    for (volatile int i = 0; i >= 0;) {}"), few, timeout=3.0)
    assert (hang.killed, hang.named, hang.right, hang.timed_out in SWIZZLES) == (False, False, False, True)
    assert hang.detections == Detections(True, True, True)


def test_totals_count_what_is_not_equivalent() -> None:
    def result(
        kind: str, *, killed: bool, noticed: tuple[bool, bool, bool], cause: str = "", same: str = ""
    ) -> MutantResult:
        record = new_record(case_from_labels("swizzle", "", (4, 4), "", kind), backend="native", device="cpu", seed=0)
        record.verdict, record.stage = "fail", "scales"
        record.stages = [{"stage": "scales", "rule": "exact"}]
        record.explanations = [{"cause": cause, "sentence": "", "stage": "scales", "exact": True}] if cause else []
        failing = [record.to_dict()] if killed else []
        return MutantResult(made("", equivalent=same), 1, failing, Detections(*noticed))

    results = [
        result("a", killed=True, noticed=(True, True, False), cause="writes-outside"),
        result("b", killed=True, noticed=(False, True, False), cause="reads-outside"),
        result("c", killed=False, noticed=(False, False, False), same="For a reason."),
    ]
    assert totals(results).sentence == (
        "caught by narrowgauge 2 of 2, by allclose 1, by byte compare 2, by SQNR 0; cause named 1; 1 equivalent"
    )
    assert totals(results).right
    assert not totals([*results, result("d", killed=False, noticed=(False, False, False))]).right
    assert results[0].to_dict()["causes"] == [("writes-outside", 1)]
    concluded = [result(kind, killed=True, noticed=(True, True, True), cause="amax-partial") for kind in "ef"]
    both = replace(results[1], failing=[record for one in (*concluded, results[1]) for record in one.failing])
    assert both.causes == [("reads-outside", 1), ("amax-partial", 2)], "what was seen comes first"
    assert json.dumps(results[0].to_dict())


@pytest.mark.long
@pytest.mark.parametrize("judged", sorted({(mutant.door, mutant.recipe) for mutant in ALL}))
def test_the_yardsticks_notice_nothing_in_the_real_kernels(judged: tuple[str, str]) -> None:
    """A door and the recipes of its operands."""
    assert ConventionalTests(*judged, ops).notice(ops) == Detections(False, False, False)


@pytest.mark.long
def test_known_failures_say_nothing_about_a_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any verdict, of the native kernels on a CPU alone."""
    given: list[str] = []

    def run(chosen: object, cases: list[Case], *_: object, **__: object) -> bool:
        given.extend(case.inputs for case in cases)
        return True

    monkeypatch.setattr("narrowgauge.harness.tools.mutants.run_mutants.run_session", run)
    table = small_toml.matrix(shape=[16, 32], dtype="bf16", inputs=["normal", "zeros", "inf", "nan", "outliers"])
    (tmp_path / "small.toml").write_text(table)
    (tmp_path / "known.toml").write_text(
        small_toml.known(case="*/normal", backend="native")
        + small_toml.known(case="*/zeros", backend="native", verdict="crash")
        + small_toml.known(case="*/inf", backend="native", device="cuda")
        + small_toml.known(case="*/nan", backend="mine:Backend")
    )
    result = CliRunner().invoke(cli.app, ["mutants", str(tmp_path), "-k", "unswizzle-of-unpadded"])
    assert result.exit_code == 0, result.output
    assert given == ["inf", "nan", "outliers"]


@pytest.mark.long
def test_a_search_ignores_the_recorded_cases_and_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without and with --search."""
    monkeypatch.setattr(recorded, "PATH", tmp_path / "recorded.json")
    runner = CliRunner()
    nothing = runner.invoke(cli.app, ["mutants", "-k", "no_such_mutant"])
    assert nothing.exit_code == 2
    assert f"no mutant of {len(ALL)} is selected by -k 'no_such_mutant'" in nothing.output
    arguments = ["cases/nvfp4_layout.toml", "-k", "unswizzle-of-unpadded", "-n", "1", "--report-dir", str(tmp_path)]
    for options in ([], ["--search"]):
        assert not recorded.PATH.exists()
        result = runner.invoke(cli.app, ["mutants", *arguments, *options])
        assert result.exit_code == 0, result.output
        assert "caught by narrowgauge 1 of 1" in result.output
    assert list(recorded.read(recorded.PATH)) == ["unswizzle-of-unpadded"]
    kept = json.loads((tmp_path / "mutants.json").read_text())
    assert kept["totals"]["killed"] == 1
    assert kept["mutants"][0]["name"] == "unswizzle-of-unpadded"
