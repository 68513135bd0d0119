"""`narrowgauge sanitize`: cases under compute-sanitizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import BackendOption, Keyword, Operations, Paths, Rules, Seed, Tier, stop
from narrowgauge.harness.cli.selection import require_device, select_cases


def sanitize_cases(
    paths: Paths = None,
    operations: Operations = None,
    rules: Rules = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    tool: Annotated[
        str, typer.Option("--tool", help="memcheck, racecheck (shared memory), initcheck or synccheck.")
    ] = "memcheck",
    backend: BackendOption = "native",
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 300.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/sanitize"),
) -> None:
    """Run cases on a GPU under compute-sanitizer. Exit status 0 only if it finds nothing and every case passed."""
    from narrowgauge.harness.cases.keys import nearest
    from narrowgauge.harness.tools.sanitize.compute_sanitizer import TOOLS, ComputeSanitizerError, find_tool

    if tool not in TOOLS:
        stop(f"--tool is {tool!r}{nearest(tool, TOOLS)}; it can be {', '.join(TOOLS)}")
    try:
        find_tool()
    except ComputeSanitizerError as error:
        stop(str(error))
    chosen = select_cases(paths, tier, keyword, None, None, None, "cuda")
    require_device("cuda")
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.report.report import ReportError
    from narrowgauge.harness.tools.sanitize.compute_sanitizer import SanitizerRequest
    from narrowgauge.harness.tools.sanitize.run_sanitizer import sanitize_session

    try:
        passed = sanitize_session(chosen, SanitizerRequest(tool, backend, seed, timeout), report_dir)
    except (BackendError, ComputeSanitizerError, ReportError) as error:
        stop(str(error))
    raise typer.Exit(0 if passed else 1)
