"""The `narrowgauge` command: what pytest is not for. torch and pandas are imported by the commands that need them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from harness.case import Case
    from harness.known import Ledger
    from harness.saved import Saved
    from harness.shard import Part

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
Workers = Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core, at most 16 a GPU.")]
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
    return _chosen(_load(paths, source, tensors, recipes), tier, keyword)


def _chosen(cases: list[Case], tier: str, keyword: str) -> list[Case]:
    from harness.case import select
    from harness.schema import TIERS, nearest

    if tier not in TIERS:
        _stop(f"--tier is {tier!r}{nearest(tier, TIERS)}; it can be {', '.join(TIERS)}")
    try:
        chosen = select(cases, tier=tier, keyword=keyword)
    except ValueError as error:
        _stop(str(error))
    if not chosen:
        _stop(f"no case of {len(cases)} is selected by --tier {tier}" + (f" -k {keyword!r}" if keyword else ""))
    return chosen


def _load(
    paths: list[Path] | None, source: Path | None, tensors: list[str] | None, recipes: list[str] | None
) -> list[Case]:
    from harness.case import CaseFileError, load_all

    if source is None and tensors:
        _stop("--tensor names tensors of an --input file, and none is given")
    if source is None and recipes:
        _stop("--recipe names recipes for an --input file, and none is given")
    if source is not None and paths:
        _stop(f"cases come from case files or from --input, not from both: {paths[0]} and {source}")
    try:
        if source is None:
            return load_all(paths or [CASES])
        from harness.capture import Captured, captured_cases, refused
        from reference.recipes import recipe

        captured = Captured.load(source, tensors)
        names = [str(recipe(name)) for name in recipes or ["nvfp4"]]
        for note in [captured.note(), *refused(captured, recipes=names)]:
            if note:
                typer.echo(note, err=True)
        return captured_cases(captured, recipes=names)
    except (CaseFileError, ValueError) as error:
        _stop(str(error))


def _ledger(file: Path | None, paths: list[Path], cases: list[Case]) -> Ledger:
    """The ledger of a run of these case files and folders, checked against the cases that were loaded from them."""
    from harness.case import CaseFileError
    from harness.known import LedgerError, beside, folders_of, load

    try:
        ledger = beside(paths) if file is None else load(file)
        ledger.check(cases, folders_of(paths))
    except (LedgerError, CaseFileError) as error:
        _stop(str(error))
    return ledger


def _check_link(link: str) -> None:
    from harness.known import is_link

    if link and not is_link(link):
        _stop(f"--link is {link!r}; it is the address of a page: https://…")


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


def _part(cases: list[Case], shard: str, durations: Path | None) -> Part | None:
    """The part of the cases that is this shard's, where there are shards."""
    from harness.journal import JournalError
    from harness.shard import Shard, ShardError, part_of, read_durations

    if not shard:
        if durations is not None:
            _stop("--durations divides cases into shards, and no --shard is given")
        return None
    try:
        return part_of(cases, Shard.parse(shard), read_durations(durations) if durations else None)
    except (ShardError, JournalError) as error:
        _stop(str(error))


@app.command("list")
def list_cases(
    paths: Paths = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    source: Input = None,
    tensors: Tensors = None,
    recipes: Recipes = None,
    shard: ShardOption = "",
    durations: Durations = None,
) -> None:
    """Print the ids of the cases that a run with the same arguments would run."""
    chosen = _select(paths, tier, keyword, source, tensors, recipes)
    if part := _part(chosen, shard, durations):
        chosen = part.cases
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
    shard: ShardOption = "",
    durations: Durations = None,
    workers: Workers = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 300.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/latest"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of --report-dir that was ended.")
    ] = False,
    known: KnownFile = None,
    link: Link = "",
    schedules: Annotated[
        int,
        typer.Option("--schedules", min=1, help="Seeded shuffles of threads, beside forward and reverse; on a CPU."),
    ] = 1,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Build native kernels with sanitizers (address, undefined); on a CPU.")
    ] = False,
) -> None:
    """Run cases and write a report. Exit status 0 only if every case passed, or failed as the ledger expects."""
    from harness.session import run_session

    shuffles = _schedules(schedules, device)
    if sanitize:
        _check_sanitizer(device)
    _check_link(link)
    cases = _load(paths, source, tensors, recipes)
    chosen = _chosen(cases, tier, keyword)
    ledger = _ledger(known, (paths or [CASES]) if source is None else [], cases)
    part = _part(chosen, shard, durations)
    chosen = part.cases if part else chosen
    _check_device(device)
    from harness.backend import BackendError
    from harness.journal import JournalError
    from harness.pool import Settings
    from harness.report import ReportError

    settings = Settings(
        backend, device, seed, workers=workers or _default_workers(device), timeout=timeout,
        input_path="" if source is None else str(source), schedules=shuffles, sanitize=sanitize,
    )  # fmt: skip
    try:
        passed = run_session(chosen, settings, report_dir, resume=resume, part=part, ledger=ledger, link=link)
    except (BackendError, JournalError, ReportError) as error:
        _stop(str(error))
    raise typer.Exit(0 if passed else 1)


