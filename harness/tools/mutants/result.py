"""Result of a mutant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.harness.diagnosis.assign_causes import assign_causes
from narrowgauge.harness.diagnosis.explain_memory import MEMORY_CAUSES
from narrowgauge.harness.tools.mutants.conventional_tests import Detections
from narrowgauge.harness.tools.mutants.mutant import Mutant

_DEADLOCK = "wait for each other forever"
"""Message of the host toolchain for a deadlock of a block's threads. The diagnosis has no result to explain."""


@dataclass
class MutantResult:
    """Result of a mutant: its detection, its causes, and the conventional tests."""

    mutant: Mutant
    ran: int = 0
    """Number of cases that ran, up to the last failing case."""
    failing: list[dict[str, Any]] = field(default_factory=list)
    """Records of the cases that failed and pass with the real kernel."""
    detections: Detections = field(default_factory=lambda: Detections(True, True, True))
    """A crash or a hang is detected by all conventional tests."""
    timed_out: str = ""
    """The case that exceeded its time before any case failed. The mutant is then neither caught nor missed."""
    problem: str = ""
    """Why there is no result, for example a compile error."""
    seconds: float = 0.0
    """Seconds from start to end, including compilers."""

    @property
    def killed(self) -> bool:
        """Whether a case failed."""
        return bool(self.failing)

    @property
    def right(self) -> bool:
        """Whether the mutant was killed, or is equivalent and was not killed."""
        return not self.problem and not self.timed_out and self.killed != bool(self.mutant.equivalent)

    @property
    def check(self) -> str:
        """First check with a failure: rule of a stage, or crash, error."""
        if not self.failing:
            return ""
        first = self.failing[0]
        rules = {stage["stage"]: stage["rule"] for stage in first["stages"]}
        return str(rules.get(first["stage"], first["verdict"]))

    @property
    def stage(self) -> str:
        """First stage with a failure."""
        return str(self.failing[0]["stage"]) if self.failing else ""

    @property
    def causes(self) -> list[tuple[str, int]]:
        """Causes of the failing cases with their counts: causes seen by guard zones first, then the most frequent
        cause.

        An access outside of a tensor, or a race, can make any result, so explanations of results come after the guard
        zones.
        """
        counts = [(explanation["cause"], len(records)) for explanation, records in assign_causes(self.failing)]
        if stuck := sum(_DEADLOCK in record["message"] for record in self.failing):
            counts.append(("threads-wait-forever", stuck))
        return sorted(counts, key=lambda cause: (cause[0] not in MEMORY_CAUSES, -cause[1]))

    @property
    def named(self) -> bool:
        """Whether the first cause is an expected cause."""
        return bool(self.causes) and self.causes[0][0] in self.mutant.causes

    def to_dict(self) -> dict[str, Any]:
        """Entry in `mutants.json`."""
        m = self.mutant
        return {
            "name": m.name, "class": m.kind, "file": m.file, "imitates": m.imitates, "url": m.url,
            "equivalent": m.equivalent, "killed": self.killed, "check": self.check, "stage": self.stage,
            "cases": [record["case"] for record in self.failing], "ran": self.ran, "expected": list(m.causes),
            "causes": self.causes, "named": self.named, "allclose": self.detections.allclose,
            "bytes": self.detections.compare_bytes, "sqnr": self.detections.sqnr, "problem": self.problem,
            "timed_out": self.timed_out, "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclass(frozen=True)
class MutantTotals:
    """Sums over the mutants that are not equivalent."""

    mutants: int
    killed: int
    named: int
    allclose: int
    compare_bytes: int
    sqnr: int
    equivalent: int
    timed_out: int
    right: bool
    """Whether every mutant has the expected result."""

    @property
    def sentence(self) -> str:
        """`caught by narrowgauge 74 of 74, by …`."""
        rest = f"; {self.equivalent} equivalent" if self.equivalent else ""
        rest += f"; {self.timed_out} timed out" if self.timed_out else ""
        return (
            f"caught by narrowgauge {self.killed} of {self.mutants}, by allclose {self.allclose}, by byte compare "
            f"{self.compare_bytes}, by SQNR {self.sqnr}; cause named {self.named}{rest}"
        )


def totals(results: Sequence[MutantResult]) -> MutantTotals:
    """Sums over results."""
    real = [result for result in results if not result.mutant.equivalent]
    return MutantTotals(
        mutants=len(real),
        killed=sum(result.killed for result in real),
        named=sum(result.named for result in real),
        allclose=sum(result.detections.allclose for result in real),
        compare_bytes=sum(result.detections.compare_bytes for result in real),
        sqnr=sum(result.detections.sqnr for result in real),
        equivalent=len(results) - len(real),
        timed_out=sum(bool(result.timed_out) for result in results),
        right=all(result.right for result in results),
    )
