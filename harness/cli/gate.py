"""`narrowgauge gate`: a finished run against a baseline."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import BaselinePath, Operations, RunPath, stop


def gate_run(
    baseline: BaselinePath,
    run: RunPath = Path("reports/latest"),
    operations: Operations = None,
    certificates: Annotated[
        list[Path] | None,
        typer.Option("--certificate", help="certificate.json that the kernel must have; may be given again."),
    ] = None,
) -> None:
    """Hold a finished run against a baseline. Exit status 0 only if every case of it ran and no figure is worse; 2 if
    the run cannot be read or trusted."""
    from rich.console import Console

    from narrowgauge.harness.certify.certificate import CertificateError, problems
    from narrowgauge.harness.gate.baseline import BaselineError, read
    from narrowgauge.harness.gate.difference import page_of
    from narrowgauge.harness.gate.gate import judge, next_commands, show
    from narrowgauge.harness.gate.trust import read_trusted, verify_sources
    from narrowgauge.harness.records.journal import JournalError

    try:
        finished = read_trusted(run)
        not_compared = verify_sources(finished, run)
        judgement = judge(finished, read(baseline))
    except JournalError as error:
        stop(str(error) if "\nnext: " in str(error) else f"{error}\nnext: {_again(run)}")
    except BaselineError as error:
        accept = shlex.join(["narrowgauge", "baseline", "accept", "--baseline", str(baseline), "--run", str(run)])
        stop(f"{error}\nnext: {accept}")
    try:
        missing = [problem for file in certificates or () for problem in problems(file, finished)]
    except CertificateError as error:
        stop(str(error))
    for problem in missing:
        judgement.fail("without a certificate", problem)
    for sentence in not_compared:
        judgement.note("not verified", sentence)
    following = next_commands(judgement, finished, baseline, run)
    show(judgement, str(baseline), Console(), page_of(run), following)
    raise typer.Exit(0 if judgement.passed else 1)


def _again(run: Path) -> str:
    """The command that writes a run into the report folder or journal `run`."""
    return shlex.join(["narrowgauge", "run", "--report-dir", str(run.parent if run.suffix == ".jsonl" else run)])
