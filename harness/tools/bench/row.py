"""One figure of a bench: what was timed, how long it took, beside which ceiling, and whether its output is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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
