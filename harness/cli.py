"""The `narrowgauge` command: what pytest is not for. torch and pandas are imported by the commands that need them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from harness.case import Case
    from harness.saved import Saved

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
Workers = Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core, or one a GPU.")]
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
    workers: Workers = 0,
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


@app.command("soak")
def soak_cases(
    paths: Paths = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds.")] = 200,
    first: Annotated[
        int | None, typer.Option("--from", min=0, help="The first seed (default: one drawn afresh, and printed).")
    ] = None,
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=1.0, help="Share of the cases: the cheapest that hold all recipes.")
    ] = 0.1,
    backend: BackendOption = "native",
    device: Device = "cpu",
    workers: Workers = 0,
) -> None:
    """Run a part of the cases over many seeds. Exit status 0 only if every run passed."""
    chosen_from = _select(paths, tier, keyword, None, None, None)
    _check_device(device)
    import secrets

    from rich.console import Console

    from harness.backend import BackendError
    from harness.pool import Settings
    from harness.soak import chosen, soak

    start = secrets.randbelow(1 << 31) if first is None else first
    settings = Settings(backend, device, workers=workers or _default_workers(device))
    try:
        passed = soak(chosen(chosen_from, share), range(start, start + seeds), settings, Console())
    except BackendError as error:
        _stop(str(error))
    raise typer.Exit(0 if passed else 1)


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
    saved: Annotated[
        Path | None, typer.Option("--saved", help="A saved failure of the case: its inputs, and the shape they have.")
    ] = None,
) -> None:
    """Run one case and print its stages, element by element, around one place."""
    from harness.schema import nearest

    kept = None
    if saved is not None:
        if paths or source or recipes or seed:
            _stop("--saved has its own inputs; --cases, --input, --recipe and --seed do not go with it")
        kept = _saved(saved, case_id)
        case, seed = kept.case, kept.seed
    else:
        cases = {case.id: case for case in _select(paths, "full", "", source, None, recipes)}
        if case_id not in cases:
            _stop(f"no case is called {case_id!r}{nearest(case_id, cases)}")
        case = cases[case_id]
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
            case, load_backend(backend, device), device=device, seed=seed, source=source, at=place,
            saved=kept.inputs if kept else None,
        )  # fmt: skip
    except (BackendError, Unsupported) as error:
        _stop(str(error))
    raise typer.Exit(0 if right else 1)


def _saved(path: Path, case_id: str) -> Saved:
    """The failure in a file, which has to be one of the case."""
    from harness.saved import SavedError, load

    try:
        found = load(path)
    except SavedError as error:
        _stop(str(error))
    if found.id != case_id:
        _stop(f"{path}: holds a failure of {found.id}, not of {case_id}")
    return found


@app.command("dialect")
def which_dialect(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="native, reference, or package.module:Name.")],
    name: Annotated[str, typer.Option("--recipe", help="What its quantize is asked for.")] = "nvfp4",
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Say which library's bytes a quantizer gives. Exit status 0 only if it is one's on every input."""
    _check_device(device)
    from rich.console import Console

    from harness.backend import BackendError, Unsupported, load_backend
    from harness.dialect import sentence, survey, table

    try:
        found = survey(load_backend(backend, device), name, device=device, seed=seed)
    except (BackendError, Unsupported, ValueError) as error:
        _stop(str(error))
    console = Console(highlight=False)
    console.print(f"{found.recipe}   backend {backend}, device {device}, seed {seed}", markup=False)
    console.print(table(found))
    console.print(sentence(found), markup=False, soft_wrap=True)
    raise typer.Exit(0 if found.spoken else 1)


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


@app.command()
def mutants(
    paths: Paths = None,
    keyword: Annotated[str, typer.Option("-k", help="pytest keyword expression on the names of mutants.")] = "",
    workers: Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 60.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where mutants.json goes.")] = Path("reports/latest"),
) -> None:
    """Run wrong kernels against the quick tier. Exit status 0 only if each is killed, or equivalent and is not."""
    from harness.case import matching
    from harness.mutants.mutant import MutantFileError, load_all
    from harness.mutants.session import run_session

    try:
        known = load_all()
        chosen = [mutant for mutant in known if matching(keyword)(mutant.name)]
    except (MutantFileError, ValueError) as error:
        _stop(str(error))
    if not chosen:
        _stop(f"no mutant of {len(known)} is selected by -k {keyword!r}")
    cases = _select(paths, "quick", "", None, None, None)
    passed = run_session(chosen, cases, report_dir, workers=workers or _default_workers("cpu"), timeout=timeout)
    raise typer.Exit(0 if passed else 1)


def main() -> None:
    """Entry point; the output is UTF-8 whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    app()
