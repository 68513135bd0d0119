"""Formatted figures of a bench: the cells shared by terminal and page."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.harness.report import text
from narrowgauge.harness.tools.bench.bench_row import UNJUDGED, BenchRow

COLUMNS = ("operation", "size", "who", "time", "spread", "rate", "of ceiling", "× reference", "judged by")
EXPLAINED = (
    "time: of one call, median of the rounds. spread: how far the fastest and the slowest round are from it. rate: "
    "bytes that the operation has to move, or 2·M·N·K, a second. of ceiling: that beside the rate of a large copy, or "
    "of torch's matmul, in brackets of a copy of as many bytes, or of dequantize + matmul; of a launch, what one of "
    "torch's own costs beside it. "
    "judged by: bytes, which are the reference's; order, the sums that the declared order "
    "can give, of a tensor core to the bit; bound, those of any order; 1/16: of one row in 16 alone; contract, "
    "the bytes that a contract allows, of 64 rows."
)
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def time(seconds: float | None) -> str:
    """`1.23 ms`, `4.5 µs`."""
    if seconds is None:
        return ""
    return next(
        (f"{seconds * factor:.3g} {unit}" for factor, unit in ((1, "s"), (1e3, "ms")) if seconds * factor >= 1),
        f"{seconds * 1e6:.3g} µs",
    )


def rate(value: float | None, unit: str) -> str:
    """`4.21 TB/s`, `632 GFLOP/s`."""
    if value is None:
        return ""
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"


def _short(percent: float) -> str:
    """Two digits below 100 %, whole percent above."""
    return f"{percent:.2g}" if percent < 99.5 else f"{percent:.0f}"


def spread(row: BenchRow) -> str:
    """Distance of the fastest and the slowest round from the median: `−0.4 +1.2 %`."""
    if not row.seconds or row.seconds_min is None or row.seconds_max is None:
        return ""
    low, high = 100 * (1 - row.seconds_min / row.seconds), 100 * (row.seconds_max / row.seconds - 1)
    return f"−{_short(low)} +{_short(high)} %"


def verdict(row: BenchRow, *, ascii_only: bool = False) -> str:
    """Mark and rule of the verdict, if the output was judged."""
    if row.verdict == UNJUDGED:
        return ""
    return f"{row.verdict if ascii_only else text.GLYPHS[row.verdict]} {row.judged}".rstrip()


def ceiling(row: BenchRow) -> str:
    """`87.1 %`: share of the ceiling, and in brackets the share of the second ceiling."""
    return percent(row.share) + ("" if row.second_share is None else f" ({percent(row.second_share)})")


def cells(row: BenchRow, *, ascii_only: bool = False) -> list[str]:
    """Cells of a row of the table."""
    name = " ".join(filter(None, (row.operation, row.recipe, row.variant)))
    return [
        name,
        row.shape,
        row.who,
        time(row.seconds),
        spread(row),
        rate(row.rate, "FLOP/s" if row.timed_by_flop else "B/s"),
        ceiling(row),
        "" if row.speedup is None or row.who == "reference" else f"{row.speedup:.3g}",
        verdict(row, ascii_only=ascii_only),
    ]


def wrong(rows: Sequence[BenchRow]) -> list[str]:
    """A sentence for each row with a wrong output or an error."""
    return [f"{row.id}: {row.message}" for row in rows if row.failed]


def sentence(rows: Sequence[BenchRow]) -> str:
    """The bench as a sentence."""
    judged = [row for row in rows if row.verdict != UNJUDGED and row.is_native]
    failed = [row for row in judged if row.failed]
    if not judged:
        return "nothing was judged"
    if failed:
        return f"{len(failed)} of {text.plural(len(judged), 'timed output')} did not pass"
    peers = [row for row in rows if row.verdict != UNJUDGED and not row.is_native]
    wrong_peers = sum(row.failed for row in peers)
    others = f"; {wrong_peers} of {text.plural(len(peers), 'output')} of peers wrong" if wrong_peers else ""
    compared = sum(row.compared for row in judged)
    return f"{text.plural(len(judged), 'timed output')} right, {text.number(compared)} elements compared{others}"


def shown(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Rows of the table. Ceilings and the reference are columns."""
    return [row for row in rows if row.failed or (row.share is not None and row.who != "reference")]