def _schedules(schedules: int, device: str) -> int:
    """How many shuffles a backend is asked for; 0, nothing, where there is one."""
    from harness.backend import BackendError, check_schedules

    try:
        check_schedules(schedules, device)
    except BackendError as error:
        _stop(str(error))
    return schedules if schedules > 1 else 0


def _check_sanitizer(device: str) -> None:
    from harness.backend import BackendError
    from harness.sanitizer import check_sanitizer

    try:
        check_sanitizer(device)
    except BackendError as error:
        _stop(str(error))


def _default_workers(device: str) -> int:
    import os

    from harness.gpus import visible

    cores = os.cpu_count() or 1
    if device == "cpu":
        return cores
    # Most cases of a GPU are judged on the CPU; each process takes half a gigabyte of the GPU.
    gpus = max(1, len(visible()))
    return max(gpus, min(cores, 16 * gpus))


@app.command("merge")
def merge_shards(
    shards: Annotated[list[Path], typer.Argument(metavar="DIR...", help="The --report-dir of every shard.")],
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/latest"),
    link: Link = "",
) -> None:
    """Join the shards of one run into its report. Exit status as of `run`; 2 where they are not all shards of one."""
    _check_link(link)
    from harness.journal import JournalError
    from harness.merge import MergeError, merge_session

    try:
        passed = merge_session(shards, report_dir, link=link)
    except (JournalError, MergeError) as error:
        _stop(str(error))
    raise typer.Exit(0 if passed else 1)


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
    """Run a part of the cases over many seeds. Exit status 0 only if every run passed, or failed as is known."""
    cases = _load(paths, None, None, None)
    selected = _chosen(cases, tier, keyword)
    ledger = _ledger(None, paths or [CASES], cases)
    launched = ledger.launchable(selected, backend=backend, device=device)
    if left_out := len(selected) - len(launched):
        typer.echo(f"{left_out} of {len(selected)} cases are known to crash or hang, and are not run", err=True)
    _check_device(device)
    import secrets

    from rich.console import Console

    from harness.backend import BackendError
    from harness.pool import Settings
    from harness.soak import chosen, soak

    start = secrets.randbelow(1 << 31) if first is None else first
    settings = Settings(backend, device, workers=workers or _default_workers(device))
    try:
        part = chosen(launched, share)
        passed = soak(part, range(start, start + seeds), settings, Console(), ledger=ledger)
    except BackendError as error:
        _stop(str(error))
    raise typer.Exit(0 if passed else 1)


@app.command("sanitize")
def sanitize_cases(
    paths: Paths = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    tool: Annotated[
        str, typer.Option("--tool", help="memcheck, racecheck (shared memory), initcheck or synccheck.")
    ] = "memcheck",
    backend: BackendOption = "native",
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 300.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/sanitize"),
) -> None:
    """Run cases on a GPU under compute-sanitizer. Exit status 0 only if it finds nothing and every case passed."""
    from harness.compute_sanitizer import TOOLS, ComputeSanitizerError, find_tool
    from harness.schema import nearest

    if tool not in TOOLS:
        _stop(f"--tool is {tool!r}{nearest(tool, TOOLS)}; it can be {', '.join(TOOLS)}")
    try:
        find_tool()
    except ComputeSanitizerError as error:
        _stop(str(error))
    chosen = _select(paths, tier, keyword, None, None, None)
    _check_device("cuda")
    from harness.backend import BackendError
    from harness.compute_sanitizer import Request
    from harness.report import ReportError
    from harness.sanitize import sanitize_session

    try:
        passed = sanitize_session(chosen, Request(tool, backend, seed, timeout), report_dir)
    except (BackendError, ComputeSanitizerError, ReportError) as error:
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

    from harness.environment import facts, guards

    table = Table(show_header=False, box=None)
    for fact in [*facts(), *guards()]:
        table.add_row(
            "✓" if fact.ok else "–", fact.name, fact.value + (f"\n{fact.remedy}" if fact.remedy and not fact.ok else "")
        )
    Console().print(table, markup=False)


@app.command()
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
    own: Annotated[
        bool, typer.Option("--overhead", help="In place of rates: the harness's own time, of cases of the quick tier.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the page and the tables go.")] = Path("reports/bench"),
) -> None:
    """Time the kernels beside ceilings measured in the same run, and judge what they give.

    Exit status 0 only if every output is right. How fast it is does not count.
    """
    if growing and own:
        _stop("--growth and --overhead are tables of their own; give one of them")
    if paths and not own:
        _stop(f"case files are for --overhead, which is not given: {paths[0]}")
    if own:
        cases = _select(paths, "quick", "", None, None, None)
        _check_device(device)
        _print_overhead(cases, device)
        return
    from harness.bench.session import run_growth, run_rates
    from harness.bench.tasks import LAUNCH, tasks
    from harness.case import matching

    if growing and (keyword or sizes or quick or compiling):
        _stop("--growth has sizes and operations of its own; -k, --sizes, --quick and --compile do not go with it")
    try:
        listed = [size for given in sizes or [] for size in given.split(",")]
        chosen = tasks(device, listed, keyword, quick=quick) if device in ("cpu", "cuda") else []
        launches = matching(keyword)(LAUNCH)
    except ValueError as error:
        _stop(str(error))
    _check_device(device)
    if not chosen and not launches:
        _stop(f"nothing is selected by -k {keyword!r}")
    try:
        if growing:
            right = run_growth(device, out)
        else:
            right = run_rates(chosen, device, out, quick=quick, compiling=compiling, launches=launches)
    except OSError as error:
        _stop(f"{out}: the report cannot be written: {error.strerror}")
    raise typer.Exit(0 if right else 1)


