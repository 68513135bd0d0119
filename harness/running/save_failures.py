"""Which failures of a process are shrunk and saved: a few, and of each kind the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.harness.backends.backend import Backend, error_location
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.records.saved_failure import SavedFailure, SavedFailureError, failure_path, save
from narrowgauge.harness.running.shrink import shrink

MOST = 4
"""Failures that a process shrinks and saves. A failure costs at most `shrink.WORK` judgements."""


@dataclass
class Keeper:
    """Shrinks and saves failures of one process into a folder."""

    directory: Path
    before: Callable[[dict[str, Any]], None] | None = None
    """Given the record before its case is run again: a kernel may end the process at another shape."""
    _kinds: set[tuple[str, ...]] = field(default_factory=set)
    _shrinks: bool = True
    """False after a kernel ended or stopped its host at another shape."""

    def keep(self, record: Record, case: Case, inputs: Inputs, outcome: Outcome, backend: Backend) -> None:
        """Shrink and save a failure of a new kind, and note it in its record; an error is noted in the record too.

        A kind is an operation, a recipe, the first wrong stage and its first explanation.
        """
        first: dict[str, Any] = next(iter(record.explanations), {"cause": "", "exact": False})
        kind = (record.operation, record.recipe, record.stage, first["cause"])
        if kind in self._kinds or len(self._kinds) == MOST:
            return
        self._kinds.add(kind)
        if self.before is not None:
            self.before(record.to_dict())
        # Common properties of wrong elements, above all their place, change with the shape.
        cause = first["cause"] if first["exact"] else ""
        part = case
        try:
            if self._shrinks and (small := shrink(case, inputs, outcome, backend, cause=cause)):
                part, inputs, outcome = small.case, small.inputs, small.outcome
                record.shrunk = "x".join(map(str, part.shape))
        except HostLost as lost:
            record.save_note = f"not shrunk: at another shape, {lost.verdict}: {lost}"
            self._shrinks = False  # the next failure could cost as much
        except Exception as error:
            record.save_note = f"not shrunk: {type(error).__name__}: {error}{error_location(error)}"
        path = failure_path(self.directory, case, backend=backend.name, device=record.device, seed=record.seed)
        try:
            save(path, SavedFailure(case.id, part, inputs, record.seed, backend.name, record.stage), outcome)
            record.saved = _from_here(path)
        except SavedFailureError as error:
            record.save_note = f"not saved: {error}"
        except Exception as error:
            record.save_note = f"not saved: {type(error).__name__}: {error}{error_location(error)}"


def _from_here(path: Path) -> str:
    """The path, relative to the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)
