"""`narrowgauge list`: the ids of cases."""

from __future__ import annotations

import typer

from narrowgauge.harness.cli.options import Durations, Input, Keyword, Paths, Recipes, ShardOption, Tensors, Tier
from narrowgauge.harness.cli.selection import part_of_run, select_cases


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
    chosen = select_cases(paths, tier, keyword, source, tensors, recipes)
    if part := part_of_run(chosen, shard, durations):
        chosen = part.cases
    for case in chosen:
        typer.echo(case.id)
    typer.echo(f"{len(chosen)} cases", err=True)
