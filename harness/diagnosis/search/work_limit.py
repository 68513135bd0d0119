"""Limit of the work of a diagnosis: the same deviations are tried on a fast and on a busy machine."""

from __future__ import annotations

import math

CASE = 1 << 27
"""Work for the causes of a failing case. The unit is one element of one deviation, 20 ns: about 3 s on a CPU core."""
ASSERTION = 1 << 26
"""Work for the causes of a wrong result of an assertion."""
PER_ELEMENT = 8
"""Further work for each element of the results of an assertion: the judgement of large results takes long anyway."""
CALL = 1 << 16
"""Work of a deviation beside its elements: 0.5 ms for the calls of torch."""
_VERIFICATION = 3
"""A deviation that fits every element tried so far is verified until this multiple of the limit."""


class WorkLimit:
    """Work for which a diagnosis tries deviations.

    The diagnosis asks before each deviation, and before each slab of a deviation that fits so far. A deviation is an
    explanation only if it was verified completely, and exact only if the limit left out nothing.
    """

    def __init__(self, work: float = math.inf, *, remedy: str = "diagnose='full' has no limit") -> None:
        """`work`: the limit; infinity for no limit. `remedy`: end of `note`."""
        self.work, self.remedy = work, remedy
        self.spent = 0.0
        self.tried = self.skipped = 0
        """Deviations that were tried, and deviations that were not tried because the limit was reached."""
        self._unverified: dict[str, None] = {}
        self._inputs_left_out = False

    @property
    def reached(self) -> bool:
        """Whether the work is done."""
        return self.spent >= self.work

    def may_try(self, elements: float) -> bool:
        """Whether a further deviation may be tried on so many elements. The answer counts the deviation as tried or as
        skipped, and its work as spent."""
        if self.reached:
            self.skipped += 1
            return False
        self.tried += 1
        self.spent += elements + CALL
        return True

    def may_verify(self, cause: str, elements: float) -> bool:
        """Whether the verification of a deviation may go on with so many elements. It has fitted all others so far."""
        if self.spent < _VERIFICATION * self.work:
            self.spent += elements + CALL
            return True
        self._unverified[cause] = None
        return False

    def may_compare(self, elements: float) -> bool:
        """Whether a further input of so many elements that separates deviations, or a pair of deviations, may be
        tried."""
        if self.reached:
            self._inputs_left_out = True
            return False
        self.spent += elements + CALL
        return True

    @property
    def note(self) -> str:
        """Sentence about the deviations that the limit left out. Empty if the diagnosis is complete."""
        if not self.skipped and not self._unverified and not self._inputs_left_out:
            return ""
        parts = [
            f"the diagnosis stopped at its limit of work: {self.tried} of {self.tried + self.skipped} known deviations "
            "tried"
        ]
        if self._unverified:
            fit = "fits" if len(self._unverified) == 1 else "fit"
            parts.append(f"{', '.join(self._unverified)} {fit} the elements tried, but not all elements were tried")
        if self._inputs_left_out:
            parts.append("not all pairs and further inputs tried")
        return "; ".join([*parts, self.remedy])
