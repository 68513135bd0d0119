"""The commands, each in a file of its name, in the groups and the order of `--help`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from narrowgauge.harness.cli.baseline import accept
from narrowgauge.harness.cli.bench import bench
from narrowgauge.harness.cli.build import build
from narrowgauge.harness.cli.certify import certify_backend
from narrowgauge.harness.cli.check import check_function
from narrowgauge.harness.cli.checkpoint import checkpoint
from narrowgauge.harness.cli.compare import compare_runs
from narrowgauge.harness.cli.contract import contract_strength
from narrowgauge.harness.cli.dialect import which_dialect
from narrowgauge.harness.cli.doctor import doctor
from narrowgauge.harness.cli.gate import gate_run
from narrowgauge.harness.cli.init import init
from narrowgauge.harness.cli.list import list_cases
from narrowgauge.harness.cli.merge import merge_shards
from narrowgauge.harness.cli.mutants import mutants
from narrowgauge.harness.cli.old_names import with_present_names
from narrowgauge.harness.cli.order import find_order
from narrowgauge.harness.cli.parity import compare_backends
from narrowgauge.harness.cli.power import power_of
from narrowgauge.harness.cli.predict import predict
from narrowgauge.harness.cli.run import run
from narrowgauge.harness.cli.sanitize import sanitize_cases
from narrowgauge.harness.cli.show import show
from narrowgauge.harness.cli.soak import soak_cases
from narrowgauge.harness.cli.tolerance import tolerance_table
from narrowgauge.harness.cli.train import train_layers
from narrowgauge.spec import VERSION


class Command(TyperCommand):
    """A command that takes the old names of its options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_present_names(str(self.name), args))


class Groups(TyperGroup):
    """Help with a section for each group of commands, and of each command the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            rows = sections.setdefault(str(command.rich_help_panel), [])  # type: ignore[attr-defined]
            rows.append((name.ljust(width), command.get_short_help_str(limit=len(command.help or ""))))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="narrowgauge",
    cls=Groups,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
baselines = typer.Typer(help="Keep the baselines that the gate holds runs against.", no_args_is_help=True)
baselines.command("accept")(accept)
_GROUPS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run and read": {
        "run": run,
        "list": list_cases,
        "show": show,
        "soak": soak_cases,
        "sanitize": sanitize_cases,
        "merge": merge_shards,
        "doctor": doctor,
    },
    "Judge one thing": {
        "check": check_function,
        "contract": contract_strength,
        "certify": certify_backend,
        "power": power_of,
        "parity": compare_backends,
        "dialect": which_dialect,
        "order": find_order,
        "predict": predict,
        "tolerance": tolerance_table,
        "checkpoint": checkpoint,
        "train": train_layers,
    },
    "Keep": {"init": init, "gate": gate_run, "compare": compare_runs, "baseline": baselines},
    "Develop narrowgauge": {"build": build, "bench": bench, "mutants": mutants},
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


for title, group in _GROUPS.items():
    for name, command in group.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=title)
        else:
            app.command(name, cls=Command, rich_help_panel=title)(command)


def main() -> None:
    """Entry point. Output is UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    app()
