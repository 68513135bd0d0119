"""Options shared by several commands, and ending a command with a usage error."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from narrowgauge.harness.machine.plain_text import escape


def _case_paths(paths: list[Path] | None) -> list[Path] | None:
    """Paths of case files, with the folder of the package for `shipped`. Only a path of this name imports the cases."""
    if not any(path.parts[:1] == ("shipped",) for path in paths or ()):
        return paths
    from narrowgauge.harness.cases.case_file import case_path

    return [case_path(path) for path in paths or ()]


Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CASES",
        callback=_case_paths,
        help="Case files or folders; shipped: those of the package (default: cases/ if it has any, else shipped).",
        show_default=False,
    ),
]
Contracts = Annotated[
    list[Path] | None,
    typer.Option("--contract", help="File of contracts: its usual cases, beside CASES; may be given again."),
]
BACKEND_HELP = "native, reference, package.module:Name or folder/file.py:Name."


def backend_name(name: str) -> str:
    """The name of --backend or BACKEND, that of a file from the current folder."""
    if ".py" not in name:
        return name
    from narrowgauge.harness.backends.loading import normal_name

    return normal_name(name)


BackendOption = Annotated[str, typer.Option("--backend", callback=backend_name, help=BACKEND_HELP)]
BackendArgument = Annotated[str, typer.Argument(metavar="BACKEND", callback=backend_name, help=BACKEND_HELP)]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the inputs, beside each case's id.")]
Tier = Annotated[str, typer.Option("--tier", help="quick or full; full has every case. quick has more on a GPU.")]
Keyword = Annotated[str, typer.Option("-k", help="pytest keyword expression on case ids: '1024 and bf16'.")]
Input = Annotated[
    Path | None,
    typer.Option("--input", help="Captured tensors (.safetensors, .npy, .npz, .pt) in place of the case files."),
]
Tensors = Annotated[
    list[str] | None, typer.Option("--tensor", help="Of --input: this tensor alone; may be given again.")
]


def divided(values: list[str] | None) -> list[str] | None:
    """Callback of an option that is given again, or once with commas between its values."""
    return [part for value in values for part in value.split(",")] if values else values


def sizes_of(shapes: list[str] | None) -> list[tuple[int, ...]] | None:
    """The sizes of each shape such as "64x256". Ends the command for another text."""
    for text in shapes or ():
        if not all(part.isdecimal() for part in text.split("x")):
            stop(f"--shape is {text!r}; it is a shape such as 64x256, or MxKxN of a product")
    return [tuple(map(int, text.split("x"))) for text in shapes] if shapes else None


Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        callback=divided,
        help="Of --input (default: nvfp4) and of contracts: this recipe; may be given again, or with commas.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", callback=divided, help="MxKxN of a product; may be given again, or with commas."),
]
ShardOption = Annotated[
    str, typer.Option("--shard", help="2/4: the second of four parts of the cases, which take about equally long.")
]
Durations = Annotated[
    Path | None,
    typer.Option("--durations", help="Of --shard: report or journal of an earlier run, whose times divide the cases."),
]
KnownFile = Annotated[
    Path | None,
    typer.Option("--known", help="Ledger of known failures (default: known.toml beside the case files)."),
]
Link = Annotated[
    str, typer.Option("--link", help="Address of the report, for summary.md (default: the run's, in a GitHub job).")
]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Do not append the run to history.sqlite beside --report-dir.")
]
Workers = Annotated[int, typer.Option("-n", min=0, help="Most workers; 0 is one a core, with GPUs at most 6 a GPU.")]
Schedules = Annotated[
    int, typer.Option("--schedules", min=1, help="Seeded shuffles of threads, beside forward and reverse; on a CPU.")
]
Sanitize = Annotated[
    bool, typer.Option("--sanitize", help="Build native kernels with sanitizers (address, undefined); on a CPU.")
]
RunPath = Annotated[Path, typer.Option("--run", help="A finished run: the --report-dir that it wrote.")]
BaselinePath = Annotated[Path, typer.Option("--baseline", help="The baseline: reports/baselines/host.json.")]


def _use_operations(paths: list[Path] | None) -> list[Path] | None:
    """Make the operations of --operations known to this process and to those that it starts."""
    if paths:
        from narrowgauge.harness.cases.operations import OperationError, use_operations

        try:
            use_operations(paths)
        except OperationError as error:
            stop(str(error))
    return paths


Operations = Annotated[
    list[Path] | None,
    typer.Option(
        "--operations", callback=_use_operations, help="File or folder of your own operations; may be given again."
    ),
]


def _use_rules(paths: list[Path] | None) -> list[Path] | None:
    """Make the rules of --rules known to this process and to those that it starts."""
    if paths:
        from narrowgauge.spec.recipes import RuleError, use_rules

        try:
            use_rules(paths)
        except RuleError as error:
            stop(f"--rules {error}")
    return paths


Rules = Annotated[
    list[Path] | None,
    typer.Option("--rules", callback=_use_rules, help="File of your own rules (TOML); may be given again."),
]


def _use_functions(path: Path | None) -> Path | None:
    """Make the errors of --functions known to this process and to those that it starts."""
    if path is not None:
        from narrowgauge.spec.program import FunctionsFileError, use_functions

        try:
            use_functions(path)
        except FunctionsFileError as error:
            stop(f"--functions {error}")
    return path


Functions = Annotated[
    Path | None,
    typer.Option(
        "--functions",
        callback=_use_functions,
        help="File of `doctor --functions --save`: contracts rest on these errors of exp, rsqrt and others.",
    ),
]
USAGE_ERROR = 2
"""Exit status of a command with invalid options."""


def stop(message: str) -> NoReturn:
    """End the command with a message on stderr."""
    typer.echo(f"narrowgauge: {escape(message)}", err=True)
    raise typer.Exit(USAGE_ERROR)


def command_line(command: str, *, without: str) -> str:
    """The command line of this process, without an option. Empty if it is not of this command."""
    words = sys.argv[1:]
    return shlex.join(["narrowgauge", *(word for word in words if word != without)]) if words[:1] == [command] else ""


def default_cases() -> Path:
    """`harness.cases.case_file.default_cases`, imported with the first call: `--help` needs no case."""
    from narrowgauge.harness.cases import case_file

    return case_file.default_cases()
