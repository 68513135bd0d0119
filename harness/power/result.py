"""The power of a test as a table: a row for each known mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.harness.machine.plain_text import escape

_LISTED = 20
"""Most mistakes in the text, and most names of mistakes that the inputs do not show."""
Key = tuple[str, str, int]
"""A wrong kernel: name and sentence of the mistake, and a number among kernels with equal name and sentence."""


@dataclass(frozen=True)
class MistakeRow:
    """A known mistake, and how many of its wrong results are refused."""

    name: str
    sentence: str
    """Description of the first wrong kernel that the test accepts on all inputs, else of the first kernel."""
    kernels: int
    """Number of wrong kernels with this mistake whose results differ from the right results."""
    results: int
    """Number of wrong results: of every kernel on every input."""
    refused: int
    """Results that the test refuses."""
    narrowgauge: int
    """Results that narrowgauge refuses. A right kernel may give the remaining results."""
    tightest: int
    """Results that the tightest tolerance for right kernels refuses."""
    caught: bool
    """Whether the test refuses every wrong kernel on at least one input."""

    def shares(self, *, tight: bool) -> list[str]:
        """Shares of the results that the test, narrowgauge and, if `tight`, the tightest tolerance refuse."""
        counts = (self.refused, self.narrowgauge, *((self.tightest,) if tight else ()))
        return [f"{math.floor(100 * count / self.results)}%" for count in counts]


@dataclass(frozen=True)
class RightKernels:
    """Results of right kernels on one input, and the necessary tolerances: rtol with atol 0, atol with rtol 0."""

    inputs: str
    kernels: int
    refused: int
    """Right results that the test refuses: false alarms."""
    rtol: float
    atol: float


@dataclass(frozen=True)
class Power:
    """Power of a test: known mistakes, and the caught mistakes."""

    subject: str
    judge: str
    rows: tuple[MistakeRow, ...]
    """A row per known mistake that the inputs show, the least refused first."""
    right: tuple[RightKernels, ...]
    """An entry per input; empty for `in_place_of`."""
    unseen: tuple[str, ...] = ()
    """Known mistakes that change no byte of the results on these inputs."""
    tight: bool = True
    """Whether the tightest tolerance was measured."""

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the known mistakes that these inputs show."""
        return tuple(row.name for row in self.rows)

    @property
    def caught(self) -> tuple[str, ...]:
        """Names of the mistakes that the test catches (`MistakeRow.caught`)."""
        return tuple(row.name for row in self.rows if row.caught)

    @property
    def false_alarms(self) -> int:
        """Results of right kernels that the test refuses."""
        return sum(each.refused for each in self.right)

    @property
    def passed(self) -> bool:
        """Whether the test catches every mistake that narrowgauge refuses, and accepts every right result."""
        return not self.false_alarms and all(row.caught for row in self.rows if row.narrowgauge)

    @property
    def table(self) -> str:
        """A line per mistake: the number of kernels, and the shares of refused results."""
        return self._table(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, with `known`, `caught` and `passed`."""
        found = asdict(self)
        del found["tight"]
        return {**found, "known": self.known, "caught": self.caught, "passed": self.passed}

    def __str__(self) -> str:
        """The numbers of mistakes, the mistakes that the test lets pass, and the tolerances for right kernels."""
        missed = [row for row in self.rows if not row.caught]
        lines = [self.summary]
        if missed:
            lines += ["", self._table(missed[:_LISTED])]
        if len(missed) > _LISTED:
            lines.append(f"and {len(missed) - _LISTED} more")
        return escape("\n".join([*lines, *([""] if missed else []), *self.notes]))

    @property
    def summary(self) -> str:
        """The numbers of known and of caught mistakes."""
        certain = sum(row.narrowgauge == row.results for row in self.rows)
        return (
            f"{self.judge} on {self.subject}: {len(self.caught)} of {len(self.rows)} known mistakes caught; "
            f"narrowgauge refuses every wrong result of {certain}"
        )

    @property
    def notes(self) -> list[str]:
        """A line for the right kernels of each input, and one for the mistakes that the inputs do not show."""
        lines = []
        for each in self.right:
            word = "accepts all" if not each.refused else f"refuses {each.refused} of"
            need = f"they need rtol {each.rtol:.2g} or atol {each.atol:.2g}"
            lines.append(f"right kernels, {each.inputs}: the test {word} {each.kernels}; {need}")
        if self.unseen:
            more = f" and {len(self.unseen) - _LISTED} more" if len(self.unseen) > _LISTED else ""
            lines.append(f"not shown by these inputs: {', '.join(self.unseen[:_LISTED])}{more}")
        return lines

    def _table(self, rows: Sequence[MistakeRow]) -> str:
        tight = ("tightest",) if self.tight else ()
        cells = [("mistake", "kernels", "test", "narrowgauge", *tight, "")]
        for row in rows:
            cells.append((row.name, str(row.kernels), *row.shares(tight=self.tight), row.sentence))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join([
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)), line[-1],
            ]).rstrip()
            for line in cells
        )  # fmt: skip


@dataclass
class _Kernel:
    """Counts of a wrong kernel over the inputs."""

    results: int = 0
    refused: int = 0
    narrowgauge: int = 0
    tightest: int = 0


class Counts:
    """Counts of refused results by wrong kernel."""

    def __init__(self) -> None:
        self._kernels: dict[str, dict[Key, _Kernel]] = {}
        self._unseen: dict[str, None] = {}

    def add(self, key: Key, *, refused: bool, narrowgauge: bool, tightest: bool = False) -> None:
        """Count a wrong result of the kernel with this key."""
        kernel = self._kernels.setdefault(key[0], {}).setdefault(key, _Kernel())
        kernel.results += 1
        kernel.refused += refused
        kernel.narrowgauge += narrowgauge
        kernel.tightest += tightest

    def add_unseen(self, key: Key) -> None:
        """Note a wrong kernel that gives the right bytes."""
        self._unseen[key[0]] = None

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the mistakes that no inputs show."""
        return tuple(name for name in self._unseen if name not in self._kernels)

    @property
    def rows(self) -> tuple[MistakeRow, ...]:
        """A row per mistake that the inputs show, the least refused first."""
        rows = []
        for name, kernels in self._kernels.items():
            every = list(kernels.values())
            missed = [key for key, kernel in kernels.items() if not kernel.refused]
            rows.append(
                MistakeRow(
                    name,
                    sentence=(missed or list(kernels))[0][1],
                    kernels=len(every),
                    results=sum(kernel.results for kernel in every),
                    refused=sum(kernel.refused for kernel in every),
                    narrowgauge=sum(kernel.narrowgauge for kernel in every),
                    tightest=sum(kernel.tightest for kernel in every),
                    caught=not missed,
                )
            )
        return tuple(sorted(rows, key=lambda row: (row.refused / row.results, row.name)))
