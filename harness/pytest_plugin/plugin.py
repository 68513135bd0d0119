"""The pytest plugin: collects TOML case files, runs each case as an item, and writes a report."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import LEDGER, load
from narrowgauge.harness.gate.ledger import Ledger, LedgerError, Ledgers, is_link
from narrowgauge.harness.gate.ledger import load as load_ledger
from narrowgauge.harness.machine.processors import cores
from narrowgauge.harness.pytest_plugin.items import CaseFile, CaseItem, LedgerFile, node_of, record_of
from narrowgauge.harness.pytest_plugin.sharding import Sharding
from narrowgauge.harness.records.record import outcome

if TYPE_CHECKING:
    from narrowgauge.harness.pytest_plugin.sandbox import Runner
    from narrowgauge.harness.records.journal import Journal, RecordedRun

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. With a torch thread per core in each worker they take twice the time.
    _workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // _workers)))

_ATTRIBUTE = "narrowgauge"
"""Attribute of a test report with the record: plain values, which cross from an xdist worker to the controller."""
_DONE = "narrowgauge-done"
"""Key of an xdist worker's input: ids of the cases with a record of an earlier run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowgauge")
    group.addoption("--backend", default="native", help="native, reference, or package.module:Name (default: native)")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the cases run (default: cpu)")
    group.addoption("--case-seed", type=int, default=0, help="seed of the inputs, beside the case's id (default: 0)")
    group.addoption(
        "--report-dir", default="reports/latest", metavar="DIR", help="report of the cases (default: reports/latest)"
    )
    group.addoption(
        "--schedules", type=int, default=1, metavar="N",
        help="seeded shuffles of threads that cases run through, beside forward and reverse; on a CPU (default: 1)",
    )  # fmt: skip
    group.addoption(
        "--sanitize", action="store_true",
        help="build native kernels with sanitizers (address, undefined behaviour); on a CPU",
    )  # fmt: skip
    group.addoption(
        "--known", metavar="FILE", help="ledger of known failures (default: known.toml beside the case files)"
    )
    group.addoption(
        "--link",
        default="",
        metavar="URL",
        help="address of the report, for its summary (default: that of a GitHub run)",
    )
    group.addoption("--resume", action="store_true", help="go on with the run in --report-dir that was ended")
    group.addoption(
        "--shard", default="", metavar="I/N", help="the I-th of N parts of the cases, which take about equally long"
    )
    group.addoption(
        "--case-durations", default="", metavar="PATH",
        help="of --shard: report or journal of an earlier run, whose times divide the cases",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register markers and the session. Raises UsageError if the device is not available or options are invalid."""
    from narrowgauge.harness.backends.backend import BackendError, check_device, check_schedules

    try:
        check_device(config.option.device)
        check_schedules(config.option.schedules, config.option.device)
        _check_sanitizer(config)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from error
    if config.option.link and not is_link(config.option.link):
        raise pytest.UsageError(f"--link is {config.option.link!r}; it is the address of a page: https://…")
    config.addinivalue_line("markers", "quick: a case of the quick tier")
    config.addinivalue_line("markers", "full: a case of the full tier only")
    if config.option.case_durations and not config.option.shard:
        raise pytest.UsageError("--case-durations divides cases into shards, and no --shard is given")
    sharding = Sharding(config) if config.option.shard else None
    if sharding is not None:
        config.pluginmanager.register(sharding, "narrowgauge-sharding")
    config.pluginmanager.register(Session(config, sharding), "narrowgauge-session")


def _check_sanitizer(config: pytest.Config) -> None:
    """Raise BackendError or UsageError if --sanitize is given and impossible. Checked by the xdist controller only."""
    if not config.option.sanitize or hasattr(config, "workerinput"):
        return
    from narrowgauge.harness.running.sanitizer import check_sanitizer

    check_sanitizer(config.option.device)
    if in_process(config):
        raise pytest.UsageError("--sanitize runs cases in processes that have the sanitizers, and --pdb in this one")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect *.toml in folders called `cases`, and *.toml files named on the command line."""
    if file_path.suffix != ".toml":
        return None
    if file_path.name == LEDGER:  # for cases/*.toml on the command line pytest needs a collector for the ledger too
        return LedgerFile.from_parent(parent, path=file_path) if parent.session.isinitpath(file_path) else None
    if file_path.parent.name == "cases" or parent.session.isinitpath(file_path):
        return CaseFile.from_parent(parent, path=file_path, nodeid=node_of(file_path, parent.config.rootpath))
    return None


def _ledgers(config: pytest.Config) -> Ledgers:
    """Ledgers of the run: the files beside the case files, or the file of --known. Empty with --runxfail.

    Raises UsageError if the file of --known is invalid.
    """
    if config.option.runxfail:
        return Ledgers(Ledger())
    try:
        return Ledgers(load_ledger(Path(config.option.known)) if config.option.known else None)
    except LedgerError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Apply the timeout to the worker of a case. pytest-timeout would end the process that waits for the worker."""
    if not isinstance(item, CaseItem) or in_process(item.config):
        return None
    item.timeout = settings.timeout
    return True


def in_process(config: pytest.Config) -> bool:
    """Whether cases run in this process: with --pdb, to let the debugger stop in the backend."""
    return bool(config.option.usepdb)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if not isinstance(item, CaseItem) or call.when != "call":
        return (yield)
    if item.record is None and call.excinfo is not None:
        item.record = item.without_result(call.excinfo.value)
    if item.record is not None:
        from narrowgauge.harness.pytest_plugin.junit import properties

        item.ledger.mark(item.record)  # records of cases ended by pytest-timeout are not marked yet
        item.user_properties += properties(item.record)
    report = yield
    if item.record is not None and outcome(item.record) == "known":  # as pytest reports an xfail
        report.outcome, report.wasxfail = "skipped", f"{item.record['verdict']}: {item.record['known']}"
    setattr(report, _ATTRIBUTE, item.record)
    return report


class Session:
    """State of a run: the process for the cases of each pytest process, and the records on the xdist controller."""

    def __init__(self, config: pytest.Config, sharding: Sharding | None) -> None:
        self.config = config
        self.sharding = sharding
        self.is_worker = hasattr(config, "workerinput")
        self.directory = config.rootpath / config.option.report_dir
        self.ledgers = _ledgers(config)
        self.records: list[dict[str, Any]] = []
        self.cases: list[str] = []
        """Ids of all selected cases, on the controller."""
        self.started = time.monotonic()
        self.elapsed = 0.0
        self.environment: dict[str, str] = {}
        self.link = ""
        self.page: Path | None = None
        self.problem = ""
        """Why the report is missing."""
        self.compared = False
        """Whether a case compared an element."""
        self.sharing = 1
        """Number of cases that share the false alarms of the run."""
        self._done: set[str] = set(getattr(config, "workerinput", {}).get(_DONE, ()))
        self._earlier: RecordedRun | None = None
        """The resumed run, on the controller."""
        self._left_out: list[Case] = []

    @cached_property
    def runner(self) -> Runner:
        """Runs the cases of this process in a worker, which may die."""
        from narrowgauge.harness.pytest_plugin.sandbox import InProcess, Sandbox
        from narrowgauge.harness.records.journal import FAILURES
        from narrowgauge.harness.running.worker import Settings

        option = self.config.option
        seconds = self.config.getoption("timeout", None) or 0.0
        settings = Settings(
            option.backend, option.device, option.case_seed, **self.guards, timeout=max(Settings.timeout, seconds),
            workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), failures=str(self.directory / FAILURES),
        )  # fmt: skip
        number = getattr(self.config, "workerinput", {}).get("workerid", "gw0").removeprefix("gw")
        return InProcess(settings) if in_process(self.config) else Sandbox(settings, int(number))

    @property
    def guards(self) -> dict[str, Any]:
        """Settings of the worker from --schedules and --sanitize."""
        option = self.config.option
        return {"schedules": option.schedules if option.schedules > 1 else 0, "sanitize": option.sanitize}

    def run(self, item: CaseItem) -> dict[str, Any]:
        """Record of an item."""
        from narrowgauge.harness.running.worker import Task

        task = Task(item.case, self.config.option.case_seed)
        return self.runner.run(task, timeout=item.timeout, sharing=self.sharing, note=item.note)

    @cached_property
    def journal(self) -> Journal:
        """Journal of this run, on the controller. Raises UsageError if an earlier journal cannot be resumed."""
        from narrowgauge.harness.records.journal import Journal, JournalError

        def clock() -> float:
            return time.monotonic() - self.started

        try:
            if not self.config.option.resume:
                return Journal(self.directory, self.header, clock=clock)
            return Journal.resumed(self.directory, self.header(), clock=clock)
        except JournalError as error:
            raise pytest.UsageError(str(error)) from error

    def header(self) -> RecordedRun:
        """The run without records."""
        from narrowgauge.harness.records.journal import new_run

        option, sharding = self.config.option, self.sharding
        # The xdist controller gets the selection from the first report.
        selection = sharding.selection or (self._earlier.selection if self._earlier else "") if sharding else ""
        return new_run(
            self.cases, backend=option.backend, device=option.device, seed=option.case_seed,
            shard=str(sharding.shard) if sharding else None, selection=selection, **self.guards,
        )  # fmt: skip

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        """With --resume: read the ids of the finished cases."""
        from narrowgauge.harness.records.journal import JournalError, read

        if self.config.option.resume and not self.is_worker:
            try:
                self._earlier = read(self.directory)
            except JournalError as error:
                raise pytest.UsageError(str(error)) from error
            self._done = {record["case"] for record in self._earlier.records}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the ids of the finished cases to an xdist worker. A replacement worker must collect the same cases."""
        node.workerinput[_DONE] = sorted(self._done)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Remove finished cases. Without xdist raise a single error if the backend cannot be loaded; xdist workers
        report it for each case."""
        from narrowgauge.harness.backends.backend import BackendError

        yield
        finished = [item for item in items if isinstance(item, CaseItem) and item.case.id in self._done]
        if finished:
            self._left_out = [item.case for item in finished]
            without = set(finished)
            items[:] = [item for item in items if item not in without]
            self.config.hook.pytest_deselected(items=finished)
        if not self.is_worker and not self.config.option.collectonly and any(isinstance(i, CaseItem) for i in items):
            capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
            capture.resume_global_capture()  # a worker keeps the stdout and stderr of its start
            try:
                self.runner.load()
            except BackendError as error:
                raise pytest.UsageError(str(error)) from error
            finally:
                capture.suspend_global_capture()

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the remaining cases. Every xdist worker has all cases."""
        from narrowgauge.harness.checks.statistics.holm import count_chance_cases

        cases = [item.case for item in session.items if isinstance(item, CaseItem)]
        part = self.sharding.part if self.sharding else None
        self.sharing = part.sharing if part else count_chance_cases([*self._left_out, *cases])
        if not self.is_worker and not self.config.option.collectonly:
            self._begin([case.id for case in cases])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Read the cases from an xdist worker: all workers collect the same cases."""
        if not self.cases:
            self._begin([name for path, _, name in (i.partition("::") for i in ids) if path.endswith(".toml")])

    def _begin(self, cases: list[str]) -> None:
        self.cases = [*sorted(self._done), *cases]
        if self.cases:
            # Create the journal before a case saves a failure: existing saved failures belong to an earlier run.
            self.records = list(self.journal.earlier_records)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        if record := getattr(report, _ATTRIBUTE, None):
            self._keep(record)
        elif str(report.when) == "???" and ".toml::" in report.nodeid:  # xdist's report of a worker that died
            from narrowgauge.harness.pytest_plugin.junit import add_properties

            crash = self._crash(report)
            self._keep(crash)
            add_properties(self.config, report, crash)

    def _keep(self, record: dict[str, Any]) -> None:
        from narrowgauge.harness.records.journal import JournalError

        self.records.append(record)
        try:
            self.journal.add(record)
        except JournalError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.INTERRUPTED)

    def _crash(self, report: pytest.TestReport) -> dict[str, Any]:
        path, _, name = report.nodeid.partition("::")
        case = next(case for case in load(self.config.rootpath / path) if case.id == name)
        record = record_of(case, self.config)
        record.verdict, record.message = "crash", "the pytest worker died while it ran this case"
        return record.to_dict()

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report. A run without a compared element fails, even if each case was only skipped."""
        if self.is_worker or not self.records:
            return
        from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
        from narrowgauge.harness.records.environment import describe_run
        from narrowgauge.harness.records.record import elements_compared, outcome
        from narrowgauge.harness.report.github import run_link
        from narrowgauge.harness.report.report import ReportError, write_journaled

        self.compared = any(map(elements_compared, self.records))
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            passed = self.compared and all(
                outcome(r) in ("pass", "known", "unsupported") for r in self.journal.earlier_records
            )
            session.exitstatus = pytest.ExitCode.OK if passed else pytest.ExitCode.TESTS_FAILED
        option = self.config.option
        context = {"backend": option.backend, "device": option.device}
        self.environment = describe_run(**context, seed=option.case_seed, **self.guards)
        self.elapsed, self.link = self.journal.elapsed, option.link or run_link()
        add_baseline_notes(self.records, self.environment)
        try:
            self.page = write_journaled(
                self.records, self.environment, self.directory, elapsed=self.elapsed, link=self.link
            )
        except ReportError as error:
            self.problem = str(error)
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.records or self.is_worker:
            return
        from narrowgauge.harness.report.github import publish
        from narrowgauge.harness.report.text import not_compared, note_counts

        terminalreporter.section("narrowgauge")
        if not self.compared:
            terminalreporter.line("nothing was compared", red=True, bold=True)
        for line in filter(None, (not_compared(self.records), note_counts(self.records))):
            terminalreporter.line(line)
        if missing := len(self.cases) - len(self.records):
            message = f"{missing} of {len(self.cases)} cases did not run; --resume goes on with them"
            terminalreporter.line(message, red=True, bold=True)
        if self.problem:
            terminalreporter.line(self.problem, red=True, bold=True)
        else:
            terminalreporter.line(f"{len(self.records)} cases; report: {self.page}")
        publish(self.records, self.environment, self.elapsed, link=self.link, print_line=terminalreporter.line)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """End the worker process."""
        if "runner" in vars(self):
            self.runner.close()
        if "journal" in vars(self):
            self.journal.close()
