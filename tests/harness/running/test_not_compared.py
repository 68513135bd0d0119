"""Reports name stages and cases that were not compared; a run without any comparison fails."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.cli import app
from narrowgauge.harness.operations.quantize.operation import OPERATION
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.records.record import elements_compared, succeeded
from narrowgauge.harness.report import report, text
from narrowgauge.harness.report.report import print_summary
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.quantized import gemm_quantized
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, quantize, without_amax

OPERANDS = [f"{operand}.{stage}" for operand in "xw" for stage in ("amax", "tensor scale", "scales", "codes")]


def run(case, **doors):
    return run_case(case, backend(**doors)).to_dict()


def everywhere(records, tmp_path):
    """Texts of page, Markdown and terminal, without line breaks and escapes."""
    report.write(records, {}, tmp_path, elapsed=1.0)
    console = Console(file=io.StringIO(), width=400)
    print_summary(records, console)
    page, summary = ((tmp_path / name).read_text(encoding="utf-8") for name in ("index.html", "summary.md"))
    return [page.replace("&#39;", "'"), summary.replace("\\", ""), console.file.getvalue()]


def refuse(*_, **__):
    raise NotImplementedError("both halves or nothing")


def both_alone(x, recipe, *, rowwise=True, columnwise=True):
    return reference.quantize_both(x, recipe) if rowwise and columnwise else refuse()


# A stage that a backend does not show.

HIDDEN = {
    "nothing": (QUANTIZE, {"quantize": reference.quantize, "dequantize": reference.dequantize}, []),
    "no amax": (
        QUANTIZE, {"quantize": quantize(without_amax), "dequantize": reference.dequantize}, ["amax", "tensor scale"],
    ),
    "no dequantize": (QUANTIZE, {"quantize": reference.quantize}, ["values"]),
    "a dequantize that refuses": (QUANTIZE, {"quantize": reference.quantize, "dequantize": refuse}, ["values"]),
    "halves together only": (replace(QUANTIZE, usage="both"), {"quantize_both": both_alone}, ["halves"]),
    "no unswizzle": (
        case_from_labels("swizzle", "", (130, 5), "", "position"), {"swizzle": reference.swizzle}, ["unswizzle"],
    ),
    "no quantize": (GEMM, {"gemm": reference.gemm}, OPERANDS),
    "a quantize that refuses": (GEMM, {"gemm": reference.gemm, "quantize": refuse}, OPERANDS),
    "no tensor scale to show": (
        replace(GEMM, recipe="mxfp8-e4m3"), {"gemm": reference.gemm}, ["x.scales", "x.codes", "w.scales", "w.codes"],
    ),
    "no quantize of an output": (
        case_from_labels(
            "gemm-quantized", "mxfp8-e4m3", (16, 64, 32), "bf16xbf16-fp32", "normal", ("tn", "mxfp8-e4m3")
        ),
        {"gemm": reference.gemm, "gemm_quantized": gemm_quantized},
        ["x.scales", "x.codes", "w.scales", "w.codes", "output.scales", "output.codes"],
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "doors", "stages"), HIDDEN.values(), ids=HIDDEN)
def test_a_stage_that_is_not_shown_is_named(case, doors, stages, tmp_path):
    record = run(case, **doors)
    assert (record["verdict"], record["message"]) == ("pass", "")
    shown = [entry["stage"] for entry in record["stages"]]
    assert not set(stages) & set(shown)
    counts = "1 case each" if len(stages) > 1 else "1 case"
    listed = f"{case.operation} {', '.join(stages)} ({counts})"
    line = f"Not compared: stages not observed: {listed}." if stages else "Every stage of every case was compared."
    assert text.not_compared([record]) == line
    for said in everywhere([record], tmp_path):
        assert line in said


# Missing methods and unsupported cases.


def test_a_missing_method_is_named_and_fails_only_if_strict(tmp_path):
    records = [run(case, quantize=reference.quantize, dequantize=reference.dequantize) for case in (QUANTIZE, GEMM)]
    assert [record["verdict"] for record in records] == ["pass", "unsupported"]
    assert (succeeded(records), succeeded(records, strict=True)) == (True, False)
    assert not succeeded(records[1:])
    line = "Not compared: 1 case (1 unsupported); not supported: backend wrong has no gemm (1)."
    for said in everywhere(records, tmp_path):
        assert line in said
        assert "1 case passed" in said
        assert "; 1 unsupported" in said
    for said in everywhere(records, tmp_path)[:2]:
        assert GEMM.id in said


# Nothing compared.


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [StageResult("memory", "guard", 5), StageResult("repeat", "repeat", 1000)],
        [StageResult("memory", "guard", 5), StageResult("codes", "exact", 0)],
    ],
    ids=["no stage", "itself alone", "an empty stage"],
)
def test_a_case_that_compares_nothing_is_an_error(monkeypatch, stages, tmp_path):
    operation = replace(OPERATION, judge=lambda *_: Outcome(stages))
    monkeypatch.setattr("narrowgauge.harness.operations.registry.operation_of", lambda _: operation)
    record = run(QUANTIZE, quantize=reference.quantize)
    assert (record["verdict"], record["message"]) == ("error", "nothing was compared")
    assert elements_compared(record) == 0
    for said in everywhere([record], tmp_path):
        assert "Not compared: 1 case (1 error)." in said
        assert "1 of 1 case did not pass" in said
    for said in everywhere([record], tmp_path)[:2]:
        assert "nothing was compared" in said
        assert QUANTIZE.id in said


def test_an_empty_case_passes_and_a_run_of_empty_cases_does_not(tmp_path):
    blocks_alone = replace(QUANTIZE, recipe="mxfp8-e4m3")  # of nothing too, NVFP4 has an amax
    empty = [run(replace(blocks_alone, shape=shape), quantize=reference.quantize) for shape in ((0, 64), (3, 0))]
    assert [(record["verdict"], record["message"]) for record in empty] == [("pass", "")] * 2
    assert all(record["compared"] for record in empty)  # guards and repeats were counted
    assert not succeeded(empty)
    for said in everywhere(empty, tmp_path):
        assert "2 cases passed" in said
        assert "but nothing was compared" in said
    page, summary, terminal = everywhere(empty, tmp_path)
    assert '<h1 class="banner fail">' in page
    assert summary.startswith("# ✗ narrowgauge: 2 cases passed")
    assert "✗ 2 cases passed, but nothing was compared" in terminal
    full = run(QUANTIZE, quantize=reference.quantize)
    assert succeeded([*empty, full])
    compared = sum(entry["compared"] for entry in full["stages"] if entry["stage"] not in ("memory", "repeat"))
    assert elements_compared(full) == compared
    assert f"3 cases passed, {text.number(compared)} elements compared" in everywhere([*empty, full], tmp_path)[2]


EMPTY = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "mxfp8-e4m3"
shape = [[0, 32], [16, 0]]
dtype = "bf16"
inputs = "normal"
"""


def test_a_run_of_empty_cases_ends_with_status_1(tmp_path, monkeypatch):
    (tmp_path / "empty.toml").write_text(EMPTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "narrowgauge.harness.tools.run_cases.run_cases",
        lambda cases, settings, on_record, on_loaded: [
            on_record(run_case(case, load_backend(settings.backend)).to_dict()) for case in cases
        ],
    )
    result = CliRunner().invoke(app, ["run", "empty.toml", "--backend", "reference"])
    assert result.exit_code == 1, result.output
    assert "2 cases passed, but nothing was compared" in result.stdout
