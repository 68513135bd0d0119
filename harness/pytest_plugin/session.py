"""A session with cases: collection of case files, the process of the cases, the records and the report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from narrowgauge.harness.backends.loading import normal_name
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import LEDGER, load, passed_over_note
from narrowgauge.harness.cases.operations import OperationError, use_operations
from narrowgauge.harness.gate.ledger import Ledger, LedgerError, Ledgers, is_link
from narrowgauge.harness.gate.ledger import load as load_ledger
from narrowgauge.harness.pytest_plugin.items import CaseFile, CaseItem, LedgerFile, node_of
from narrowgauge.harness.pytest_plugin.options import DEFAULTS, Asked, paths_of, plugin_options
from narrowgauge.harness.pytest_plugin.sharding import Sharding
from narrowgauge.harness.records.record import new_record, outcome
from narrowgauge.spec.recipes import RuleError, use_rules

if TYPE_CHECKING:
    from narrowgauge.harness.pytest_plugin.sandbox import Runner
    from narrowgauge.harness.records.journal import Journal, RecordedRun
    from narrowgauge.harness.records.record import Record
    from narrowgauge.harness.running.worker import Settings

_ATTRIBUTE = "narrowgauge"
"""Attribute of a test report with the record: plain values, which cross from an xdist worker to the controller."""
_LOADED = "narrowgauge-loaded"
"""Attribute of a test report with the sources that the backend has loaded since the report before."""
_DONE = "narrowgauge-done"
"""Key of an xdist worker's input: ids of the cases with a record of an earlier run."""
_FOREIGN = "narrowgauge-foreign"
"""Key of an xdist worker's output: the foreign TOML files that it passed over."""


@dataclass(frozen=True)
class Options:
    """Settings of the session of cases, from the command line and the ini file."""

    backend: str
    device: str
    tier: str
    keyword: str
    seed: int
    report_dir: str
    known: str
    schedules: int
    sanitize: bool
    link: str
    resume: bool
    shard: str
    durations: str
    no_history: bool

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """The settings of a session. Raises UsageError for a number that is none."""
        option = config.option
        values: dict[str, Any] = {}
        for name, default in DEFAULTS.items():
            value = getattr(option, f"ng_{name}")
            values[name] = config.getini(f"narrowgauge_{name}") if value is None else value
            if isinstance(default, int):
                try:
                    values[name] = int(values[name])
                except ValueError:
                    word = f"--ng-{name} or narrowgauge_{name}"
                    raise pytest.UsageError(f"{word} is {values[name]!r}; it is a whole number") from None
        base = config.inipath.parent if option.ng_backend is None and config.inipath else config.invocation_params.dir
        values["backend"] = normal_name(str(values["backend"]), base)
        flags = ("sanitize", "link", "resume", "shard", "durations", "no_history")
        return cls(**values, **{name: getattr(option, f"ng_{name}") for name in flags})

    @property
    def guards(self) -> dict[str, Any]:
        """Settings of the worker from --ng-schedules and --ng-sanitize."""
        return {"schedules": self.schedules if self.schedules > 1 else 0, "sanitize": self.sanitize}

    @property
    def place(self) -> dict[str, Any]:
        """Backend, device and seed, as records name them."""
        return {"backend": self.backend, "device": self.device, "seed": self.seed}


