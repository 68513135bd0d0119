"""The `narrowgauge` command: what pytest is not for. torch and pandas are imported by the commands that need them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from harness.case import Case

app = typer.Typer(
    name="narrowgauge",
    help="Run narrow-precision kernels against a reference that is right to the last bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CASES = Path("cases")

Paths = Annotated[list[Path] | None, typer.Argument(help="Case files or folders (default: cases).", show_default=False)]
BackendOption = Annotated[str, typer.Option("--backend", help="native, reference, or package.module:Name.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the inputs, beside each case's id.")]
Tier = Annotated[str, typer.Option("--tier", help="quick or full; full has every case.")]
Keyword = Annotated[str, typer.Option("-k", help="pytest keyword expression on case ids: '1024 and bf16'.")]
Input = Annotated[
    Path | None,
    typer.Option("--input", help="Captured tensors (.safetensors, .npy, .npz, .pt) in place of the case files."),
]
Tensors = Annotated[
    list[str] | None, typer.Option("--tensor", help="Of --input: this tensor alone; may be given again.")
]
Recipes = Annotated[
    list[str] | None, typer.Option("--recipe", help="Of --input: this recipe (default: nvfp4); may be given again.")
]
USAGE_ERROR = 2


def _stop(message: str) -> NoReturn:
    typer.echo(f"narrowgauge: {message}", err=True)
    raise typer.Exit(USAGE_ERROR)


def _select(
    paths: list[Path] | None,
    tier: str,
    keyword: str,
    source: Path | None,
    tensors: list[str] | None,
    recipes: list[str] | None,
) -> list[Case]:
    from harness.case import CaseFileError, load_all, select
    from harness.schema import TIERS, nearest

    if tier not in TIERS:
        _stop(f"--tier is {tier!r}{nearest(tier, TIERS)}; it can be {', '.join(TIERS)}")
    if source is None and tensors:
        _stop("--tensor names tensors of an --input file, and none is given")
    if source is None and recipes:
        _stop("--recipe names recipes for an --input file, and none is given")
    if source is not None and paths:
        _stop(f"cases come from case files or from --input, not from both: {paths[0]} and {source}")
    try:
        if source is None:
            cases = load_all(paths or [CASES])
        else:
            from harness.capture import Captured, captured_cases, refused
            from reference.recipes import recipe

            captured = Captured.load(source, tensors)
            names = [str(recipe(name)) for name in recipes or ["nvfp4"]]
            for note in [captured.note(), *refused(captured, recipes=names)]:
                if note:
                    typer.echo(note, err=True)
            cases = captured_cases(captured, recipes=names)
        chosen = select(cases, tier=tier, keyword=keyword)
    except (CaseFileError, ValueError) as error:
        _stop(str(error))
    if not chosen:
        _stop(f"no case of {len(cases)} is selected by --tier {tier}" + (f" -k {keyword!r}" if keyword else ""))
    return chosen


def _check_device(device: str) -> None:
    from harness.schema import nearest

    devices = ("cpu", "cuda")
    if device not in devices:
        _stop(f"--device is {device!r}{nearest(device, devices)}; it can be {', '.join(devices)}")
    from harness.backend import BackendError, check_device

    try:
        check_device(device)
    except BackendError as error:
        _stop(str(error))


@app.command("list")
def list_cases(
    paths: Paths = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    source: Input = None,
    tensors: Tensors = None,
    recipes: Recipes = None,
) -> None:
    """Print the ids of the cases that a run with the same arguments would run."""
    chosen = _select(paths, tier, keyword, source, tensors, recipes)
    for case in chosen:
        typer.echo(case.id)
    typer.echo(f"{len(chosen)} cases", err=True)


@app.command()
def run(
    paths: Paths = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Seed = 0,
    source: Input = None,
    tensors: Tensors = None,
    recipes: Recipes = None,
    workers: Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core, or one a GPU.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 300.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/latest"),
) -> None:
    """Run cases and write a report. Exit status 0 only if every case passed."""
    from harness.session import run_session

    chosen = _select(paths, tier, keyword, source, tensors, recipes)
    _check_device(device)
    from harness.backend import BackendError
    from harness.pool import Settings

    settings = Settings(
        backend, device, seed, workers=workers or _default_workers(device), timeout=timeout,
        input_path="" if source is None else str(source),
    )  # fmt: skip
    try:
        passed = run_session(chosen, settings, report_dir)
    except BackendError as error:
        _stop(str(error))
    raise typer.Exit(0 if passed else 1)


def _default_workers(device: str) -> int:
    import os

    return (os.cpu_count() or 1) if device == "cpu" else 1


@app.command()
def show(
    case_id: Annotated[str, typer.Argument(metavar="CASE", help="A case id, as `list` and reports print it.")],
    paths: Annotated[list[Path] | None, typer.Option("--cases", help="Case files (default: cases).")] = None,
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Seed = 0,
    source: Input = None,
    recipes: Recipes = None,
    at: Annotated[str, typer.Option("--at", help="row,column to show (default: the first wrong element).")] = "",
) -> None:
    """Run one case and print its stages, element by element, around one place."""
    from harness.schema import nearest

    cases = {case.id: case for case in _select(paths, "full", "", source, None, recipes)}
    if case_id not in cases:
        _stop(f"no case is called {case_id!r}{nearest(case_id, cases)}")
    _check_device(device)
    from harness.backend import BackendError, Unsupported, load_backend
    from harness.show import show_case

    try:
        place = tuple(int(part) for part in at.split(",")) if at else None
        if place is not None and (len(place) != 2 or min(place) < 0):
            raise ValueError(at)
    except ValueError:
        _stop(f"--at is {at!r}; it is a row and a column: --at 3,17")
    try:
        right = show_case(
            cases[case_id], load_backend(backend, device), device=device, seed=seed, source=source, at=place
        )
    except (BackendError, Unsupported) as error:
        _stop(str(error))
    raise typer.Exit(0 if right else 1)


@app.command()
def doctor() -> None:
    """Say what this machine can do, and what to install for what is missing."""
    from rich.console import Console
    from rich.table import Table

    from harness.environment import facts

    table = Table(show_header=False, box=None)
    for fact in facts():
        table.add_row(
            "✓" if fact.ok else "–", fact.name, fact.value + (f"\n{fact.remedy}" if fact.remedy and not fact.ok else "")
        )
    Console().print(table, markup=False)


@app.command()
def bench(device: Device = "cpu") -> None:
    """Time the reference and the native kernels beside ceilings measured in the same run."""
    _check_device(device)
    from rich.console import Console
    from rich.table import Table

    from harness.bench import measure

    table = Table("", "ms", "spread", "rate", "× ceiling", box=None)
    for row in measure(device):
        ratio = "" if row.ceiling is None else f"{row.milliseconds / row.ceiling:.2f}"
        rate = f"{row.rate:.0f} M {row.unit}"
        table.add_row(row.name, f"{row.milliseconds:.2f}", f"{row.spread:.2f}", rate, ratio)
    Console(width=100).print(table)


def main() -> None:
    """Entry point; the output is UTF-8 whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    app()
