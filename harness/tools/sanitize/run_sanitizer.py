"""`narrowgauge sanitize`: progress while cases run under compute-sanitizer, report and table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.gate.accepted import say_baseline
from narrowgauge.harness.records.environment import describe_run
from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report.report import write
from narrowgauge.harness.tools.run_cases import print_result, progress_bar
from narrowgauge.harness.tools.sanitize.compute_sanitizer import Request, Run, examine, run_under


def sanitize_session(cases: Sequence[Case], request: Request, directory: Path, run: Run = run_under) -> bool:
    """Run the cases under the tool, write the report into `directory`, print the summary. True where all is right.

    Raises BackendError where the backend cannot be loaded, ComputeSanitizerError where the tool does not run.
    """
    load_backend(request.backend, "cuda")  # or the tool would say it of every case
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
    say_baseline(records, environment)
    page = write(records, environment | {"tool": f"compute-sanitizer {request.tool}"}, directory, elapsed=elapsed)
    print_result(records, console)
    console.print(f"{len(records)} cases under {request.tool} in {elapsed:.1f} s; report: {page}", markup=False)
    return succeeded(records)
