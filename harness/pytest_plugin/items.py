"""Collected files and items: case files, and cases as items."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.case_file import CaseFileError, ForeignFile, load
from narrowgauge.harness.gate.ledger import Ledger, LedgerError
from narrowgauge.harness.records.record import Record, outcome


def node_of(file: Path, root: Path) -> str:
    """Node id of a case file. pytest's own node id of a file outside its root is only the name, or empty."""
    return (file.relative_to(root) if file.is_relative_to(root) else file).as_posix()


class CaseFile(pytest.File):
    """A TOML file of the matrix."""

    def collect(self) -> Iterator[pytest.Item]:
        session: Any = self.config.pluginmanager.get_plugin("narrowgauge-session")
        try:
            cases = load(self.path)
            ledger = session.ledgers.ledger_for(self.path.parent, cases)
        except ForeignFile as error:
            if self.session.isinitpath(self.path):  # a file that is named, not one of a folder
                raise self.CollectError(str(error)) from error
            session.foreign.append(self.path)
            return
        except (CaseFileError, LedgerError) as error:
            raise self.CollectError(str(error)) from error
        options = session.options
        tier = session.tier_of(self.path)
        for case in select(cases, tier=tier, keyword=options.keyword, device=options.device):
            yield CaseItem.from_parent(self, name=case.id, case=case, ledger=ledger)


class LedgerFile(pytest.File):
    """A ledger beside case files, without cases."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class CaseFailed(Exception):
    """A case did not pass, or passed against the ledger. The record says why."""


class CaseItem(pytest.Item):
    """A case."""

    def __init__(self, *, case: Case, ledger: Ledger, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.ledger = ledger
        self.record: dict[str, Any] | None = None
        self.timeout = math.inf
        """Time limit of the case in seconds, from pytest-timeout."""
        self.add_marker(getattr(pytest.mark, case.tier_on(self.session_of_cases.options.device)))

    @property
    def session_of_cases(self) -> Any:
        """The `Session` of the plugin."""
        return self.config.pluginmanager.get_plugin("narrowgauge-session")

    def runtest(self) -> None:
        session, options = self.session_of_cases, self.session_of_cases.options
        self.note(self.ledger.stand_in(self.case, **options.place) or session.run(self))
        assert self.record is not None
        self.ledger.mark(self.record)
        if self.record["verdict"] == "unsupported":
            pytest.skip(self.record["message"])
        if outcome(self.record) != "pass":
            raise CaseFailed(self.record["message"])

    def note(self, record: dict[str, Any]) -> None:
        """Store the record. If a timeout ends the shrinking of a failure, the stored failure remains."""
        self.record = record

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The first-failure view instead of a traceback into the harness."""
        from narrowgauge.harness.backends.backend import BackendError
        from narrowgauge.harness.report.failure_view import first_failure

        if self.record is not None and outcome(self.record) == "unexpected":
            return f"[XPASS(strict)] {self.record['message']}: {self.record['known']}"
        if self.record is not None and self.record["verdict"] != "pass":
            return first_failure(self.record)
        if isinstance(excinfo.value, BackendError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def without_result(self, error: BaseException) -> dict[str, Any]:
        """Record of a case ended by pytest-timeout, or of a case without a start."""
        record: Record = self.session_of_cases.new_record(self.case)
        timeout = isinstance(error, pytest.fail.Exception) and "Timeout" in str(error)
        record.verdict, record.message = ("timeout" if timeout else "error"), str(error) or type(error).__name__
        return record.to_dict()

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
