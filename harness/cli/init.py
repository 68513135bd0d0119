"""`narrowgauge init`: the first files of a repository that tests its own kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import stop

NEXT = """next, in this folder:
  narrowgauge run kernel_cases --backend narrowgauge_backend:Backend
  narrowgauge gate --baseline reports/baselines/host.json
  pytest kernel_cases"""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the repository.")] = Path(),
    action: Annotated[
        str,
        typer.Option("--action", help="GitHub action of the workflow: owner/narrowgauge@ref.", show_default=False),
    ] = "",
) -> None:
    """Write a first backend, cases, a baseline and a workflow.

    Also settings of pytest and git, and a hook of pre-commit. No file is overwritten: for a file of yours the lines to
    add are printed.
    """
    from narrowgauge.harness.tools.init.repository import InitError, initialize

    if action and not re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./-]+", action):
        stop(f"--action is {action!r}; it is the repository on GitHub that has narrowgauge: owner/narrowgauge@ref")
    try:
        steps = initialize(folder, action)
    except InitError as error:
        stop(str(error))
    for step in steps:
        typer.echo(f"{step.state:<10} {step.path}" + (f": {step.remedy}" if step.remedy else ""))
    typer.echo(NEXT)