def _print_overhead(cases: list[Case], device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from harness.backend import load_backend
    from harness.overhead import overheads, sample

    table = Table("quick cases, of a core", "ms a case", "the harness's own", "cases", box=None)
    rows = overheads(sample(cases), load_backend("native", device), device)
    for each in rows:
        table.add_row(each.operation, f"{each.milliseconds:.1f}", f"{each.harness:.1f}", str(each.cases))
    count = sum(each.cases for each in rows)
    whole, harness = (sum(each.cases * getattr(each, name) for each in rows) for name in ("milliseconds", "harness"))
    table.add_row("together", f"{whole / count:.1f}", f"{harness / count:.1f}", str(count))
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
    cases = _load(paths, None, None, None)
    ledger = _ledger(None, paths or [CASES], cases)
    # What fails without a mutant tells nothing of one.
    cases = [case for case in _chosen(cases, "quick", "") if not ledger.of(case.id, "native", "cpu")]
    passed = run_session(chosen, cases, report_dir, workers=workers or _default_workers("cpu"), timeout=timeout)
    raise typer.Exit(0 if passed else 1)


@app.command("train")
def train_layers(
    recipes: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="A training recipe (default: every one, and switches off); may be given again."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each training.")] = 200,
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the text, the weights and the batches.")] = 0,
    workers: Annotated[int, typer.Option("-n", min=0, help="Worker processes; 0 is one a core.")] = 0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/train"),
) -> None:
    """Train a small transformer under every recipe, and judge each step of it.

    On a GPU too a process a core: what a step costs is launches, and many share one GPU. After Ctrl-C, SIGTERM or a
    time limit the report has what was done. Exit status 0 only if every stage of every step is right and every training
    learns.
    """
    from harness.backend import BackendError, load_backend
    from harness.train.session import RECIPES, run_session, tasks

    try:
        chosen = tasks(recipes or RECIPES, backend, device, seed=seed, steps=steps)
    except ValueError as error:
        _stop(str(error))
    _check_device(device)
    try:
        load_backend(backend)
        passed = run_session(chosen, report_dir, workers=workers or _default_workers("cpu"))
    except BackendError as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{report_dir}: the report cannot be written: {error.strerror}")
    raise typer.Exit(0 if passed else 1)


RunPath = Annotated[Path, typer.Option("--run", help="A finished run: the --report-dir that it wrote.")]
BaselinePath = Annotated[Path, typer.Option("--baseline", help="The baseline: reports/baselines/host.json.")]


@app.command("gate")
def gate_run(baseline: BaselinePath, run: RunPath = Path("reports/latest")) -> None:
    """Hold a finished run against a baseline. Exit status 0 only if every case of it ran and no figure is worse."""
    from rich.console import Console

    from harness.gate.baseline import BaselineError, read
    from harness.gate.gate import judge, show
    from harness.journal import JournalError
    from harness.journal import read as read_run

    try:
        found = judge(read_run(run), read(baseline))
    except (BaselineError, JournalError) as error:
        _stop(str(error))
    show(found, str(baseline), Console())
    raise typer.Exit(0 if found.passed else 1)


baselines = typer.Typer(help="Keep the baselines that the gate holds runs against.", no_args_is_help=True)
app.add_typer(baselines, name="baseline")


@baselines.command()
def accept(baseline: BaselinePath, run: RunPath = Path("reports/latest")) -> None:
    """Make a finished run the baseline, and print what that changes."""
    from rich.console import Console

    from harness.gate.accept import accept as accept_run
    from harness.gate.baseline import BaselineError
    from harness.journal import JournalError, read

    try:
        accept_run(read(run), baseline, Console())
    except (BaselineError, JournalError) as error:
        _stop(str(error))


@app.command("compare")
def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run: the --report-dir that it wrote.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the comparison as a page too.")] = None,
) -> None:
    """Say what differs between two runs. Exit status 0 only if B is nowhere worse than A."""
    from rich.console import Console

    from harness.gate.compare import compare, show
    from harness.journal import JournalError, read

    try:
        found = compare(read(a), read(b))
    except JournalError as error:
        _stop(str(error))
    if html is not None:
        from harness.gate.compare_page import render

        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(render(found, str(a), str(b)), encoding="utf-8")
        except OSError as error:
            _stop(f"{html}: cannot be written: {error.strerror}")
    show(found, Console())
    raise typer.Exit(0 if found.no_worse else 1)


def main() -> None:
    """Entry point; the output is UTF-8 whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    app()
