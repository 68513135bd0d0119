"""The fit as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from narrowgauge.harness.report.terminal import print_table
from narrowgauge.harness.report.text import number, share
from narrowgauge.harness.tools.dialect.fit import Fit
from narrowgauge.harness.tools.dialect.report import rows


def table(fit: Fit) -> Table:
    """A row for each dialect, nearest first.

    Codes are compared under the quantizer's own scales. Signs of 0 and NaN and codes under scales of 0 or NaN are
    counted apart.
    """
    table_ = Table(box=None, pad_edge=False)
    for heading in ("dialect", "scale bytes", "codes", "signs, dead", "inputs explained"):
        table_.add_column(heading, justify="left" if heading == "dialect" else "right", no_wrap=True)
    scales, codes = fit.total
    for agreement in fit.agreements:
        table_.add_row(
            agreement.dialect,
            share(1 - agreement.scales.major / scales),
            share(1 - agreement.codes.major / codes),
            number(agreement.score.minor) if agreement.score.minor else "",
            f"{agreement.explained}/{fit.observed.inputs}",
        )
    return table_


def print_rows(fit: Fit, console: Console) -> None:
    """Print a row for each input: bytes that differ from the nearest dialect and from the rule, and below them their
    classes."""
    found = rows(fit)
    header = ("input", f"not as {fit.nearest.dialect}", "signs, dead", "not as the rule", "signs, dead")
    cells = []
    for row in found:
        counts = [row[of][kind] for of in ("of_dialect", "of_rule") for kind in ("bytes", "signs_and_dead")]
        cells.append([row["input"], *(number(count) if count else "" for count in counts)])
    print_table(header, cells, console, notes=[", ".join(row["classes"]) for row in found])
