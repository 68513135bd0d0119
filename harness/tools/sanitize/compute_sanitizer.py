"""Running cases on a GPU under compute-sanitizer, and finding the cases with errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.tools.sanitize.report import ToolReport, parse

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""memcheck: accesses out of bounds or misaligned. racecheck: races in shared memory. initcheck: reads of uninitialized
global memory. synccheck: barriers that not all threads reach."""
BATCH = 64
"""Cases in a process. Starting a process costs more than most cases."""
_PLACES = ("/usr/local/cuda/bin",)
_ROOT = Path(__file__).parents[4]
"""Parent folder of the package, for PYTHONPATH of the process that runs the cases."""


class ComputeSanitizerError(Exception):
    """The tool is missing or did not run. The message has its output and the remedy."""


@dataclass(frozen=True)
class SanitizerRequest:
    """Settings of a run under the tool."""

    tool: str
    backend: str = "native"
    seed: int = 0
    timeout: float = 300.0
    """Seconds for each case of a process, and for its start."""


RunBatch = Callable[[Sequence[Case], SanitizerRequest], tuple[ToolReport, list[dict[str, Any]], str]]
"""Runs cases in a process under the tool. Returns the tool's report, the records of the finished cases, and how the
process ended: "" (normally), "timeout", or the end of its output."""


def find_tool() -> str:
    """Path of compute-sanitizer. Raises ComputeSanitizerError if it is not installed."""
    folders = [
        os.environ.get("PATH", ""),
        *(f"{cuda_home}/bin" for cuda_home in (os.environ.get("CUDA_HOME"),) if cuda_home),
        *_PLACES,
    ]
    if path := shutil.which("compute-sanitizer", path=os.pathsep.join(folders)):
        return path
    raise ComputeSanitizerError(
        f"compute-sanitizer is neither on the PATH nor in $CUDA_HOME/bin or {', '.join(_PLACES)}; it comes with the "
        "CUDA toolkit (Debian and Ubuntu from NVIDIA's repository: apt install cuda-sanitizer-13-0)"
    )


def examine(
    cases: Sequence[Case], request: SanitizerRequest, run: RunBatch, on_record: Callable[[dict[str, Any]], None]
) -> None:
    """Run the cases and pass the record of each to `on_record`. The verdict is `fail` if the tool has findings.

    Cases share processes. If a process has findings, its halves run separately, down to single cases: correct cases
    cost a single run, and a fault, which makes the GPU unusable for its process, affects no other case. Raises
    ComputeSanitizerError if the tool does not run.
    """
    for start in range(0, len(cases), BATCH):
        _examine(cases[start : start + BATCH], request, run, on_record)


def _examine(
    cases: Sequence[Case], request: SanitizerRequest, run: RunBatch, on_record: Callable[[dict[str, Any]], None]
) -> None:
    report, records, ended = run(cases, request)
    if report.clean and len(records) == len(cases) and not ended:
        for record in records:
            on_record(record)
    elif len(cases) > 1:
        half = len(cases) // 2
        for part in (cases[:half], cases[half:]):
            _examine(part, request, run, on_record)
    else:
        on_record(_single_case_record(cases[0], request, report, records, ended))


def _single_case_record(
    case: Case, request: SanitizerRequest, report: ToolReport, records: list[dict[str, Any]], ended: str
) -> dict[str, Any]:
    """Record of a case that ran alone, with findings or without a regular end."""
    empty = new_record(case, backend=request.backend, device="cuda", seed=request.seed).to_dict()
    record = records[0] if records else empty
    if report.clean and records:
        return record  # the process failed after the case
    if report.findings or report.errors:
        sentences = [finding.sentence for finding in report.findings] or [
            f"{report.errors} errors, none of which was read"
        ]
        own_failure = f"; without the tool, {record['verdict']}: {record['message']}" if record["message"] else ""
        omitted = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
        message = f"{request.tool}: {'; '.join(sentences[:3])}{omitted}{own_failure}"
        return record | {"verdict": "fail", "stage": request.tool, "message": message}
    if ended == "timeout":
        return empty | {"verdict": "timeout", "message": f"no result after {_limit(1, request):g} s"}
    return empty | {
        "verdict": "crash",
        "message": f"the process ended without a record: {ended or 'it sentences nothing'}",
    }


def _limit(cases: int, request: SanitizerRequest) -> float:
    return request.timeout * (1 + cases)


def run_under(cases: Sequence[Case], request: SanitizerRequest) -> tuple[ToolReport, list[dict[str, Any]], str]:
    """Run cases in a process under the tool, as a `RunBatch`. Raises ComputeSanitizerError if the tool does not run."""
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as name:
        folder = Path(name)
        request_file, log, lines = folder / "cases.json", folder / "log", folder / "records.jsonl"
        content = {
            "backend": request.backend, "seed": request.seed, "records": str(lines),
            "cases": [(case.file, case.id) for case in cases],
        }  # fmt: skip
        request_file.write_text(json.dumps(content), encoding="utf-8")
        # API errors that the caller handles are no findings. Without torch's cache every tensor has its own CUDA
        # allocation, so the tool knows its end.
        command = [
            find_tool(), "--tool", request.tool, "--log-file", str(log), "--print-limit", "1000", "--report-api-errors",
            "no", "--target-processes", "application-only", sys.executable, "-m",
            "narrowgauge.harness.tools.sanitize.sanitized_process", str(request_file),
        ]  # fmt: skip
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(paths)}
        ended, output = "", ""
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=_limit(len(cases), request))
            except subprocess.TimeoutExpired:
                ended = "timeout"
            finally:
                with suppress(ProcessLookupError):  # the child of the tool, and processes started by it
                    os.killpg(process.pid, signal.SIGKILL)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        report = parse(text)
        if report.errors is None and ended != "timeout":
            output_text = " ".join((text + output).split())[-500:] or "it said nothing"
            raise ComputeSanitizerError(f"{command[0]} --tool {request.tool} gave no summary: {output_text}")
        if process.returncode != 0 and not ended:
            ended = " ".join(output.split())[-300:] or f"exit status {process.returncode}"
        return report, _read(lines), ended


def _read(lines: Path) -> list[dict[str, Any]]:
    """Records in a file, without a truncated last line."""
    text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
