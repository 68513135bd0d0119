"""What pytest collects: case files, and a case as an item."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from narrowgauge.harness.cases.case import Case, CaseFileError, load
from narrowgauge.harness.gate.ledger import Ledger, LedgerError
from narrowgauge.harness.records.record import outcome

if TYPE_CHECKING:
    from narrowgauge.harness.records.record import Record


def node_of(file: Path, root: Path) -> str:
    """The id of a case file. pytest's own says of a file outside its root nothing but the name, or not even that."""
    return (file.relative_to(root) if file.is_relative_to(root) else file).as_posix()


class CaseFile(pytest.File):
    """One TOML file of the matrix."""

    def collect(self) -> Iterator[pytest.Item]:
        session: Any = self.config.pluginmanager.get_plugin("narrowgauge-session")
        try:
            cases = load(self.path)
            ledger = session.ledgers.of(self.path.parent, cases)
        except (CaseFileError, LedgerError) as error:
            raise self.CollectError(str(error)) from error
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, case=case, ledger=ledger)


class LedgerFile(pytest.File):
    """The ledger beside case files: it has no case."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class CaseFailed(Exception):
    """A case whose verdict is not pass, or that the ledger expects to fail; the record says why."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, ledger: Ledger, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.ledger = ledger
        self.record: dict[str, Any] | None = None
        self.timeout = math.inf
        """Seconds that it may take: pytest-timeout's."""
        self.add_marker(getattr(pytest.mark, case.tier))

    def runtest(self) -> None:
        session: Any = self.config.pluginmanager.get_plugin("narrowgauge-session")
        option = self.config.option
        where = {"backend": option.backend, "device": option.device}
        self.note(self.ledger.stand_in(self.case, **where, seed=option.case_seed) or session.run(self))
        assert self.record is not None
        self.ledger.mark(self.record)
        if self.record["verdict"] == "unsupported":
            pytest.skip(self.record["message"])
        if outcome(self.record) != "pass":
            raise CaseFailed(self.record["message"])

    def note(self, record: dict[str, Any]) -> None:
        """Keep the record; a timeout that ends the shrinking of a failure leaves the failure."""
        self.record = record

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The first-failure view in place of a traceback, which would show the harness and not the kernel."""
        from narrowgauge.harness.backends.backend import BackendError
        from narrowgauge.harness.report.view import first_failure

        if self.record is not None and outcome(self.record) == "unexpected":
            return f"[XPASS(strict)] {self.record['message']}: {self.record['known']}"
        if self.record is not None and self.record["verdict"] != "pass":
            return first_failure(self.record)
        if isinstance(excinfo.value, BackendError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def without_result(self, error: BaseException) -> dict[str, Any]:
        """The record of a case that pytest-timeout ended, or that did not even begin."""
        record = record_of(self.case, self.config)
        timeout = isinstance(error, pytest.fail.Exception) and "Timeout" in str(error)
        record.verdict, record.message = ("timeout" if timeout else "error"), str(error) or type(error).__name__
        return record.to_dict()

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def record_of(case: Case, config: pytest.Config) -> Record:
    from narrowgauge.harness.records.record import new_record

    return new_record(case, backend=config.option.backend, device=config.option.device, seed=config.option.case_seed)
