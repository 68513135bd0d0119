"""`narrowgauge sanitize`: the output of compute-sanitizer is parsed, and each finding goes to its own case."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness import cli
from narrowgauge.harness.backends.guard import Guard
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import load
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.records.record import Record, new_record
from narrowgauge.harness.tools.sanitize import compute_sanitizer, run_sanitizer, sanitized_process
from narrowgauge.harness.tools.sanitize.compute_sanitizer import (
    ComputeSanitizerError,
    SanitizerRequest,
    examine,
    find_tool,
    run_under,
)
from narrowgauge.harness.tools.sanitize.report import ToolReport, parse
from tests.paths import ROOT

SAMPLES = Path(__file__).parent / "compute_sanitizer"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"

READ = {
    "memcheck": [
        [
            "__global__ read of size 4",
            "memory.cu:15",
            "thread (40, 0, 0)",
            "reads_behind_an_input",
            "2 times",
            "160 bytes",
        ],
        ["__shared__ write of size 4", "memory.cuh:28", "thread (4, 0, 0)", "staged", "0x100 is out of bounds"],
    ],
    "memcheck_older": [["Misaligned __global__ read of size 4", "memory.cu:54", "loads_misaligned", "0x7f54fba00001"]],
    "racecheck": [["Write access at reduce.cuh:31", "amax_bf16", "Read access", "amax.cu:24 [56 hazards]"]],
    "synccheck": [["Barrier error", "Divergent thread(s)", "stuck.cu:4", "block (3, 0, 0) of stuck"]],
    "initcheck": [["Uninitialized", "read of size 1", "thread (7, 1, 0)", "gemm_nvfp4", "0x7f54fba00107"]],
}


def sample(name: str) -> ToolReport:
    return parse((SAMPLES / f"{name}.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", READ)
def test_a_report_is_read(name: str) -> None:
    report = sample(name)
    for finding, words in zip(report.findings, READ[name], strict=True):
        assert [word for word in words if word not in finding.sentence] == []
    assert not report.clean


def test_what_torch_does_itself_is_counted_apart() -> None:
    assert sample("initcheck").in_torch == 1
    alone = (SAMPLES / "initcheck.txt").read_text().split("========= Uninitialized")
    assert not parse(f"{alone[0]}========= Uninitialized{alone[1]}").clean  # the tool did not finish
    assert parse(f"{alone[0]}========= Uninitialized{alone[1]}========= ERROR SUMMARY: 1 error").clean


@pytest.mark.parametrize(("text", "clean"), [
    (CLEAN, True),
    ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
    ("========= ERROR SUMMARY: 3 errors\n", False),  # printed in the words of an unknown version
    ("", False),
    ("========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error: out of memory\n", False),
])  # fmt: skip
def test_only_what_came_to_its_end_and_found_nothing_is_clean(text: str, clean: bool) -> None:
    assert parse(text).clean == clean


CASES = [case_from_labels("quantize", "nvfp4", (16, k), "bf16", "normal") for k in range(16, 16 + 16 * 13, 16)]
REQUEST = SanitizerRequest("memcheck")


CASES_OF_A_FILE = load(ROOT / "cases" / "nvfp4_layout.toml")


def record(case: Case, **changes: Any) -> dict[str, Any]:
    return new_record(case, backend="native", device="cuda", seed=0).to_dict() | changes


class Tool:
    """A tool with findings in the cases of `wrong`. A finding in a case of `fatal` ends the process."""

    def __init__(self, wrong: Sequence[Case], fatal: Sequence[Case] = (), ended: str = "") -> None:
        self.wrong, self.fatal, self.ended = wrong, fatal, ended
        self.runs: list[int] = []

    def __call__(
        self, cases: Sequence[Case], request: SanitizerRequest
    ) -> tuple[ToolReport, list[dict[str, Any]], str]:
        self.runs.append(len(cases))
        report = sample("memcheck") if any(case in self.wrong for case in cases) else parse(CLEAN)
        stop = next((number for number, case in enumerate(cases) if case in self.fatal), len(cases))
        return report, [record(case) for case in cases[:stop]], self.ended if stop < len(cases) else ""


def examined(tool: Tool) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    examine(CASES, REQUEST, tool, records.append)
    assert [r["case"] for r in records] == [case.id for case in CASES]
    return records


def test_cases_that_are_right_cost_one_process() -> None:
    tool = Tool([])
    assert {r["verdict"] for r in examined(tool)} == {"pass"}
    assert tool.runs == [13]


def test_a_finding_goes_to_its_own_case() -> None:
    tool = Tool([CASES[2], CASES[11]])
    records = examined(tool)
    assert [n for n, r in enumerate(records) if r["verdict"] == "fail"] == [2, 11]
    assert records[2]["stage"] == "memcheck"
    sentences = [finding.sentence for finding in sample("memcheck").findings]
    assert records[2]["message"] == "memcheck: " + "; ".join(sentences)
    assert {r["verdict"] for n, r in enumerate(records) if n not in (2, 11)} == {"pass"}


@pytest.mark.parametrize(("ended", "verdict", "message"), [
    ("timeout", "timeout", "no result after 600 s"),
    ("Segmentation fault", "crash", "the process ended without a record: Segmentation fault"),
])  # fmt: skip
def test_a_case_that_ends_its_process_costs_itself(ended: str, verdict: str, message: str) -> None:
    records = examined(Tool([], fatal=[CASES[5]], ended=ended))
    assert [(n, r["verdict"], r["message"]) for n, r in enumerate(records) if r["verdict"] != "pass"] == [
        (5, verdict, message)
    ]


def a_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a script of sh on the PATH as compute-sanitizer. $log is the file of its report, $asked its command."""
    path = folder / "compute-sanitizer"
    path.write_text(
        "#!/bin/sh\necho \"$@\" > " + str(folder / "command") + "\nwhile [ $# -gt 1 ]; do\n"
        "  [ \"$1\" = --log-file ] && log=$2\n  shift\ndone\nasked=$1\n" + script
    )  # fmt: skip
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_tool_is_asked_for_the_cases_and_its_report_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = f'cp $asked {tmp_path}/asked; echo "$PYTORCH_NO_CUDA_MEMORY_CACHING" > {tmp_path}/environ\n'
    a_tool(tmp_path, monkeypatch, f"{keep}cp {SAMPLES}/racecheck.txt $log; echo some words; exit 3")
    report, records, ended = run_under(CASES[:2], SanitizerRequest("racecheck", "mine:Backend", 7))
    assert report.findings == sample("racecheck").findings
    assert (records, ended) == ([], "some words")
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["cases"] == [["", case.id] for case in CASES[:2]]
    assert (asked["backend"], asked["seed"]) == ("mine:Backend", 7)
    assert (tmp_path / "environ").read_text() == "1\n"
    assert "--tool racecheck " in (tmp_path / "command").read_text()


