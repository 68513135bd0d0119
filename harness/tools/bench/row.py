"""One figure of a bench: its time, its ceiling, the share that is asked of it, and whether its output is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

SCHEMA = 2
RIGHT, WRONG, ERROR, UNJUDGED = "pass", "fail", "error", "unjudged"
"""Verdicts: as of a record; ceilings and the reference, which judges, are judged by nobody."""
OURS = "native"
"""Who is timed for its own sake; all others are there to be compared with."""


@dataclass
class Row:
    """One row of the table. What was not measured, or does not apply, is None. Columns: reports/SCHEMA.md."""

    operation: str
    recipe: str
    variant: str
    shape: str
    dtype: str
    who: str
    device: str
    verdict: str = UNJUDGED
    message: str = ""
    compared: int = 0
    mismatches: int = 0
    judged: str = ""
    seconds: float | None = None
    seconds_min: float | None = None
    seconds_q1: float | None = None
    seconds_q3: float | None = None
    seconds_max: float | None = None
    rounds: int = 0
    calls: int = 0
    copies: int = 1
    elements: int = 0
    moved: int = 0
    flop: int = 0
    ceiling: str = ""
    ceiling_rate: float | None = None
    share: float | None = None
    second_ceiling: str = ""
    second_share: float | None = None
    speedup: float | None = None
    asked: str = ""
    asked_least: float | None = None
    asked_found: float | None = None
    met: bool | None = None

    @property
    def id(self) -> str:
        """What `-k` selects by, and who it is: `quantize/nvfp4/rowwise/16384x16384/native`."""
        return "/".join(filter(None, (self.operation, self.recipe, self.variant, self.shape, self.who)))

    @property
    def timed_by_flop(self) -> bool:
        """Whether its rate is of arithmetic, not of bytes."""
        return self.operation.startswith("gemm")

    @property
    def rate(self) -> float | None:
        """FLOP a second of a product, bytes a second of all else."""
        work = self.flop if self.timed_by_flop else self.moved
        return work / self.seconds if self.seconds and work else None

    @property
    def ours(self) -> bool:
        """Whether the verdict on the bench depends on it; a peer that is wrong is its makers' matter."""
        return self.who == OURS

    @property
    def red(self) -> bool:
        return self.verdict in (WRONG, ERROR)

    def to_dict(self) -> dict[str, Any]:
        """The columns of the tables, in order."""
        return {"schema": SCHEMA, "id": self.id, **asdict(self), "rate": self.rate}


COLUMNS = ("schema", "id", *(field.name for field in fields(Row)), "rate")


_SQUARE = ("512x512x512", "1024x1024x1024")
_LARGE = ("16384x16384", "8192x8192", "4096x14336")


@dataclass(frozen=True)
class Asked:
    """The least that a figure is to be, of rows whose `id` matches the pattern."""

    device: str
    rows: str
    figure: str
    """share of the ceiling, speedup over the reference, elements or FLOP a second."""
    least: float
    shapes: tuple[str, ...] | None = None
    """None: any."""


ASKED = (
    # Of an H200. The first that matches counts.
    Asked("cuda", "quantize/nvfp4/rowwise, amax given/*/native", "share", 0.85, _LARGE),
    Asked("cuda", "quantize/nvfp4/rowwise/*/native", "share", 0.80, _LARGE),
    Asked("cuda", "quantize/nvfp4-rht/both, amax given/*/native", "share", 0.70, _LARGE),
    Asked("cuda", "quantize/nvfp4*-sr/both, amax given/*/native", "share", 0.60, _LARGE),
    Asked("cuda", "quantize/nvfp4-2d/both, amax given/*/native", "share", 0.75, _LARGE),
    Asked("cuda", "quantize/mxfp8-*/both/*/native", "share", 0.75, _LARGE),
    Asked("cuda", "quantize/fp8-block-*/*/native", "share", 0.75, _LARGE),
    Asked("cuda", "dequantize/*/native", "share", 0.80, _LARGE),
    # Of 64 MB of scales: those of 16384x16384 are 16 MB, and a copy of so few bytes has itself 75 % of a large one's.
    Asked("cuda", "swizzle/*/native", "share", 0.80, ("32768x32768",)),
    Asked("cuda", "unswizzle/*/native", "share", 0.80, ("32768x32768",)),
    Asked("cuda", "gemm/nvfp4/*/native", "share", 0.60, ("8192x8192x8192",)),
    Asked("cuda", "gemm/mxfp8-e4m3/*/native", "share", 0.60, ("8192x8192x8192",)),
    Asked("cuda", "gemm/nvfp4/*/native", "share", 2.0, ("16x8192x8192",)),
    Asked("cuda", "gemm/mxfp8-e4m3/*/native", "share", 2.0, ("16x8192x8192",)),
    Asked("cuda", "gemm-grouped/*/native", "share", 0.50, ("8192x8192x8192",)),
    # Of a CPU with two cores.
    Asked("cpu", "quantize/nvfp4/rowwise/*/reference", "elements/s", 100e6),
    Asked("cpu", "quantize/mxfp8-e4m3/rowwise/*/reference", "elements/s", 300e6),
    Asked("cpu", "gemm/*/reference", "share", 1 / 1.5, _SQUARE),
    Asked("cpu", "gemm*/native", "FLOP/s", 5e9, _SQUARE),
    Asked("cpu", "quantize/*/native", "speedup", 1.0),
)


def asked_of(device: str, name: str, shape: str) -> Asked | None:
    """What is asked of the row of this id, None where nothing is."""
    of_device = (one for one in ASKED if one.device == device and (one.shapes is None or shape in one.shapes))
    return next((one for one in of_device if fnmatchcase(name, one.rows)), None)


def hold(row: Row) -> None:
    """Write into a row what is asked of it, what was found, and whether that is enough."""
    if row.seconds is None or (asked := asked_of(row.device, row.id, row.shape)) is None:
        return
    found = {
        "share": row.share,
        "speedup": row.speedup,
        "elements/s": row.elements / row.seconds,
        "FLOP/s": row.flop / row.seconds,
    }[asked.figure]
    if found is not None:
        row.asked, row.asked_least, row.asked_found, row.met = asked.figure, asked.least, found, found >= asked.least
