"""The commands, each in a file of its name, in the order of `--help`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from narrowgauge.harness.cli.baseline import accept
from narrowgauge.harness.cli.bench import bench
from narrowgauge.harness.cli.build import build
from narrowgauge.harness.cli.checkpoint import checkpoint
from narrowgauge.harness.cli.compare import compare_runs
from narrowgauge.harness.cli.dialect import which_dialect
from narrowgauge.harness.cli.doctor import doctor
from narrowgauge.harness.cli.gate import gate_run
from narrowgauge.harness.cli.init import init
from narrowgauge.harness.cli.list import list_cases
from narrowgauge.harness.cli.merge import merge_shards
from narrowgauge.harness.cli.mutants import mutants
from narrowgauge.harness.cli.order import find_order
from narrowgauge.harness.cli.predict import predict
from narrowgauge.harness.cli.run import run
from narrowgauge.harness.cli.sanitize import sanitize_cases
from narrowgauge.harness.cli.show import show
from narrowgauge.harness.cli.soak import soak_cases
from narrowgauge.harness.cli.tolerance import tolerance_table
from narrowgauge.harness.cli.train import train_layers
from narrowgauge.spec.version import VERSION

app = typer.Typer(
    name="narrowgauge",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
baselines = typer.Typer(help="Keep the baselines that the gate holds runs against.", no_args_is_help=True)
baselines.command("accept")(accept)
_COMMANDS: dict[str, Callable[..., None]] = {
    "init": init,
    "list": list_cases,
    "run": run,
    "merge": merge_shards,
    "soak": soak_cases,
    "sanitize": sanitize_cases,
    "show": show,
    "dialect": which_dialect,
    "order": find_order,
    "predict": predict,
    "tolerance": tolerance_table,
    "checkpoint": checkpoint,
    "doctor": doctor,
    "build": build,
    "bench": bench,
    "mutants": mutants,
    "train": train_layers,
    "gate": gate_run,
    "compare": compare_runs,
}


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"narrowgauge {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run narrow-precision kernels against a reference that is right to the last bit."""


for name, command in _COMMANDS.items():
    app.command(name)(command)
app.add_typer(baselines, name="baseline")


def main() -> None:
    """Entry point. Output is UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    app()
