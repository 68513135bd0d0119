"""`narrowgauge train`: small transformers under every recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import BackendOption, Device, divided, stop
from narrowgauge.harness.cli.selection import default_workers, require_device


def train_layers(
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            callback=divided,
            help="A training recipe (default: every one, and switches off); may be given again, or with commas.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each training.")] = 200,
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the text, the weights and the batches.")] = 0,
    workers: Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core.")] = 0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/train"),
) -> None:
    """Train a small transformer, and judge each of its steps.

    On a GPU too a process a core: what a step costs is launches, and many share one GPU. After Ctrl-C, SIGTERM or a
    time limit the report has what was done. Exit status 0 only if every stage of every step is right and every training
    learns.
    """
    from narrowgauge.harness.backends.backend import BackendError, load_backend
    from narrowgauge.harness.tools.train.processes import RECIPES, run_session, tasks

    try:
        chosen = tasks(recipes or RECIPES, backend, device, seed=seed, steps=steps)
    except ValueError as error:
        stop(str(error))
    require_device(device)
    try:
        load_backend(backend)
        passed = run_session(chosen, report_dir, workers=workers or default_workers("cpu"))
    except BackendError as error:
        stop(str(error))
    except OSError as error:
        stop(f"{report_dir}: the report cannot be written: {error.strerror}")
    raise typer.Exit(0 if passed else 1)
