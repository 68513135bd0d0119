"""`narrowgauge mutants`: detection of wrong kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import Operations, Paths, Rules, default_cases, stop
from narrowgauge.harness.cli.selection import choose_cases, default_workers, ledger_of, load_cases


def mutants(
    paths: Paths = None,
    operations: Operations = None,
    rules: Rules = None,
    keyword: Annotated[str, typer.Option("-k", help="pytest keyword expression on the names of mutants.")] = "",
    workers: Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core.")] = 0,
    search: Annotated[
        bool, typer.Option("--search", help="Do not begin with the recorded cases; record what fails.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 60.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where mutants.json goes.")] = Path("reports/latest"),
) -> None:
    """Run wrong kernels, which the quick tier must catch.

    The kernels are in a checkout of narrowgauge. With --operations, the known mistakes of these operations. Exit status
    0 only if each is killed, or equivalent and is not.
    """
    from narrowgauge.harness.cases.case import matching
    from narrowgauge.harness.cases.operations import OPERATIONS, outside_operations
    from narrowgauge.harness.tools.mutants.deviations import mistakes
    from narrowgauge.harness.tools.mutants.mutant import MutantFileError, load_all
    from narrowgauge.harness.tools.mutants.run_mutants import run_session

    try:
        all_mutants = [] if operations else load_all()
        chosen = [mutant for mutant in all_mutants if matching(keyword)(mutant.name)]
        known = mistakes(outside_operations() if operations else OPERATIONS, keyword)
    except (MutantFileError, ValueError) as error:
        stop(str(error))
    if not chosen and not known:
        stop(f"no mutant of {len(all_mutants)} is selected by -k {keyword!r}")
    cases = load_cases(paths, None, None, None)
    ledger = ledger_of(None, paths or [default_cases()], cases)
    quick = choose_cases(cases, "quick", "", "cpu")
    # Known failures fail without a mutant too.
    cases = [case for case in quick if not ledger.entries_for(case.id, "native", "cpu")]
    workers = workers or default_workers("cpu")
    passed = run_session(chosen, cases, report_dir, workers=workers, search=search, timeout=timeout, known=known)
    raise typer.Exit(0 if passed else 1)
