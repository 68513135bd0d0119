"""What became of a mutant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.harness.diagnosis.causes import assign
from narrowgauge.harness.diagnosis.memory import SENTENCES
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.yardsticks import Noticed

_DEADLOCK = "wait for each other forever"
"""What the host toolchain says of a block whose threads do; there is no result then that a diagnosis could be of."""


@dataclass
class Result:
    """One row: how a mutant was found, what was said of it, and what others would have seen."""

    mutant: Mutant
    ran: int = 0
    """Cases that were run, up to the last failing one that was wanted."""
    failing: list[dict[str, Any]] = field(default_factory=list)
    """Records of the cases that did not pass, of those whose real kernels do."""
    noticed: Noticed = field(default_factory=lambda: Noticed(True, True, True))
    """A crash and a hang are noticed by all."""
    problem: str = ""
    """Why there is no result: the changed kernel does not compile, say."""
    seconds: float = 0.0
    """Of one core, compilers included; of a process that dies, none."""

    @property
    def killed(self) -> bool:
        """Whether a case failed."""
        return bool(self.failing)

    @property
    def right(self) -> bool:
        """Whether it is as it should be: killed, or, where it is equivalent, not."""
        return not self.problem and self.killed != bool(self.mutant.equivalent)

    @property
    def check(self) -> str:
        """The check that found it first: the rule of a stage, or crash, timeout, error."""
        if not self.failing:
            return ""
        first = self.failing[0]
        rules = {stage["stage"]: stage["rule"] for stage in first["stages"]}
        return str(rules.get(first["stage"], first["verdict"]))

    @property
    def stage(self) -> str:
        """The stage at which it was found first."""
        return str(self.failing[0]["stage"]) if self.failing else ""

    @property
    def causes(self) -> list[tuple[str, int]]:
        """What the failing cases are explained by, and how many each: what was seen first, then what explains most.

        What a kernel reads or writes where it should not, and a race, make anything of results: what the others look
        like comes after what guard zones have seen.
        """
        found = [(explanation["cause"], len(records)) for explanation, records in assign(self.failing)]
        if stuck := sum(_DEADLOCK in record["message"] for record in self.failing):
            found.append(("threads-wait-forever", stuck))
        return sorted(found, key=lambda cause: (cause[0] not in SENTENCES, -cause[1]))

    @property
    def named(self) -> bool:
        """Whether the first cause is one that is expected."""
        return bool(self.causes) and self.causes[0][0] in self.mutant.causes

    def to_dict(self) -> dict[str, Any]:
        """As `mutants.json` keeps it."""
        m = self.mutant
        return {
            "name": m.name, "class": m.kind, "file": m.file, "imitates": m.imitates, "url": m.url,
            "equivalent": m.equivalent, "killed": self.killed, "check": self.check, "stage": self.stage,
            "cases": [record["case"] for record in self.failing], "ran": self.ran, "expected": list(m.causes),
            "causes": self.causes, "named": self.named, "allclose": self.noticed.allclose,
            "bytes": self.noticed.compare_bytes, "sqnr": self.noticed.sqnr, "problem": self.problem,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclass(frozen=True)
class Totals:
    """Sums over the mutants that are not equivalent."""

    mutants: int
    killed: int
    named: int
    allclose: int
    compare_bytes: int
    sqnr: int
    equivalent: int
    right: bool
    """Whether every mutant is as it should be."""

    @property
    def sentence(self) -> str:
        """`caught by narrowgauge 74 of 74, by …`."""
        rest = f"; {self.equivalent} equivalent" if self.equivalent else ""
        return (
            f"caught by narrowgauge {self.killed} of {self.mutants}, by allclose {self.allclose}, by byte compare "
            f"{self.compare_bytes}, by SQNR {self.sqnr}; cause named {self.named}{rest}"
        )


def totals(results: Sequence[Result]) -> Totals:
    """The sums."""
    real = [result for result in results if not result.mutant.equivalent]
    return Totals(
        mutants=len(real),
        killed=sum(result.killed for result in real),
        named=sum(result.named for result in real),
        allclose=sum(result.noticed.allclose for result in real),
        compare_bytes=sum(result.noticed.compare_bytes for result in real),
        sqnr=sum(result.noticed.sqnr for result in real),
        equivalent=len(results) - len(real),
        right=all(result.right for result in results),
    )