def start(config: pytest.Config, asked: Asked) -> None:
    """Register markers and the session. Raises UsageError if the device is not available or options are invalid."""
    from narrowgauge.harness.backends.backend import BackendError, check_device, check_schedules
    from narrowgauge.harness.cases.case import matching
    from narrowgauge.harness.cases.keys import TIERS, nearest

    options = Options.of(config)
    try:
        use_operations(paths_of(config, "operations"))
    except OperationError as error:
        raise pytest.UsageError(f"--ng-operations or narrowgauge_operations: {error}") from error
    try:
        use_rules(paths_of(config, "rules"))
    except RuleError as error:
        raise pytest.UsageError(f"--ng-rules or narrowgauge_rules: {error}") from error
    for name, value, known in (("device", options.device, ("cpu", "cuda")), ("tier", options.tier, TIERS)):
        if value not in known:
            words = f"--ng-{name} or narrowgauge_{name} is {value!r}{nearest(value, known)}"
            raise pytest.UsageError(f"{words}; it can be {', '.join(known)}")
    try:
        check_device(options.device)
        check_schedules(options.schedules, options.device)
        _check_sanitizer(config, options)
        matching(options.keyword)
    except (BackendError, ValueError) as error:
        raise pytest.UsageError(plugin_options(error)) from error
    if options.link and not is_link(options.link):
        raise pytest.UsageError(f"--ng-link is {options.link!r}; it is the address of a page: https://…")
    if options.durations and not options.shard:
        raise pytest.UsageError("--ng-durations divides cases into shards, and no --ng-shard is given")
    config.addinivalue_line("markers", "quick: a case of the quick tier")
    config.addinivalue_line("markers", "full: a case of the full tier only")
    sharding = Sharding(config, options.shard, options.durations) if options.shard else None
    if sharding is not None:
        config.pluginmanager.register(sharding, "narrowgauge-sharding")
    config.pluginmanager.register(Session(config, options, asked, sharding), "narrowgauge-session")
    _add_arguments(config, asked)


def _add_arguments(config: pytest.Config, asked: Asked) -> None:
    """Add the folders of case files to the arguments of pytest.

    Folders of the ini file are added only if the command names no file or folder: `pytest tests/test_one.py` runs no
    case.
    """
    if config.option.ng_cases is None and config.args_source == pytest.Config.ArgsSource.ARGS:
        return
    given = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    for path in asked.paths:
        place = path.resolve()
        if not any(place == arg or arg in place.parents for arg in given):
            config.args.append(str(path))


def _check_sanitizer(config: pytest.Config, options: Options) -> None:
    """Raise BackendError or UsageError if --ng-sanitize is given and impossible. Checked by the controller only."""
    if not options.sanitize or hasattr(config, "workerinput"):
        return
    from narrowgauge.harness.running.sanitizer import check_sanitizer

    check_sanitizer(options.device)
    if in_process(config):
        raise pytest.UsageError("--ng-sanitize runs cases in processes that have the sanitizers, and --pdb in this one")


def _ledgers(config: pytest.Config, options: Options) -> Ledgers:
    """Ledgers of the run: the files beside the case files, or the file of --ng-known. Empty with --runxfail.

    Raises UsageError if the file of --ng-known is invalid.
    """
    if config.option.runxfail:
        return Ledgers(Ledger())
    try:
        return Ledgers(load_ledger(Path(options.known)) if options.known else None)
    except LedgerError as error:
        raise pytest.UsageError(plugin_options(error)) from error


def in_process(config: pytest.Config) -> bool:
    """Whether cases run in this process: with --pdb, to let the debugger stop in the backend."""
    return bool(config.option.usepdb)


