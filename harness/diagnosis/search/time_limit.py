"""Time limit of a diagnosis."""

from __future__ import annotations

import math
from time import monotonic, process_time

_VERIFICATION = 3
"""A deviation that fits every element tried so far is verified until this multiple of the limit."""


class TimeLimit:
    """Time for which a diagnosis tries deviations, from the creation of the object on.

    The diagnosis reads the clock between deviations, and between slabs of a deviation that fits so far. A deviation is
    an explanation only if it was verified completely, and exact only if the limit left out nothing.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        bounds_work: bool = False,
        of_process: bool = False,
        remedy: str = "diagnose='full' has no limit",
    ) -> None:
        """`seconds`: the limit; infinity for no limit. `bounds_work`: the work limits hold too. `of_process`: the limit
        is of the seconds that this process has a core, so that a busy machine does not change an explanation. `remedy`:
        end of `note`.
        """
        self.seconds, self.bounds_work, self.of_process, self.remedy = seconds, bounds_work, of_process, remedy
        self.tried = self.skipped = 0
        """Deviations that were tried, and deviations that were not tried because the limit was reached."""
        self._start = self._now()
        self._unverified: dict[str, None] = {}
        self._inputs_left_out = False

    def _now(self) -> float:
        return process_time() if self.of_process else monotonic()

    @property
    def reached(self) -> bool:
        """Whether the time is over."""
        return self._now() - self._start >= self.seconds

    def may_try(self) -> bool:
        """Whether a further deviation may be tried. The answer counts the deviation as tried or as skipped."""
        if self.reached:
            self.skipped += 1
            return False
        self.tried += 1
        return True

    def may_verify(self, cause: str) -> bool:
        """Whether the verification of a deviation may go on. It has fitted every element so far."""
        if self._now() - self._start < _VERIFICATION * self.seconds:
            return True
        self._unverified[cause] = None
        return False

    def may_compare(self) -> bool:
        """Whether a further input that separates deviations, or a pair of deviations, may be tried."""
        self._inputs_left_out |= self.reached
        return not self.reached

    @property
    def note(self) -> str:
        """Sentence about the deviations that the limit left out. Empty if the diagnosis is complete."""
        if not self.skipped and not self._unverified and not self._inputs_left_out:
            return ""
        parts = [
            f"the diagnosis stopped after {self.seconds:g} s: "
            f"{self.tried} of {self.tried + self.skipped} known deviations tried"
        ]
        if self._unverified:
            fit = "fits" if len(self._unverified) == 1 else "fit"
            parts.append(f"{', '.join(self._unverified)} {fit} the elements tried, but not all elements were tried")
        if self._inputs_left_out:
            parts.append("not all pairs and further inputs tried")
        return "; ".join([*parts, self.remedy])
