"""`narrowgauge merge`: the shards of a run as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import Link, NoHistory, stop
from narrowgauge.harness.cli.selection import require_link


def merge_shards(
    shards: Annotated[list[Path], typer.Argument(metavar="DIR", help="The --report-dir of every shard.")],
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/latest"),
    link: Link = "",
    no_history: NoHistory = False,
) -> None:
    """Join the shards of one run into its report. Exit status as of `run`; 2 where they are not all shards of one."""
    require_link(link)
    from narrowgauge.harness.records.journal import JournalError
    from narrowgauge.harness.tools.merge import MergeError, merge_session

    try:
        passed = merge_session(shards, report_dir, link=link, history=not no_history)
    except (JournalError, MergeError) as error:
        stop(str(error))
    raise typer.Exit(0 if passed else 1)
