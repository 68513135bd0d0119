"""`narrowgauge list`: the ids of cases, or their number by shape and flag."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import (
    Contracts,
    Device,
    Durations,
    Input,
    Keyword,
    Operations,
    Paths,
    Recipes,
    Rules,
    ShardOption,
    Tensors,
    Tier,
)
from narrowgauge.harness.cli.selection import part_of_run, require_device_name, select_cases

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case

NO_FLAG = "no flag"
"""Column of the cases without a flag."""


def list_cases(
    paths: Paths = None,
    contract: Contracts = None,
    operations: Operations = None,
    rules: Rules = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    device: Device = "cpu",
    source: Input = None,
    tensors: Tensors = None,
    recipes: Recipes = None,
    shard: ShardOption = "",
    durations: Durations = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="For each operation a table of shapes × flags in place of the ids.")
    ] = False,
    coverage: Annotated[
        bool,
        typer.Option(
            "--coverage",
            help="Share of scales, codes and rounding boundaries that the inputs of quantize reach; with --input "
            "beside the share of the input families.",
        ),
    ] = False,
) -> None:
    """Print the ids of the cases that the same `run` would take."""
    require_device_name(device)
    paths = [*(paths or []), *(contract or [])] or None
    chosen = select_cases(paths, tier, keyword, source, tensors, recipes, device)
    if part := part_of_run(chosen, shard, durations):
        chosen = part.cases
    if coverage:
        for line in _coverage(chosen, source, tensors, tier, device):
            typer.echo(line)
        return
    for line in _summary(chosen) if summary else (case.id for case in chosen):
        typer.echo(line)
    typer.echo(f"{len(chosen)} case{'s' * (len(chosen) != 1)}", err=True)


def _coverage(
    cases: list[Case], source: Path | None, tensors: list[str] | None, tier: str, device: str
) -> Iterator[str]:
    """Lines on the numbers that the inputs of the cases reach, of captured tensors beside the input families."""
    from narrowgauge.harness.certify.coverage import compared_lines, lines

    if source is None:
        return lines(cases)
    from narrowgauge.harness.inputs.capture import Captured

    return compared_lines(cases, Captured.load(source, tensors), select_cases(None, tier, "", None, None, None, device))


def _summary(cases: Iterable[Case]) -> Iterator[str]:
    """For each operation a line with its counts, and a table: a row for each shape, a column for each flag, and the
    number of cases with both. A case with several flags counts in several columns."""
    by_operation: dict[str, list[Case]] = {}
    for case in cases:
        by_operation.setdefault(case.operation, []).append(case)
    for operation, members in by_operation.items():
        recipes = len({case.recipe_label for case in members})
        families = len({case.inputs for case in members})
        yield f"{operation}: cases {len(members)}, recipes {recipes}, input families {families}"
        flags = sorted({flag for case in members for flag in case.flags})
        flags = [NO_FLAG, *flags] if any(not case.flags for case in members) else flags
        totals = Counter(case.shape_label for case in members)
        counts = Counter((case.shape_label, flag) for case in members for flag in case.flags or (NO_FLAG,))
        shapes = sorted(totals, key=lambda shape: [int(size) for size in shape.split("x")])
        width = max(map(len, ["shape", *shapes]))
        room = shutil.get_terminal_size((1 << 20, 24)).columns - width - len("    cases")
        for shown in _columns(flags, room):
            yield "  ".join(["  " + "shape".ljust(width), "cases", *shown])
            for shape in shapes:
                cells = [str(counts[shape, flag] or "·").rjust(len(flag)) for flag in shown]
                yield "  ".join(["  " + shape.ljust(width), str(totals[shape]).rjust(len("cases")), *cells])
            yield ""


def _columns(names: list[str], room: int) -> list[list[str]]:
    """Names of columns in groups whose widths fit into `room`. A group has at least a name."""
    groups: list[list[str]] = [[]]
    for name in names:
        if groups[-1] and sum(len(other) + 2 for other in (*groups[-1], name)) > room:
            groups.append([])
        groups[-1].append(name)
    return groups
