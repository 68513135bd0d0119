"""A row of a bench: its time, its ceiling, and the verdict on its output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

SCHEMA = 3
RIGHT, WRONG, ERROR, UNJUDGED = "pass", "fail", "error", "unjudged"
"""Verdicts as in a record. Ceilings and the reference are not judged."""
NATIVE = "native"
"""Name of the native kernels, which decide the verdict of the bench. All other names are shown for comparison."""


@dataclass
class BenchRow:
    """A row of the table. A value not measured or not applicable is None. Columns: docs/schema.md."""

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

    @property
    def id(self) -> str:
        """Text matched by `-k`, and the name of the implementation: `quantize/nvfp4/rowwise/16384x16384/native`."""
        return "/".join(filter(None, (self.operation, self.recipe, self.variant, self.shape, self.who)))

    @property
    def timed_by_flop(self) -> bool:
        """Whether the rate counts FLOP, not bytes: a size of three numbers is a product."""
        return self.shape.count("x") == 2

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

    def to_dict(self) -> dict[str, Any]:
        """Columns of the tables, in order."""
        return {"schema": SCHEMA, "id": self.id, **asdict(self), "rate": self.rate}


COLUMNS = ("schema", "id", *(field.name for field in fields(BenchRow)), "rate")