def test_a_tool_that_gives_no_summary_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_tool(tmp_path, monkeypatch, "echo the driver is too old; exit 1")
    with pytest.raises(ComputeSanitizerError, match="--tool memcheck gave no summary: the driver is too old"):
        run_under(CASES[:1], REQUEST)


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_tool(tmp_path, monkeypatch, "sleep 100")
    report, records, ended = run_under(CASES[:1], SanitizerRequest("memcheck", timeout=0.1))
    assert (report.errors, records, ended) == (None, [], "timeout")


def test_a_watched_process_runs_unguarded_until_the_gpu_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = CASES_OF_A_FILE[:3]
    seen = []

    def run_case(case: Case, backend: str, *, device: str, seed: int) -> Record:
        guard, x = Guard(0xA5), torch.arange(12).view(3, 4).T
        guard.place_inputs({"x": x})
        given = guard.inputs_on(x.device)["x"]
        with guard:
            assert torch.empty(3)._base is None, "of its own memory"
        assert (given.stride(), given._base) == (x.stride(), None)
        assert torch.equal(given, x)
        seen.append((case.id, backend, device, seed))
        record = new_record(case, backend=backend, device=device, seed=seed)
        record.verdict = "crash" if case.id == asked[1].id else "pass"
        return record

    monkeypatch.setattr("narrowgauge.harness.running.runner.run_case", run_case)
    monkeypatch.setattr("narrowgauge.harness.backends.backend.load_backend", lambda name, device: name)
    lines = tmp_path / "records.jsonl"
    wanted = {"backend": "mine", "seed": 7, "records": str(lines), "cases": [(case.file, case.id) for case in asked]}
    (tmp_path / "cases.json").write_text(json.dumps(wanted))
    sanitized_process.main(tmp_path / "cases.json")
    assert seen == [(case.id, "mine", "cuda", 7) for case in asked[:2]]
    assert [json.loads(line)["case"] for line in lines.read_text().splitlines()] == [case.id for case in asked[:2]]


def test_a_machine_without_the_tool_gets_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compute_sanitizer, "_PLACES", ())
    with pytest.raises(ComputeSanitizerError, match="compute-sanitizer is neither on the PATH nor in"):
        find_tool()
    result = CliRunner().invoke(cli.app, ["sanitize", "-k", "quantize/nvfp4/256x1024/bf16/normal"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("narrowgauge: compute-sanitizer is neither on the PATH nor in")


# Its runs.


# The command.


@pytest.mark.parametrize("wrong", [False, True])
def test_a_session_ends_with_a_report(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_sanitizer, "load_backend", lambda *_: None)
    counts = {"compared": 4, "mismatches": 0, "max_ulp": None, "excused": 0, "unbounded": None}
    stages = [{"stage": "codes", "rule": "exact", "sentence": "", **counts}]

    def run(cases: Sequence[Case], request: SanitizerRequest) -> tuple[ToolReport, list[dict[str, Any]], str]:
        records = [record(case, compared=4, stages=stages) for case in cases]
        return (sample("memcheck") if wrong else parse(CLEAN)), records, ""

    assert run_sanitizer.sanitize_session(CASES[:1], REQUEST, tmp_path, run) is not wrong
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "compute-sanitizer memcheck" in page
    assert ("memory.cu:15" in page) is wrong
    assert ("memory.cu:15" in capsys.readouterr().out) is wrong
