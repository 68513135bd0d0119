"""`narrowgauge baseline accept`: a finished run as the baseline."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.harness.cli.options import BaselinePath, RunPath, stop


def accept(baseline: BaselinePath, run: RunPath = Path("reports/latest")) -> None:
    """Make a finished run the baseline, and print what that changes."""
    from rich.console import Console

    from narrowgauge.harness.gate.accept import accept as accept_run
    from narrowgauge.harness.gate.baseline import BaselineError
    from narrowgauge.harness.gate.trust import read_trusted
    from narrowgauge.harness.records.journal import JournalError

    try:
        accept_run(read_trusted(run), baseline, Console())
    except (BaselineError, JournalError) as error:
        stop(str(error))
