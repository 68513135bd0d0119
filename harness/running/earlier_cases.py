"""Failures that need earlier calls. A failing case runs again in a kernel host of its own. If the case passes in this
host, the shortest sequence of earlier cases is searched that makes it fail in a new host.

The host of the run is not touched, so the verdicts of the other cases do not depend on the search.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.records.record import PASSES_ALONE, STATE_BETWEEN_CALLS, Record
from narrowgauge.harness.running.runner import run_case

if TYPE_CHECKING:
    from narrowgauge.harness.inputs.capture import Captured

MOST = 4
"""Largest number of failures run again by a process, of different kinds, as long as all fail again."""
MOST_AFTER_A_FINDING = 16
"""Largest number of failures run again by a process after a failure passed alone: then each failure may need earlier
calls."""
TRIALS = 32
"""Kernel hosts of a search."""
SECONDS = 30.0
"""Seconds of a search; a quarter of the timeout of the case, if that is less. A failure that took longer than this is
not run again."""
TOTAL = 60.0
"""Seconds of all searches of a process together: a backend may take long to load."""
NAMED = 3
"""Earlier cases that a sentence names."""


@dataclass
class EarlierCases:
    """The cases run by the kernel host of a judge since its start, and the search among these cases."""

    new_host: Callable[[], AbstractContextManager[Backend]]
    """The backend in a new kernel host. Raises BackendError if it cannot be loaded."""
    captures: Captured | None = None
    untrusted: bool = False
    loading: float = 0.0
    """Seconds in which the host of the judge loaded the backend. A failure is not run again if another host would take
    longer to load than a search may take."""
    ran: list[tuple[Case, float]] = field(default_factory=list)
    """Cases of the host, in order, with their seconds."""
    _kinds: set[tuple[str, ...]] = field(default_factory=set, init=False)
    """Kinds of failures that were run again: operation, recipe, verdict, stage, first explanation."""
    _examined: int = field(default=0, init=False)
    _spent: float = field(default=0.0, init=False)
    """Seconds of the searches so far."""
    _found: bool = field(default=False, init=False)
    """Whether a failure passed alone."""

    def examine(self, record: Record, case: Case, *, sharing: int, timeout: float, started: float) -> bool:
        """Run a failing case again in a new host, and search for the necessary earlier cases. True if it passes
        alone: the first explanation of the record then says so, and the options of the record name the earlier cases.

        A failure without an earlier case, and a failure of a kind that failed again before, are not run again.
        `started`: begin of the case by `time.perf_counter`. `sharing` and `timeout`: as of `run_case`.
        """
        seconds = min(SECONDS, timeout / 4, TOTAL - self._spent)
        begun = time.perf_counter()
        if not self.ran or max(begun - started, self.loading) > seconds or not self._is_chosen(record):
            return False
        try:
            return self._examine(record, case, sharing, time.monotonic() + seconds)
        except Exception as error:  # a search that fails costs itself, not the verdict
            words = f"no search for earlier cases: {type(error).__name__}: {error}"
            record.explanations.append(
                {"cause": "no-diagnosis", "sentence": words, "stage": record.stage, "exact": False}
            )
            return False
        finally:
            self._spent += time.perf_counter() - begun

    def _examine(self, record: Record, case: Case, sharing: int, deadline: float) -> bool:
        """As `examine`, until a deadline by `time.monotonic`."""
        search = _Search(self, record, case, sharing, deadline)
        alone = search.run([])
        if alone is None or alone.verdict != "pass":
            return False
        self._found = True
        sequence = search.sequence()
        last = search.confirm(sequence) if sequence else None
        cause, exact = PASSES_ALONE, False
        if last is None:
            sentence = "the case passes alone in a fresh process, and "
            if sequence:
                sentence += f"failed there once after {_named(sequence)}, which a second trial did not confirm: "
            else:
                count = f"{search.longest} of the {len(self.ran)} earlier case{'s' * (len(self.ran) != 1)}"
                sentence += f"did not fail there after {count}: it needs state of other calls, or "
            sentence += "its result varies from run to run"
        else:
            cause = STATE_BETWEEN_CALLS
            exact = (last.message, last.output_digest) == (record.message, record.output_digest)
            sentence = f"only after other cases: the case passes in a fresh process, and fails after {_named(sequence)}"
            sentence += "" if exact else f", there with: {last.message}"
            after = shlex.join(word for one in sequence for word in ("--after", one.id))
            record.options = " ".join(filter(None, (record.options, after)))
        record.explanations.insert(
            0, {"cause": cause, "sentence": sentence, "stage": record.stage or "memory", "exact": exact}
        )
        return True

    def _is_chosen(self, record: Record) -> bool:
        """Whether a failure is run again. Counts it."""
        first = next((explanation["cause"] for explanation in record.explanations), "")
        kind = (record.operation, record.recipe, record.verdict, record.stage, first)
        if self._examined == (MOST_AFTER_A_FINDING if self._found else MOST):
            return False
        if kind in self._kinds and not self._found:
            return False
        self._kinds.add(kind)
        self._examined += 1
        return True


class _Search:
    """The search for a sequence of earlier cases after which a case fails as in its record."""

    def __init__(self, earlier: EarlierCases, record: Record, case: Case, sharing: int, deadline: float) -> None:
        self._earlier, self._record, self._case = earlier, record, case
        self._sharing, self._deadline = sharing, deadline
        self._cases = [ran for ran, _ in earlier.ran]
        self._left = TRIALS
        self.longest = 0
        """Length of the longest sequence that was tried."""

    def run(self, sequence: Sequence[Case]) -> Record | None:
        """The record of the case after a sequence of cases in a new host. None if a limit ends the search."""
        if not self._left or time.monotonic() >= self._deadline:
            return None
        self._left -= 1
        earlier, record = self._earlier, self._record
        try:
            with earlier.new_host() as backend:
                for case in (*sequence, self._case):
                    seconds = self._deadline - time.monotonic()
                    if seconds <= 0:
                        return None
                    last = run_case(
                        case, backend, device=record.device, seed=record.seed, captures=earlier.captures,
                        sharing=self._sharing, timeout=seconds, untrusted=earlier.untrusted,
                    )  # fmt: skip
        except BackendError:
            return None
        self.longest = max(self.longest, len(sequence))
        return last

    def fails(self, sequence: Sequence[Case]) -> bool:
        """Whether the case fails after the sequence, at the stage of its record."""
        return self._is_same(self.run(sequence))

    def _is_same(self, found: Record | None) -> bool:
        return found is not None and (found.verdict, found.stage) == (self._record.verdict, self._record.stage)

    def sequence(self) -> list[Case]:
        """A sequence that makes the case fail, without unnecessary cases, as far as the limits allow. Empty if
        none was found."""
        first, last = self._cases[:1], self._cases[-1:]
        close: list[Case] = []
        for one in (last, first) if len(self._cases) > 1 else (last,):
            if self._is_same(found := self.run(one)):
                assert found is not None
                if found.message == self._record.message:
                    return one
                close = close or one
        if close:
            return close
        length = 2
        while length // 2 < len(self._cases):
            if self._seconds(length) > self._deadline - time.monotonic():
                return []
            if self.fails(self._cases[-length:]):
                return self._shortest(self._cases[-length:])
            length *= 2
        return []

    def _seconds(self, length: int) -> float:
        """Seconds that the last cases took in the run."""
        return sum(seconds for _, seconds in self._earlier.ran[-length:])

    def _shortest(self, sequence: list[Case]) -> list[Case]:
        """Delta debugging: a failing sequence without parts that the failure does not need."""
        parts = 2
        while len(sequence) > 1:
            size = math.ceil(len(sequence) / parts)
            starts = range(0, len(sequence), size)
            kept = [sequence[n : n + size] for n in starts] if parts == 2 else []
            kept += [sequence[:n] + sequence[n + size :] for n in starts] if parts > 2 else []
            smaller = next((one for one in kept if self.fails(one)), None)
            if smaller is not None:
                sequence, parts = smaller, max(2, parts - 1) if parts > 2 else 2
            elif size == 1:
                break
            else:
                parts = min(2 * parts, len(sequence))
        return sequence

    def confirm(self, sequence: Sequence[Case]) -> Record | None:
        """The record of the case after the sequence, if the case fails again after the sequence, and passes again
        alone. A result that varies from run to run rarely does both."""
        again, alone = self.run(sequence), self.run([])
        return again if self._is_same(again) and alone is not None and alone.verdict == "pass" else None


def _named(sequence: Sequence[Case]) -> str:
    """The ids of a sequence, of a long one the first."""
    names = [case.id for case in sequence[:NAMED]]
    if len(sequence) > NAMED:
        names.append(f"{len(sequence) - NAMED} more")
    return " and ".join(names)
