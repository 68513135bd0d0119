"""A row of a bench: its time, its ceiling, its target, and the verdict on its output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

SCHEMA = 2
RIGHT, WRONG, ERROR, UNJUDGED = "pass", "fail", "error", "unjudged"
"""Verdicts as in a record. Ceilings and the reference are not judged."""
NATIVE = "native"
"""Name of the native kernels, which decide the verdict of the bench. All other names are shown for comparison."""


@dataclass
class BenchRow:
    """A row of the table. A value that was not measured or does not apply is None. Columns: docs/schema.md."""

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
        """Text matched by `-k`, and the name of the implementation: `quantize/nvfp4/rowwise/16384x16384/native`."""
        return "/".join(filter(None, (self.operation, self.recipe, self.variant, self.shape, self.who)))

    @property
    def timed_by_flop(self) -> bool:
        """Whether the rate counts FLOP, not bytes."""
        return self.operation.startswith("gemm")

    @property
    def rate(self) -> float | None:
        """FLOP per second for a product, bytes per second for other operations."""
        work = self.flop if self.timed_by_flop else self.moved
        return work / self.seconds if self.seconds and work else None

    @property
    def is_native(self) -> bool:
        """Whether the verdict of the bench depends on the row. Peers do not count."""
        return self.who == NATIVE

    @property
    def failed(self) -> bool:
        return self.verdict in (WRONG, ERROR)

    @property
    def found_by_quartiles(self) -> tuple[float, float] | None:
        """The figure of the target by the slower and by the faster quartile of the rounds. None without a target."""
        if self.asked_found is None or not self.seconds or not self.seconds_q1 or not self.seconds_q3:
            return None
        work = self.asked_found * self.seconds  # every figure of a target is proportional to 1/seconds
        return work / self.seconds_q3, work / self.seconds_q1

    @property
    def too_noisy(self) -> bool:
        """Whether the quartiles of the rounds lie on both sides of the target: the median may then be on either side by
        chance. The spread of the ceiling and of the reference is not counted."""
        found = self.found_by_quartiles
        return found is not None and self.asked_least is not None and found[0] < self.asked_least <= found[1]

    def to_dict(self) -> dict[str, Any]:
        """Columns of the tables, in order."""
        return {"schema": SCHEMA, "id": self.id, **asdict(self), "rate": self.rate}


COLUMNS = ("schema", "id", *(field.name for field in fields(BenchRow)), "rate")


_SQUARE = ("512x512x512", "1024x1024x1024")
_LARGE = ("16384x16384", "8192x8192", "4096x14336")


@dataclass(frozen=True)
class Target:
    """Smallest accepted value of a figure, for rows whose `id` matches the pattern."""

    device: str
    rows: str
    figure: str
    """share (of the ceiling), speedup (over the reference), elements/s or FLOP/s."""
    least: float
    shapes: tuple[str, ...] | None = None
    """Sizes of the target. None: all sizes."""


TARGETS = (
    # Targets of an H200. The first match counts.
    Target("cuda", "quantize/nvfp4/rowwise, amax given/*/native", "share", 0.85, _LARGE),
    Target("cuda", "quantize/nvfp4/rowwise/*/native", "share", 0.80, _LARGE),
    Target("cuda", "quantize/nvfp4-rht/both, amax given/*/native", "share", 0.70, _LARGE),
    Target("cuda", "quantize/nvfp4*-sr/both, amax given/*/native", "share", 0.60, _LARGE),
    Target("cuda", "quantize/nvfp4-2d/both, amax given/*/native", "share", 0.75, _LARGE),
    Target("cuda", "quantize/mxfp8-*/both/*/native", "share", 0.75, _LARGE),
    Target("cuda", "quantize/fp8-block-*/*/native", "share", 0.75, _LARGE),
    Target("cuda", "dequantize/*/native", "share", 0.80, _LARGE),
    # Targets for 64 MB of scales. 16384x16384 has 16 MB of scales, and a copy of 16 MB itself reaches only 75 % of a
    # large copy.
    Target("cuda", "swizzle/*/native", "share", 0.80, ("32768x32768",)),
    Target("cuda", "unswizzle/*/native", "share", 0.80, ("32768x32768",)),
    Target("cuda", "gemm/nvfp4/*/native", "share", 0.60, ("8192x8192x8192",)),
    Target("cuda", "gemm/mxfp8-e4m3/*/native", "share", 0.60, ("8192x8192x8192",)),
    Target("cuda", "gemm/fp8-current/*/native", "share", 1.5, ("8192x8192x8192",)),
    Target("cuda", "gemm/fp8-block-1x128/*/native", "share", 1.2, ("8192x8192x8192",)),
    Target("cuda", "gemm/nvfp4/*/native", "share", 2.0, ("16x8192x8192",)),
    Target("cuda", "gemm/mxfp8-e4m3/*/native", "share", 2.0, ("16x8192x8192",)),
    Target("cuda", "gemm-grouped/*/native", "share", 0.50, ("8192x8192x8192",)),
    # Targets of a CPU with two cores.
    Target("cpu", "quantize/nvfp4/rowwise/*/reference", "elements/s", 100e6),
    Target("cpu", "quantize/mxfp8-e4m3/rowwise/*/reference", "elements/s", 300e6),
    Target("cpu", "gemm/*/reference", "share", 1 / 1.5, _SQUARE),
    Target("cpu", "gemm*/native", "FLOP/s", 5e9, _SQUARE),
    Target("cpu", "quantize/*/native", "speedup", 1.0),
)


def find_target(device: str, name: str, shape: str) -> Target | None:
    """The target of a row with this id, or None."""
    of_device = (
        target for target in TARGETS if target.device == device and (target.shapes is None or shape in target.shapes)
    )
    return next((target for target in of_device if fnmatchcase(name, target.rows)), None)


def apply_target(row: BenchRow) -> None:
    """Write the target of a row, the measured value, and whether the target is met."""
    if row.seconds is None or (target := find_target(row.device, row.id, row.shape)) is None:
        return
    value = {
        "share": row.share,
        "speedup": row.speedup,
        "elements/s": row.elements / row.seconds,
        "FLOP/s": row.flop / row.seconds,
    }[target.figure]
    if value is not None:
        row.asked, row.asked_least, row.asked_found, row.met = target.figure, target.least, value, value >= target.least
