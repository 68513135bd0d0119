"""`narrowgauge checkpoint`: judge quantized weights in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import stop


def checkpoint(
    paths: Annotated[list[Path], typer.Argument(help="A .safetensors or .gguf file, its shards, or a folder.")],
    weights: Annotated[
        Path | None, typer.Option("--weights", help="File or folder with the weights that were quantized.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    scales: Annotated[
        str, typer.Option("--scales", help="Names of scales, with {weight} for a matrix: '{weight}.scale'.")
    ] = "",
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path(
        "reports/checkpoint"
    ),
) -> None:
    """Judge quantized weights in files.

    With or without the weights that they were made from. Exit status 0 only if no finding is a failure.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from narrowgauge.harness.machine.plain_text import escape
    from narrowgauge.harness.tools.checkpoint.files import CheckpointError
    from narrowgauge.harness.tools.checkpoint.judge import judge_checkpoint
    from narrowgauge.harness.tools.checkpoint.report import print_result, write

    console = Console()
    bar = Progress(
        BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def on_layer(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=escape(name)[-60:])

    try:
        with bar:
            result = judge_checkpoint(*paths, weights=weights, scales=scales, on_layer=on_layer)
    except CheckpointError as error:
        stop(str(error))
    print_result(result, console, strict=strict)
    try:
        page = write(result, report_dir, strict=strict)
    except OSError as error:
        stop(f"{report_dir}: the report cannot be written: {error.strerror}")
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.passed(strict=strict) else 1)
