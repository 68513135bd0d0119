"""`narrowgauge bench`: time the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import Device, Paths, stop
from narrowgauge.harness.cli.selection import require_device, select_cases

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case


def bench(
    paths: Paths = None,
    device: Device = "cpu",
    keyword: Annotated[
        str, typer.Option("-k", help="pytest keyword expression on what is timed: 'gemm', 'nvfp4 and both'.")
    ] = "",
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", help="MxK of a matrix, MxKxN of a product; may be given again, or with commas."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds, and the first size of each kind.")] = False,
    compiling: Annotated[
        bool, typer.Option("--compile", help="Time torch.compile of the reference too, which takes minutes.")
    ] = False,
    growing: Annotated[
        bool, typer.Option("--growth", help="In place of rates: time and memory against elements, to 2^26 or 2^30.")
    ] = False,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="In place of rates: the harness's own time, of cases of the quick tier.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the page and the tables go.")] = Path("reports/bench"),
) -> None:
    """Time the kernels beside ceilings measured in the same run, and judge what they give.

    Exit status 0 only if every output of the kernels is right. How fast it is does not count, nor what peers give.
    """
    if growing and overhead:
        stop("--growth and --overhead are tables of their own; give one of them")
    if paths and not overhead:
        stop(f"case files are for --overhead, which is not given: {paths[0]}")
    if overhead:
        cases = select_cases(paths, "quick", "", None, None, None)
        require_device(device)
        _print_overhead(cases, device)
        return
    from narrowgauge.harness.cases.case import matching
    from narrowgauge.harness.tools.bench.run_bench import run_growth, run_rates
    from narrowgauge.harness.tools.bench.tasks import LAUNCH, tasks

    if growing and (keyword or sizes or quick or compiling):
        stop("--growth has sizes and operations of its own; -k, --sizes, --quick and --compile do not go with it")
    try:
        listed = [size for option in sizes or [] for size in option.split(",")]
        chosen = tasks(device, listed, keyword, quick=quick) if device in ("cpu", "cuda") else []
        launches = matching(keyword)(LAUNCH)
    except ValueError as error:
        stop(str(error))
    require_device(device)
    if not chosen and not launches:
        stop(f"nothing is selected by -k {keyword!r}")
    try:
        if growing:
            passed = run_growth(device, out)
        else:
            passed = run_rates(chosen, device, out, quick=quick, compiling=compiling, launches=launches)
    except OSError as error:
        stop(f"{out}: the report cannot be written: {error.strerror}")
    raise typer.Exit(0 if passed else 1)


def _print_overhead(cases: list[Case], device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.harness.backends.backend import load_backend
    from narrowgauge.harness.tools.bench.overhead import overheads, sample_cases

    table = Table("quick cases, of a core", "ms a case", "the harness's own", "cases", box=None)
    rows = overheads(sample_cases(cases), load_backend("native", device), device)
    for row in rows:
        table.add_row(row.operation, f"{row.milliseconds:.1f}", f"{row.harness:.1f}", str(row.cases))
    count = sum(row.cases for row in rows)
    total, harness = (sum(row.cases * getattr(row, name) for row in rows) for name in ("milliseconds", "harness"))
    table.add_row("together", f"{total / count:.1f}", f"{harness / count:.1f}", str(count))
    Console(width=100).print(table)
