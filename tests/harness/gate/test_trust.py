"""Runs refused by the gate: every kind of damage to a journal, starting from the journal of a real run."""

from __future__ import annotations

import copy
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.gate.accept import accept
from narrowgauge.harness.gate.trust import read_trusted
from narrowgauge.harness.records.journal import JOURNAL_NAME, JournalError
from narrowgauge.harness.records.record import ENTRIES, Record
from narrowgauge.harness.records.record_check import _ENTRY_TYPES, record_problems
from tests.harness import small_toml
from tests.harness.runs import product, record, run, saved, stage, wrong

CASES = "".join([
    small_toml.matrix(dtype="bf16"),
    small_toml.matrix(dtype="fp32", shape=[16, 32]),
    small_toml.matrix(recipe="nvfp4-rht", dtype="bf16", shape=[16, 32]),
    small_toml.matrix(operation="gemm", dtype=None, shape=[16, 1024, 24], x="bf16", w="bf16", out="bf16",
                      inputs="rounding"),
    small_toml.matrix(operation="swizzle", recipe=None, dtype=None, shape=[3, 4], inputs="bytes"),
    small_toml.matrix(operation="linear", recipe=None, training="MXFP8BlockScaling", dtype="bf16",
                      shape=[1, 32, 32, 32]),
])  # fmt: skip
KERNELS = """
from dataclasses import replace

from narrowgauge.reference import ops


class Kernels:
    gemm = staticmethod(ops.gemm)
    Linear = ops.Linear

    def quantize(self, x, recipe, **options):
        if x.element_size() == 4:
            raise ValueError("no fp32")
        q = ops.quantize(x, recipe, **options)
        return replace(q, codes=q.codes ^ 1) if x.shape[1] == 48 else q
"""
BACKEND = "trusted_kernels:Kernels"

