"""The pytest plugin: TOML case files are collected, a case is an item, records become a report."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.case import Case, CaseFileError, load

if TYPE_CHECKING:
    from harness.backend import Backend
    from harness.keep import Keeper
    from harness.record import Record

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Where torch has a thread a core in each, they wait for one another: twice the time.
    _workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

_ATTRIBUTE = "narrowgauge"
"""Of a test report: the record. Plain values, so it crosses from an xdist worker to the controller."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowgauge")
    group.addoption("--backend", default="native", help="native, reference, or package.module:Name (default: native)")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the cases run (default: cpu)")
    group.addoption("--case-seed", type=int, default=0, help="seed of the inputs, beside the case's id (default: 0)")
    group.addoption(
        "--report-dir", default="reports/latest", metavar="DIR", help="report of the cases (default: reports/latest)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and the records of this run. Raises UsageError where the device is not there."""
    from harness.backend import BackendError, check_device

    try:
        check_device(config.option.device)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from error
    config.addinivalue_line("markers", "quick: a case of the quick tier")
    config.addinivalue_line("markers", "full: a case of the full tier only")
    config.pluginmanager.register(Session(config), "narrowgauge-session")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Case files: *.toml in a folder called cases, and any *.toml named on the command line."""
    if file_path.suffix != ".toml":
        return None
    if file_path.parent.name == "cases" or parent.session.isinitpath(file_path):
        return CaseFile.from_parent(parent, path=file_path)
    return None


class CaseFile(pytest.File):
    """One TOML file of the matrix."""

    def collect(self) -> Iterator[pytest.Item]:
        try:
            cases = load(self.path)
        except CaseFileError as error:
            raise self.CollectError(str(error)) from error
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, case=case)


class CaseFailed(Exception):
    """A case whose verdict is not pass; the record says why."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.record: dict[str, Any] | None = None
        self.add_marker(getattr(pytest.mark, case.tier))

    def runtest(self) -> None:
        from harness.runner import run_case

        session = self.config.pluginmanager.get_plugin("narrowgauge-session")
        assert isinstance(session, Session)
        option, keeper = self.config.option, session.keeper()
        keeper.before = self.note
        record = run_case(
            self.case, session.backend(), device=option.device, seed=option.case_seed, keeper=keeper,
            sharing=session.sharing,
        )  # fmt: skip
        self.note(record.to_dict())
        assert self.record is not None
        self.user_properties += [(name, self.record[name]) for name in ("verdict", "stage", "compared", "mismatches")]
        if record.verdict == "unsupported":
            pytest.skip(record.message)
        if record.verdict != "pass":
            raise CaseFailed(record.message)

    def note(self, record: dict[str, Any]) -> None:
        """Keep the record; a timeout that ends the shrinking of a failure leaves the failure."""
        self.record = record

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The first-failure view in place of a traceback, which would show the harness and not the kernel."""
        from harness.backend import BackendError
        from harness.view import first_failure

        if self.record is not None and self.record["verdict"] != "pass":
            return first_failure(self.record)
        if isinstance(excinfo.value, BackendError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def without_result(self, error: BaseException) -> dict[str, Any]:
        """The record of a case that pytest-timeout ended, or that did not even begin."""
        record = _new_record(self.case, self.config)
        timeout = isinstance(error, pytest.fail.Exception) and "Timeout" in str(error)
        record.verdict, record.message = ("timeout" if timeout else "error"), str(error) or type(error).__name__
        return record.to_dict()

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def _new_record(case: Case, config: pytest.Config) -> Record:
    from harness.runner import new_record

    return new_record(case, backend=config.option.backend, device=config.option.device, seed=config.option.case_seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if not isinstance(item, CaseItem) or call.when != "call":
        return (yield)
    if item.record is None and call.excinfo is not None:
        item.record = item.without_result(call.excinfo.value)
    report = yield
    setattr(report, _ATTRIBUTE, item.record)
    return report


class Session:
    """What lasts a run: the backend, once a process, and the records, on the controller alone."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.records: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.page: Path | None = None
        self.compared = False
        """Whether any case compared anything."""
        self._backend: Backend | None = None
        self._keeper: Keeper | None = None
        self.sharing = 1
        """Cases that share the run's false alarms."""

    def backend(self) -> Backend:
        """The backend of the run, loaded at the first case."""
        from harness.backend import load_backend
        from harness.pool import prepare_process

        if self._backend is None:
            prepare_process(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
            self._backend = load_backend(self.config.option.backend, self.config.option.device)
        return self._backend

    def keeper(self) -> Keeper:
        """What shrinks and saves the failures of this process."""
        from harness.keep import Keeper
        from harness.report import FAILURES

        if self._keeper is None:
            self._keeper = Keeper(self.config.rootpath / self.config.option.report_dir / FAILURES)
        return self._keeper

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """One error for a backend that cannot be loaded, in place of one a case; xdist's workers report a case each."""
        from harness.backend import BackendError

        if not self.is_worker and not self.config.option.collectonly and any(isinstance(i, CaseItem) for i in items):
            try:
                self.backend()
            except BackendError as error:
                raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the cases that are left: every worker of xdist has them all."""
        from harness.checks.holm import sharing

        self.sharing = sharing(item.case for item in session.items if isinstance(item, CaseItem))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        if record := getattr(report, _ATTRIBUTE, None):
            self.records.append(record)
        elif str(report.when) == "???" and ".toml::" in report.nodeid:  # how xdist reports a worker that died
            self.records.append(self._crash(report))

    def _crash(self, report: pytest.TestReport) -> dict[str, Any]:
        path, _, name = report.nodeid.partition("::")
        case = next(case for case in load(self.config.rootpath / path) if case.id == name)
        record = _new_record(case, self.config)
        record.verdict, record.message = "crash", "the pytest worker died while it ran this case"
        return record.to_dict()

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report. Cases of which none compared anything are a failure, though each was only skipped."""
        if self.is_worker or not self.records:
            return
        from harness.environment import describe_run
        from harness.record import elements_compared
        from harness.report import write

        self.compared = any(map(elements_compared, self.records))
        if not self.compared and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

        option = self.config.option
        environment = describe_run(backend=option.backend, device=option.device, seed=option.case_seed)
        directory = self.config.rootpath / option.report_dir
        self.page = write(self.records, environment, directory, elapsed=time.monotonic() - self.started)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.page is not None:
            from harness.report.text import not_compared

            terminalreporter.section("narrowgauge")
            if not self.compared:
                terminalreporter.line("nothing was compared", red=True, bold=True)
            terminalreporter.line(not_compared(self.records))
            terminalreporter.line(f"{len(self.records)} cases; report: {self.page}")
