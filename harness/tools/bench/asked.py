"""What is asked of each figure. An operation that misses its own is not wrong: it is slow, and the table says so."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from narrowgauge.harness.tools.bench.row import Row

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