Lines = list[dict[str, Any]]
"""A journal: the header, then the records, without lines of elapsed time and of loaded sources."""
Edit = Callable[[Lines], object]
"""Damages a journal in place, or gives the bytes of the damaged file."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: `run` holds a run of six cases, and `host.json` is the baseline of it."""
    path = tmp_path_factory.mktemp("trust")
    (path / "cases").mkdir()
    (path / "cases" / "small.toml").write_text(CASES)
    (path / "trusted_kernels.py").write_text(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", [*sys.path])
        result = narrowgauge("run", "--backend", BACKEND, "-n", 1, "--report-dir", "run")
        assert result.exit_code == 1, result.output
        accept(read_trusted(Path("run")), Path("host.json"), Console(file=io.StringIO()))
        yield path
    sys.modules.pop("trusted_kernels", None)


@pytest.fixture(scope="module")
def lines(folder: Path) -> Lines:
    found = [json.loads(line) for line in (folder / "run" / JOURNAL_NAME).read_text().splitlines()]
    return [line for line in found if "elapsed" not in line and "loaded" not in line]


def narrowgauge(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def damage(folder: Path, lines: Lines, edit: Edit) -> Path:
    """A report folder with a damaged journal."""
    damaged = copy.deepcopy(lines)
    content = edit(damaged)
    (folder / "damaged").mkdir(exist_ok=True)
    (folder / "damaged" / JOURNAL_NAME).write_bytes(content if isinstance(content, bytes) else text_of(damaged))
    return folder / "damaged"


def text_of(lines: Lines) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def gate(folder: Path, lines: Lines, edit: Edit) -> Any:
    """The gate over a damaged journal."""
    damage(folder, lines, edit)
    return narrowgauge("gate", "--run", folder / "damaged", "--baseline", folder / "host.json")


@pytest.mark.long
def test_a_run_without_damage_passes(folder: Path, lines: Lines) -> None:
    """The run has records of each kind: correct, wrong, without a result, not supported, a product, a module."""
    assert sorted(line["verdict"] for line in lines[1:]) == ["error", "fail", *["pass"] * 4, "unsupported"]
    for path in ("run", "damaged"):
        judged = gate(folder, lines, lambda _: None)
        assert (judged.exit_code, judged.stderr) == (0, ""), path
    for edit in (lambda lines: lines[1:].reverse(), lambda lines: lines.insert(2, {"elapsed": 0.5})):
        assert gate(folder, lines, edit).exit_code == 0
    assert {"bound", "boundary", "exact", "guard", "repeat"} <= {
        one["rule"] for line in lines[1:] for one in line["stages"]
    }


# Damaged columns.


def of(lines: Lines, operation: str, verdict: str = "pass") -> dict[str, Any]:
    """The first record of an operation with a verdict."""
    return next(line for line in lines[1:] if (line["operation"], line["verdict"]) == (operation, verdict))


def replaced(column: str, value: Any, operation: str = "gemm", verdict: str = "pass") -> Edit:
    return lambda lines: of(lines, operation, verdict).update({column: value})


def removed(column: str) -> Edit:
    return lambda lines: of(lines, "gemm").pop(column)


def values_for(column: str, kind: str) -> list[Any]:
    """Values that a column of this type cannot have in the record of a correct product."""
    if kind == "str":
        empty = [] if column in ("file", "options", "declares", *FREE) else [""]
        return [7, None, ["x"], *(["x"] if column in FREE else empty)]
    if kind.startswith("list"):
        return ["x", None, {}, [None], [math.nan] if "dict" not in kind else [{}]]
    if kind.startswith("bool"):
        return ["x", 1]
    signed = [] if column == "sqnr_db" else [-1, math.inf, 10**400]
    return ["x", True, math.nan, [], *signed, *([] if "None" in kind else [None])]


OF_ID = ("operation", "recipe", "dtype", "inputs", "flags")
FREE = ("stage", "message", "known", "shrunk", "saved", "save_note", "baseline")
"""Columns of text that are empty in the record of a pass."""


def columns() -> Iterator[tuple[str, str, Edit]]:
    for column in fields(Record):
        yield f"without {column.name}", column.name, removed(column.name)
        for value in values_for(column.name, str(column.type)):
            expected = f"{column.name}[0]: key " if value == [{}] else f"{column.name} is "
            if isinstance(value, list) and str(column.type).startswith("list") and value != [{}]:
                expected = f"{column.name}[0] is " if column.name != "sweep" or value == [None] else "sweep is nan"
            expected = "its columns are those of" if value == "" and column.name in OF_ID else expected
            yield f"{column.name} = {value!r:.20}", expected, replaced(column.name, value)
    for key in ENTRIES["stages"]:
        yield f"a stage without {key}", f"stages[0]: key {key!r} is missing", in_entry("stages", key, "gemm")
        for value in ([], math.nan, *([-1] if _ENTRY_TYPES["stages"][key] is not str else [])):
            yield f"{key} of a stage = {value!r}", f"stages[0].{key}", in_entry("stages", key, "gemm", value)
    for column_, operation, verdict in (
        ("accuracy", "linear", "pass"), ("explanations", "quantize", "fail"), ("findings", "quantize", "fail"),
    ):  # fmt: skip
        for key in ENTRIES[column_]:
            expected = f"{column_}[0]: key {key!r} is missing"
            yield f"{column_} without {key}", expected, in_entry(column_, key, operation, verdict=verdict)
            edit = in_entry(column_, key, operation, 1.5j, verdict=verdict)
            yield f"{key} of {column_}", f"{column_}[0].{key}", edit


MISSING = object()


def in_entry(column: str, key: str, operation: str, value: Any = MISSING, *, verdict: str = "pass") -> Edit:
    def edit(lines: Lines) -> None:
        entry = of(lines, operation, verdict)[column][0]
        if value is MISSING:
            del entry[key]
        else:
            entry[key] = {"not": "of a type"} if value == 1.5j and key not in OBJECTS else 5 if value == 1.5j else value

    return edit


OBJECTS = ("modulo", "heat", "census", "table")


@pytest.mark.sampled(34)
@pytest.mark.parametrize(("expected", "edit"), [pytest.param(*case[1:], id=case[0]) for case in columns()])
def test_a_damaged_column_is_refused_by_name(folder: Path, lines: Lines, expected: str, edit: Edit) -> None:
    with pytest.raises(JournalError) as error:
        read_trusted(damage(folder, lines, edit))
    message = str(error.value)
    assert expected in message
    assert "is no record: " in message or "damaged: the run cannot be trusted; run its cases again:\n" in message


# Columns that contradict each other.


def stage_with(operation: str = "gemm", by: str = "bound", **changes: Any) -> Edit:
    """A change of the first stage with a rule, in the record of a pass."""

    def edit(lines: Lines) -> None:
        next(one for one in of(lines, operation)["stages"] if one["rule"] == by).update(changes)

    return edit


def without_stages(lines: Lines) -> None:
    of(lines, "gemm")["stages"] = []


def without_a_comparison(lines: Lines) -> None:
    kept = of(lines, "swizzle", "unsupported")
    kept |= {"verdict": "pass", "message": "", "input_digest": "1" * 16, "output_digest": "1" * 16}


def passing(lines: Lines) -> None:
    """The failure calls itself a pass, and its stages stay wrong."""
    of(lines, "quantize", "fail").update(verdict="pass", message="")


def right_stages(lines: Lines) -> None:
    """Every stage of the failure is right, and its verdict stays."""
    failed = of(lines, "quantize", "fail")
    for one in failed["stages"]:
        one.update(mismatches=0, max_ulp=None, sentence="")
    failed.update(mismatches=0, max_ulp=None, stage="", findings=[])


def bins(**changes: int) -> Edit:
    """A change of the counts of the histogram, by `bin<number>`."""

    def edit(lines: Lines) -> None:
        histogram = of(lines, "gemm")["budget_histogram"]
        for name, change in changes.items():
            histogram[int(name.removeprefix("bin"))] += change

    return edit


CONTRADICTIONS: dict[str, tuple[Edit, str]] = {
    "a failure that calls itself a pass": (passing, "verdict is pass, and the stage 'codes' is wrong"),
    "a pass with a wrong stage": (stage_with(sentence="off"), "stage is '', and 'output' by its stages"),
    "a pass with wrong elements": (stage_with(mismatches=1), "mismatches is 0, and 1 by its stages"),
    "wrong elements without a sentence": (stage_with(max_ulp=3), "has wrong elements, and no sentence"),
    "a failure without a wrong stage": (right_stages, "verdict is fail, and no stage is wrong"),
    "more compared": (replaced("compared", 10**6), "compared is 1000000, and "),
    "a stage with fewer compared": (stage_with(compared=1), "by its stages"),
    "fewer wrong": (replaced("mismatches", 1, "quantize", "fail"), "mismatches is 1, and "),
    "a smaller distance": (replaced("max_ulp", 0, "quantize", "fail"), "max_ulp is 0, and "),
    "another first stage": (replaced("stage", "scales", "quantize", "fail"), "stage is 'scales', and 'codes'"),
    "a message of another stage": (replaced("message", "scales: off", "quantize", "fail"), "message is 'scales: off'"),
    "nothing was compared": (without_a_comparison, "verdict is pass, and nothing was compared"),
    "no stages": (without_stages, "compared is "),
    "a pass with a message": (replaced("message", "off"), "message is 'off'"),
    "a pass known to fail, without its message": (replaced("known", "ties (https://x)"), "known is 'ties"),
    "a pass with a stage": (replaced("stage", "output"), "stage is 'output', and '' by its stages"),
    "a pass with an explanation": (
        lambda lines: of(lines, "gemm").update(explanations=of(lines, "quantize", "fail")["explanations"]),
        "verdict is pass, and explanations is ",
    ),
    "a pass with a finding": (
        lambda lines: of(lines, "gemm").update(findings=of(lines, "quantize", "fail")["findings"]),
        "findings has a stage that is not wrong",
    ),
    "a budget above 1": (replaced("budget_max", 1.0001), "verdict is pass, and budget_max is 1.0001, above 1"),
    "a budget of a failure, infinite in a pass": (replaced("budget_max", math.inf), "budget_max is inf"),
    "a smaller largest budget": (replaced("budget_max", 0.0), "budget_p99 is "),
    "outputs above their budget": (bins(bin0=-1, bin10=1), "in the last bin of budget_histogram"),
    "more budgets than outputs": (bins(bin0=1000), "budget_histogram counts "),
    "a negative count": (bins(bin3=-1000), "budget_histogram is ["),
    "no histogram": (replaced("budget_histogram", []), "budget_histogram is []"),
    "a histogram of ten bins": (replaced("budget_histogram", [0] * 10), "budget_histogram has 10 numbers, not 11"),
    "a sweep of five": (replaced("sweep", [1.0] * 5), "sweep has 5 numbers, not 6"),
    "a sweep above 1": (replaced("sweep", [1.0] * 5 + [1.5]), "sweep is 1.5, not a share from 0 to 1"),
    "a share above 1": (replaced("exact_share", 1.5), "exact_share is 1.5, not a share from 0 to 1"),
    "shares above 1 together": (
        lambda lines: of(lines, "gemm").update(exact_share=1.0, ordered_share=1.0),
        "exact_share and ordered_share are 2.0 together",
    ),
    "a share of no whole number": (replaced("exact_share", 0.12345), "no whole number of 384 outputs"),
    "an interval narrower than its mean": (replaced("interval_ulps_max", 0), "interval_ulps_mean is "),
    "an interval alone": (replaced("interval_ulps_mean", None), "interval_ulps_mean is None"),
    "a budget of no product": (replaced("budget_max", 0.5, "quantize"), "budget_max is 0.5, and no stage has"),
    "excused elements": (stage_with("quantize", "exact", excused=10**6), "than compared elements"),
    "an excused share": (replaced("excused_share", 0.5, "gemm"), "excused_share is 0.5, and None by its stages"),
    "draws without statistics": (replaced("draws", 5), "draws is 5, which contradicts"),
    "GPU memory on a CPU": (replaced("bytes_peak", 5), "bytes_peak is 5"),
    "a verdict of no kind": (replaced("verdict", "passed"), "verdict is 'passed', not pass, fail"),
    "a tier of no kind": (replaced("tier", "slow"), "tier is 'slow', not quick, full"),
    "a rule of no kind": (stage_with(rule="cosine"), "].rule is 'cosine', not exact, bound"),
    "another rule of a stage": (
        stage_with("quantize", "exact", rule="bound"), "a stage has the rule bound, and exact_share is None",
    ),
    "exact in place of a bound": (stage_with(rule="exact"), "has unbounded elements, and the rule exact"),
    "a stage without a name": (stage_with(stage=""), "has no name"),
    "no digest": (replaced("output_digest", ""), "verdict is pass, and output_digest is empty"),
    "a digest of no kind": (replaced("output_digest", "xyz"), "output_digest is 'xyz', not 16 hexadecimal digits"),
    "a digest of another length": (replaced("input_digest", "abc"), "input_digest is 'abc', not 16 hexadecimal"),
    "an error without a message": (replaced("message", "", "quantize", "error"), "verdict is error, and message is"),
    "a failure that is not supported": (
        replaced("verdict", "unsupported", "quantize", "fail"), "verdict is unsupported, and stages is ",
    ),
    "an unsupported failure that is known": (
        replaced("known", "ties", "swizzle", "unsupported"), "verdict is unsupported, and known is 'ties'",
    ),
    "an unknown column": (replaced("verdict_", "pass"), "column 'verdict_' is unknown"),
    "an unknown key of a stage": (stage_with(weight=3), "key 'weight' is unknown"),
    "a note without a sentence": (replaced("notes", [{"cause": "x"}]), "notes[0]: key 'sentence' is missing"),
    "a note that is a number": (replaced("notes", [{"cause": 3, "sentence": ""}]), "notes[0].cause is 3, not str"),
    "an accuracy of no number": (in_entry("accuracy", "cosine", "linear", 1.5), "accuracy[0].cosine is 1.5"),
    "an accuracy that is not finite": (in_entry("accuracy", "sqnr_db", "linear", math.nan), "accuracy[0].sqnr_db is"),
    "an accuracy of no tensor": (in_entry("accuracy", "tensor", "linear", "z"), "accuracy[0].tensor is 'z', not y"),
    "another backend": (replaced("backend", "native"), f"backend is 'native', and the header has '{BACKEND}'"),
    "another device": (replaced("device", "cuda"), "device is 'cuda', and the header has 'cpu'"),
    "another seed": (replaced("seed", 7), "seed is 7, and the header has 0"),
    "another shape": (replaced("shape", "16x1024x25"), "and its columns are those of 'gemm/nvfp4/16x1024x25/"),
    "a shape of many digits": (
        lambda lines: of(lines, "gemm").update(
            shape="9" * 5000, case=f"gemm/nvfp4/{'9' * 5000}/bf16xbf16-bf16/rounding/tn"
        ),
        "not sizes joined by x",
    ),
    "no shape": (
        lambda lines: of(lines, "gemm").update(shape="a", case="gemm/nvfp4/a/bf16xbf16-bf16/rounding/tn"),
        "shape is 'a', not sizes joined by x",
    ),
    "a control character": (replaced("stage", "\x1b[2J::error"), r"x1b[2J::error', and ''"),
    "a case that was not selected": (
        lambda lines: lines[0]["cases"].remove(of(lines, "gemm")["case"]), "is not in cases of the header",
    ),
    "a case with two records": (lambda lines: lines.append(lines[1]), "is there 2 times"),
    "a later pass of the failure": (
        lambda lines: lines.append(of(lines, "quantize") | {"case": of(lines, "quantize", "fail")["case"]}),
        "and its columns are those of",
    ),
}  # fmt: skip
HEADER: dict[str, tuple[Edit, str]] = {
    **{
        f"{name} = {value!r}": (lambda lines, name=name, value=value: lines[0].update({name: value}), f": {name}")
        for name, values in {
            "backend": (7, None, "native"), "device": (7, "tpu", "cuda"), "seed": ("0", True, 0.5, 3),
            "cases": ("x", [7], None), "environment": ([], {"GPU": 7}), "sources": ([], {"harness": 7}),
            "shard": (3,), "selection": (None, "ab"), "schedules": ("1", 0, True), "sanitize": ("no", 1),
        }.items()
        for value in values
    },
    **{
        f"{part} of other sources": (
            lambda lines, part=part: lines[0]["sources"].update({part: "00000000"}),
            f"sources: {part} has changed since the run: '00000000' in its header",
        )
        for part in ("kernels", "reference", "harness", "backend")
    },
    "no source of the harness": (lambda lines: lines[0]["sources"].pop("harness"), "harness has changed since the run"),
    "another kernel hash": (
        lambda lines: lines[0]["environment"].update({"kernel sources": "1"}),
        "environment: kernel sources has changed since the run: '1'",
    ),
    "a case twice": (lambda lines: lines[0]["cases"].append(lines[0]["cases"][0]), "header: cases has "),
    **{
        f"{name} of the environment": (
            lambda lines, name=name: lines[0]["environment"].update({name: "other"}), f"header: {name} is ",
        )
        for name in ("backend", "device", "seed", "schedules")
    },
    "a GPU that is none": (
        lambda lines: [line.update(device="cuda") for line in lines] and lines[0]["environment"].update(device="cuda"),
        "device is cuda, and GPU in environment is ",
    ),
}  # fmt: skip


FILES: dict[str, tuple[Edit, str]] = {
    "an empty file": (lambda lines: b"", "holds no whole line"),
    "no header": (lambda lines: text_of(lines[1:]), "is a journal of version None"),
    "the header last": (lambda lines: text_of([*lines[1:], lines[0]]), "is a journal of version None"),
    "two headers": (lambda lines: text_of([lines[0], *lines]), "line 2 is no record"),
    "a header without a key": (lambda lines: text_of([{**lines[0], "seeds": 0}, *lines[1:]]), "'seeds' is unknown"),
    "another schema": (lambda lines: text_of([{**lines[0], "schema": 7}, *lines[1:]]), "with records of schema 7"),
    "a line of text": (lambda lines: text_of(lines) + b"ok\n", "is not JSON"),
    "an empty line": (lambda lines: text_of(lines) + b"\n{}\n", "is not JSON"),
    "a line of a list": (lambda lines: text_of(lines) + b"[]\n", "is list, and not an object"),
    "a line of NUL": (lambda lines: text_of(lines) + b"\0\0\n", "is not JSON"),
    "a record without a case": (lambda lines: text_of(lines) + b'{"verdict": "pass"}\n', "is no record"),
    "a record without a verdict": (lambda lines: text_of(lines) + b'{"case": "a"}\n', "is no record"),
    "a case that is a list": (
        lambda lines: text_of(lines) + b'{"case": ["a"], "verdict": "pass"}\n', "case is ['a'], not str"
    ),
    "a verdict given twice": (
        lambda lines: text_of(lines).replace(b'"verdict": "fail"', b'"verdict": "fail", "verdict": "fail"'),
        "the key 'verdict' occurs twice",
    ),
    "a seed given twice": (
        lambda lines: text_of(lines).replace(b'{"backend"', b'{"seed": 3, "backend"', 1),
        "line 1 is not JSON: the key 'seed' occurs twice",
    ),
    "deep lists": (lambda lines: text_of(lines) + b"[" * 10**5 + b"\n", "nested too deep"),
    "a short record before the record": (
        lambda lines: lines.insert(1, {"elapsed": 1.0, "case": lines[1]["case"], "verdict": "pass"}),
        "is there 2 times",
    ),
    "a time that is not finite": (lambda lines: text_of(lines) + b'{"elapsed": NaN}\n', "elapsed is nan"),
    "a time below 0": (lambda lines: text_of(lines) + b'{"elapsed": -1.0}\n', "elapsed is -1.0"),
    "a time of text": (lambda lines: text_of(lines) + b'{"elapsed": "1"}\n', "is no record"),
}  # fmt: skip
TABLES = CONTRADICTIONS | HEADER | FILES


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("edit", "expected"), [pytest.param(*case, id=name) for name, case in TABLES.items()])
def test_a_run_that_contradicts_itself_is_refused(folder: Path, lines: Lines, edit: Edit, expected: str) -> None:
    judged = gate(folder, lines, edit)
    assert (judged.exit_code, judged.stdout) == (2, ""), judged.output
    assert expected in judged.stderr
    assert not any(ord(character) < 32 and character != "\n" for character in judged.stderr)


WORSE: dict[str, tuple[Edit, str]] = {
    "a record is missing": (lambda lines: lines.pop(), "interrupted: 1\n"),
    "the last line is cut": (lambda lines: text_of(lines)[:-9], "interrupted: 1\n"),
    "a case is not selected": (
        lambda lines: lines[0]["cases"].remove(lines.pop()["case"]), "did not run: 1\n",
    ),
    "no records": (lambda lines: text_of(lines[:1]), "nothing ran: 1\n"),
    "a shard": (lambda lines: lines[0].update(shard="1/2", selection="ab"), "a part: 1\n"),
    "another seed": (
        lambda lines: [line.update(seed=3) for line in lines] and lines[0]["environment"].update(seed="3"),
        "another seed: 1\n",
    ),
    "the failure is an error": (replaced("verdict", "error", "quantize", "fail"), "error, was fail"),
    "the error is a crash": (replaced("verdict", "crash", "quantize", "error"), "crash, was error"),
    "a wider interval": (replaced("interval_ulps_max", 10**9), "widest interval "),
    "a budget of a failure that is not finite": (
        lambda lines: of(lines, "quantize", "fail").update(
            budget_max=math.inf, budget_p99=1.0, budget_histogram=[0] * 10 + [1],
            stages=[*of(lines, "quantize", "fail")["stages"], stage("output", "bound", 1)],
            compared=of(lines, "quantize", "fail")["compared"] + 1,
        ),
        "not finite: 1\n",
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("edit", "expected"), [pytest.param(*case, id=name) for name, case in WORSE.items()])
def test_a_consistent_run_that_is_worse_has_another_exit_status(
    folder: Path, lines: Lines, edit: Edit, expected: str
) -> None:
    judged = gate(folder, lines, edit)
    assert (judged.exit_code, judged.stderr) == (1, ""), judged.output
    assert " ".join(expected.split()) in " ".join(judged.stdout.split())  # lines are wrapped


def test_further_commands_refuse_the_run_of_the_gate(folder: Path, lines: Lines) -> None:
    gate(folder, lines, replaced("budget_max", math.nan))
    expected = "budget_max is nan, not a finite number"
    for command in (
        ("baseline", "accept", "--run", "damaged", "--baseline", "other.json"),
        ("compare", "run", "damaged"),
        ("compare", "damaged", "run"),
    ):
        result = narrowgauge(*command)
        assert (result.exit_code, expected in result.stderr) == (2, True), command
    assert not Path("other.json").exists()
    gate(folder, lines, lambda lines: lines[0]["sources"].update(harness="0"))
    assert narrowgauge("compare", "run", "damaged").exit_code == 0
    assert narrowgauge("baseline", "accept", "--run", "damaged", "--baseline", "other.json").exit_code == 0


# Further commands, and facts that a process cannot verify.


def test_a_changed_kernel_is_refused_until_it_runs_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "trusted_kernels.py"
    path.write_text(f"{KERNELS}\n# changed\n")
    result = narrowgauge("gate", "--run", "run", "--baseline", "host.json")
    assert (result.exit_code, "trusted_kernels.py has changed since the run" in result.stderr) == (2, True)
    path.unlink()
    result = narrowgauge("gate", "--run", "run", "--baseline", "host.json")
    path.write_text(KERNELS)
    assert result.exit_code == 0
    assert "not verified: 1\n" in result.stdout
    assert f"trusted_kernels.py is not in {folder}" in result.stdout


@pytest.mark.parametrize(("content", "status"), [(b"kept", 0), (b"changed", 2), (None, 0)])
def test_captured_tensors_are_compared_if_their_file_is_there(
    content: bytes | None, status: int, tmp_path: Path
) -> None:
    from narrowgauge.harness.records.environment import source_hashes

    path = tmp_path / "x.npy"
    path.write_bytes(b"kept")
    finished = run(record("x.npy:x", file=str(path)), sources=source_hashes("native", str(path)))
    saved(tmp_path / "run", finished)
    assert narrowgauge("baseline", "accept", "--run", tmp_path / "run", "--baseline", tmp_path / "b").exit_code == 0
    path.unlink() if content is None else path.write_bytes(content)
    result = narrowgauge("gate", "--run", tmp_path / "run", "--baseline", tmp_path / "b")
    assert result.exit_code == status
    assert ("sources: input has changed" in result.stderr) is (status == 2)
    assert ("not verified: 1\n" in result.stdout) is (content is None)


# Records.


HONEST = [
    record(),
    product(),
    wrong(),
    record(verdict="crash", message="the process died", stages=[], compared=0, output_digest=""),
    record(verdict="error", message="after the case the GPU reports an error"),
    record(verdict="timeout", message="not run: hangs", known="hangs (https://x)", stages=[], compared=0),
    record(known="ties (https://x)", message="passes, though it is known to fail: delete l"),
    record(shape="0x64", stages=[stage("codes", "exact", 0), stage("memory", "guard", 2)], compared=2),
    product(verdict="fail", stage="output", message="output: inf", mismatches=1, budget_max=math.inf,
            stages=[stage("output", "bound", 561, mismatches=1, sentence="inf")],
            budget_histogram=[560, *[0] * 9, 1]),
    record(stages=[stage("codes", "statistics", 100)], draws=100, p_value=0.5),
    record(stages=[stage("codes", "boundary", 100, excused=7)], excused_share=0.07),
    record(stages=[stage("memory", "guard", 1, mismatches=3, sentence="wrote"), stage("codes", "exact", 99)],
           verdict="fail", stage="memory", message="memory: wrote", mismatches=3),
    record(notes=[{"cause": "changes-rounding-mode", "sentence": "rounding mode is up"}]),
    record(sqnr_db=-math.inf),
]  # fmt: skip


@pytest.mark.parametrize("honest", HONEST, ids=range(len(HONEST)))
def test_a_record_that_the_runner_can_make(honest: dict[str, Any]) -> None:
    assert record_problems(honest) == []
    assert record_problems(json.loads(json.dumps(honest))) == []
