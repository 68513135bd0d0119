"""`narrowgauge sanitize`: progress bar, report and table for cases under compute-sanitizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
from narrowgauge.harness.records.environment import describe_run
from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report.report import write
from narrowgauge.harness.tools.run_cases import print_result, progress_bar
from narrowgauge.harness.tools.sanitize.compute_sanitizer import RunBatch, SanitizerRequest, examine, run_under


def sanitize_session(
    cases: Sequence[Case], request: SanitizerRequest, directory: Path, run: RunBatch = run_under
) -> bool:
    """Run the cases under the tool, write the report into `directory`, print the summary. True if all cases passed.

    Raises BackendError if the backend cannot be loaded, ComputeSanitizerError if the tool does not run.
    """
    load_backend(request.backend, "cuda")  # raises here instead of failing every case
    console = Console()
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    with progress_bar(console) as progress:
        task = progress.add_task(request.tool, total=len(cases))

        def on_record(record: dict[str, Any]) -> None:
            records.append(record)
            progress.update(task, advance=1)

        examine(cases, request, run, on_record)
    environment = describe_run(backend=request.backend, device="cuda", seed=request.seed)
    elapsed = time.monotonic() - started
    add_baseline_notes(records, environment)
    page = write(records, environment | {"tool": f"compute-sanitizer {request.tool}"}, directory, elapsed=elapsed)
    print_result(records, console)
    console.print(f"{len(records)} cases under {request.tool} in {elapsed:.1f} s; report: {page}", markup=False)
    return succeeded(records)