class Session:
    """State of a run: the process for the cases of each pytest process, and the records on the xdist controller."""

    def __init__(self, config: pytest.Config, options: Options, asked: Asked, sharding: Sharding | None) -> None:
        self.config = config
        self.options = options
        self.asked = asked
        self.sharding = sharding
        self.is_worker = hasattr(config, "workerinput")
        self.directory = config.rootpath / options.report_dir
        self.ledgers = _ledgers(config, options)
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
        self.warning = ""
        """Why the run is not in the history."""
        self.compared = False
        """Whether a case compared an element."""
        self.sharing = 1
        """Number of cases that share the false alarms of the run."""
        self.foreign: list[Path] = []
        """TOML files in folders of case files that are no case files (`harness.cases.case_file.ForeignFile`)."""
        self._done: set[str] = set(getattr(config, "workerinput", {}).get(_DONE, ()))
        self._earlier: RecordedRun | None = None
        """The resumed run, on the controller."""
        self._left_out: list[Case] = []

    @pytest.hookimpl
    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Collect the case files that are asked for."""
        if file_path.suffix != ".toml":
            return None
        named = parent.session.isinitpath(file_path)
        if file_path.name == LEDGER:  # for cases/*.toml on the command line pytest needs a collector for the ledger too
            return LedgerFile.from_parent(parent, path=file_path) if named else None
        if named or any(file_path == path or path in file_path.parents for path in self.asked.paths):
            return CaseFile.from_parent(parent, path=file_path, nodeid=node_of(file_path, parent.config.rootpath))
        return None

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Apply the timeout to the worker of a case. pytest-timeout would end the process that waits for the worker."""
        if not isinstance(item, CaseItem) or in_process(item.config):
            return None
        item.timeout = settings.timeout
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
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
        if "runner" in vars(self):
            setattr(report, _LOADED, list(self.runner.loaded))
            self.runner.loaded.clear()
        return report

    def tier_of(self, file: Path) -> str:
        """Tier that limits the cases of a file: none for a file whose case is named on the command line."""
        return "full" if file in self.asked.chosen else self.options.tier

    @cached_property
    def settings(self) -> Settings:
        """Settings of the worker."""
        from narrowgauge.harness.records.journal import FAILURES
        from narrowgauge.harness.running.worker import Settings

        options = self.options
        seconds = self.config.getoption("timeout", None) or 0.0
        return Settings(
            options.backend, options.device, options.seed, **options.guards, timeout=max(Settings.timeout, seconds),
            workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), failures=str(self.directory / FAILURES),
        )  # fmt: skip

    def new_record(self, case: Case) -> Record:
        """Record of a case before any measurement."""
        return new_record(case, **self.options.place, options=self.settings.options)

    @cached_property
    def runner(self) -> Runner:
        """Runs the cases of this process in a worker, which may die."""
        from narrowgauge.harness.pytest_plugin.sandbox import InProcess, Sandbox

        number = getattr(self.config, "workerinput", {}).get("workerid", "gw0").removeprefix("gw")
        return InProcess(self.settings) if in_process(self.config) else Sandbox(self.settings, int(number))

    def run(self, item: CaseItem) -> dict[str, Any]:
        """Record of an item."""
        from narrowgauge.harness.running.worker import Task

        task = Task(item.case, self.options.seed)
        return self.runner.run(task, timeout=item.timeout, sharing=self.sharing, note=item.note)

    @cached_property
    def journal(self) -> Journal:
        """Journal of this run, on the controller. Raises UsageError if an earlier journal cannot be resumed."""
        from narrowgauge.harness.records.journal import Journal, JournalError

        def clock() -> float:
            return time.monotonic() - self.started

        try:
            if not self.options.resume:
                return Journal(self.directory, self.header, clock=clock)
            return Journal.resumed(self.directory, self.header(), clock=clock)
        except JournalError as error:
            raise pytest.UsageError(plugin_options(error)) from error

    def header(self) -> RecordedRun:
        """The run without records."""
        from narrowgauge.harness.records.journal import new_run

        options, sharding = self.options, self.sharding
        # The xdist controller gets the selection from the first report.
        selection = sharding.selection or (self._earlier.selection if self._earlier else "") if sharding else ""
        return new_run(
            self.cases, **options.place, shard=str(sharding.shard) if sharding else None,
            selection=selection, **options.guards, command=self._command(),
        )  # fmt: skip

    def _command(self) -> str:
        """The command of this session, without --ng-resume."""
        words = map(str, self.config.invocation_params.args)
        return shlex.join(["pytest", *(word for word in words if word != "--ng-resume")])

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        """With --ng-resume: read the ids of the finished cases."""
        from narrowgauge.harness.records.journal import JournalError, read

        if self.options.resume and not self.is_worker:
            try:
                self._earlier = read(self.directory)
            except JournalError as error:
                raise pytest.UsageError(plugin_options(error)) from error
            self._done = {record["case"] for record in self._earlier.records}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the ids of the finished cases to an xdist worker. A replacement worker must collect the same cases."""
        node.workerinput[_DONE] = sorted(self._done)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the foreign files from an xdist worker. A worker that died sends nothing."""
        found = map(Path, getattr(node, "workeroutput", {}).get(_FOREIGN, ()))
        self.foreign += [path for path in found if path not in self.foreign]

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
                raise pytest.UsageError(plugin_options(error)) from error
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
        for news in getattr(report, _LOADED, ()):
            self.journal.sources.add(news)
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
            pytest.exit(plugin_options(error), returncode=pytest.ExitCode.INTERRUPTED)

    def _crash(self, report: pytest.TestReport) -> dict[str, Any]:
        path, _, name = report.nodeid.partition("::")
        case = next(case for case in load(self.config.rootpath / path) if case.id == name)
        record = self.new_record(case)
        record.verdict, record.message = "crash", "the pytest worker died while it ran this case"
        return record.to_dict()

    @property
    def missing(self) -> int:
        """Number of selected cases without a record."""
        return len(self.cases) - len(self.records)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report. A run without a compared element fails, even if each case was only skipped."""
        if self.is_worker:
            self.config.workeroutput[_FOREIGN] = [str(path) for path in self.foreign]  # type: ignore[attr-defined]
        if self.is_worker or not self.records:
            return
        from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
        from narrowgauge.harness.records.environment import describe_run
        from narrowgauge.harness.records.history import path_beside, update
        from narrowgauge.harness.records.record import elements_compared, outcome
        from narrowgauge.harness.report.github import run_link
        from narrowgauge.harness.report.report import ReportError, write_journaled

        self.compared = any(map(elements_compared, self.records))
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            passed = self.compared and all(
                outcome(r) in ("pass", "known", "unsupported") for r in self.journal.earlier_records
            )
            session.exitstatus = pytest.ExitCode.OK if passed else pytest.ExitCode.TESTS_FAILED
        options = self.options
        self.environment = describe_run(**options.place, **options.guards)
        self.elapsed, self.link = self.journal.elapsed, options.link or run_link()
        add_baseline_notes(self.records, self.environment)
        past: list[dict[str, Any]] = []
        if not self.options.no_history and not self.sharding:
            complete = not self.missing and len(self.records) > len(self.journal.earlier_records)
            run = replace(self.header(), records=self.records, elapsed=self.elapsed)
            self.warning, past = update(run, path_beside(self.directory), complete=complete)
        try:
            self.page = write_journaled(
                self.records, self.environment, self.directory, elapsed=self.elapsed, link=self.link, past=past
            )
        except ReportError as error:
            self.problem = plugin_options(error)
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.is_worker or not (self.records or self.foreign):
            return
        terminalreporter.section("narrowgauge")
        if self.foreign:
            here = self.config.invocation_params.dir
            names = [Path(os.path.relpath(path, here)) for path in self.foreign]
            terminalreporter.line(passed_over_note(names))
        if not self.records:
            return
        from narrowgauge.harness.report.github import publish
        from narrowgauge.harness.report.text import remarks

        if not self.compared:
            terminalreporter.line("nothing was compared", red=True, bold=True)
        for line in remarks(self.records):
            terminalreporter.line(line)
        for name, reason in self.journal.sources.unverified.items():
            terminalreporter.line(f"not verified: {name}: {reason}", yellow=True)
        if self.warning:
            terminalreporter.line(plugin_options(self.warning), yellow=True)
        if self.missing:
            message = f"{self.missing} of {len(self.cases)} cases did not run; --ng-resume goes on with them"
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
