"""`narrowgauge bench`: time the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import Device, divided, stop
from narrowgauge.harness.cli.selection import require_device


def bench(
    device: Device = "cpu",
    keyword: Annotated[
        str, typer.Option("-k", help="pytest keyword expression on what is timed: 'gemm', 'nvfp4 and both'.")
    ] = "",
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            callback=divided,
            help="MxK of a matrix, MxKxN of a product; may be given again, or with commas.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds, and the first size of each kind.")] = False,
    compiling: Annotated[
        bool, typer.Option("--compile", help="Time torch.compile of the reference too, which takes minutes.")
    ] = False,
    growing: Annotated[
        bool, typer.Option("--growth", help="In place of rates: time and memory against elements, to 2^26 or 2^30.")
    ] = False,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/bench"),
) -> None:
    """Time the native kernels, and judge what they give.

    Ceilings are measured in the same run. Exit status 0 only if every output of the kernels is right. How fast it is
    does not count, nor what peers give.
    """
    from narrowgauge.harness.cases.case import matching
    from narrowgauge.harness.tools.bench.run_bench import run_growth, run_rates
    from narrowgauge.harness.tools.bench.tasks import LAUNCH, tasks

    if growing and (keyword or sizes or quick or compiling):
        stop("--growth has shapes and operations of its own; -k, --shape, --quick and --compile do not go with it")
    try:
        chosen = tasks(device, sizes or [], keyword, quick=quick) if device in ("cpu", "cuda") else []
        launches = matching(keyword)(LAUNCH)
    except ValueError as error:
        stop(str(error))
    require_device(device)
    if not chosen and not launches:
        stop(f"nothing is selected by -k {keyword!r}")
    try:
        if growing:
            passed = run_growth(device, report_dir)
        else:
            passed = run_rates(chosen, device, report_dir, quick=quick, compiling=compiling, launches=launches)
    except OSError as error:
        stop(f"{report_dir}: the report cannot be written: {error.strerror}")
    raise typer.Exit(0 if passed else 1)
