"""Cases on a GPU under compute-sanitizer: which of them it finds something in, and what."""

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
"""memcheck: accesses out of bounds or misaligned. racecheck: races in shared memory. initcheck: reads of global memory
that nobody wrote. synccheck: barriers that not all threads reach."""
BATCH = 64
"""Cases in one process: starting it costs more than most cases."""
_PLACES = ("/usr/local/cuda/bin",)
_ROOT = Path(__file__).parents[4]
"""Parent folder of the package, for PYTHONPATH of the process that runs the cases."""


class ComputeSanitizerError(Exception):
    """The tool is missing, or did not run: what it said, and what to do."""


@dataclass(frozen=True)
class Request:
    """What is run under the tool."""

    tool: str
    backend: str = "native"
    seed: int = 0
    timeout: float = 300.0
    """Seconds that one case may take; a process may take that much for each, and as much to start."""


Run = Callable[[Sequence[Case], Request], tuple[ToolReport, list[dict[str, Any]], str]]
"""Runs cases in one process under the tool: the report, the records of those that came to their end, and how the
process ended where that was not by itself: "timeout", or its last words."""


def find_tool() -> str:
    """The path of compute-sanitizer. Raises ComputeSanitizerError where it is not installed."""
    folders = [
        os.environ.get("PATH", ""),
        *(f"{home}/bin" for home in (os.environ.get("CUDA_HOME"),) if home),
        *_PLACES,
    ]
    if path := shutil.which("compute-sanitizer", path=os.pathsep.join(folders)):
        return path
    raise ComputeSanitizerError(
        f"compute-sanitizer is neither on the PATH nor in $CUDA_HOME/bin or {', '.join(_PLACES)}; it comes with the "
        "CUDA toolkit (Debian and Ubuntu from NVIDIA's repository: apt install cuda-sanitizer-13-0)"
    )


def examine(cases: Sequence[Case], request: Request, run: Run, on_record: Callable[[dict[str, Any]], None]) -> None:
    """Run the cases and hand over the record of each, `fail` with the tool's findings where it has some.

    Cases share processes. Where something is found in one, its halves are run by themselves, until each finding has its
    own case: what is right costs one run, and a fault, which leaves a GPU that answers no more, costs no other case.
    Raises ComputeSanitizerError where the tool does not run.
    """
    for start in range(0, len(cases), BATCH):
        _examine(cases[start : start + BATCH], request, run, on_record)


def _examine(cases: Sequence[Case], request: Request, run: Run, on_record: Callable[[dict[str, Any]], None]) -> None:
    report, records, ended = run(cases, request)
    if report.clean and len(records) == len(cases) and not ended:
        for record in records:
            on_record(record)
    elif len(cases) > 1:
        half = len(cases) // 2
        for part in (cases[:half], cases[half:]):
            _examine(part, request, run, on_record)
    else:
        on_record(_judged(cases[0], request, report, records, ended))


def _judged(
    case: Case, request: Request, report: ToolReport, records: list[dict[str, Any]], ended: str
) -> dict[str, Any]:
    """The record of one case by itself, in which the tool found something, or which did not come to its end."""
    empty = new_record(case, backend=request.backend, device="cuda", seed=request.seed).to_dict()
    record = records[0] if records else empty
    if report.clean and records:
        return record  # the process ended oddly behind it
    if report.findings or report.errors:
        said = [finding.sentence for finding in report.findings] or [f"{report.errors} errors, none of which was read"]
        before = f"; without the tool, {record['verdict']}: {record['message']}" if record["message"] else ""
        more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
        words = f"{request.tool}: {'; '.join(said[:3])}{more}{before}"
        return record | {"verdict": "fail", "stage": request.tool, "message": words}
    if ended == "timeout":
        return empty | {"verdict": "timeout", "message": f"no result after {_limit(1, request):g} s"}
    return empty | {"verdict": "crash", "message": f"the process ended without a record: {ended or 'it said nothing'}"}


def _limit(cases: int, request: Request) -> float:
    return request.timeout * (1 + cases)


def run_under(cases: Sequence[Case], request: Request) -> tuple[ToolReport, list[dict[str, Any]], str]:
    """Run cases in one process under the tool, as `Run` says. Raises ComputeSanitizerError where it does not run."""
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as name:
        folder = Path(name)
        asked, log, lines = folder / "cases.json", folder / "log", folder / "records.jsonl"
        wanted = {
            "backend": request.backend, "seed": request.seed, "records": str(lines),
            "cases": [(case.file, case.id) for case in cases],
        }  # fmt: skip
        asked.write_text(json.dumps(wanted), encoding="utf-8")
        # Errors of API calls that the caller handles are no findings. Without its cache torch asks CUDA for each
        # tensor, and the tool knows where one ends.
        command = [
            find_tool(), "--tool", request.tool, "--log-file", str(log), "--print-limit", "1000", "--report-api-errors",
            "no", "--target-processes", "application-only", sys.executable, "-m",
            "narrowgauge.harness.tools.sanitize.sanitized_process", str(asked),
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
                with suppress(ProcessLookupError):  # the tool's own child, and what that started
                    os.killpg(process.pid, signal.SIGKILL)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        report = parse(text)
        if report.errors is None and ended != "timeout":
            said = " ".join((text + output).split())[-500:] or "it said nothing"
            raise ComputeSanitizerError(f"{command[0]} --tool {request.tool} gave no summary: {said}")
        if process.returncode != 0 and not ended:
            ended = " ".join(output.split())[-300:] or f"exit status {process.returncode}"
        return report, _read(lines), ended


def _read(lines: Path) -> list[dict[str, Any]]:
    """The records of a file; a last one that was cut short is none."""
    text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
