"""The pytest plugin: its options, and the session of cases in a project that asks for cases.

A project that asks for none gets options and ini settings, and nothing else. This module therefore imports only pytest
and the standard library.
"""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.harness.pytest_plugin.options import DEFAULTS, asked_for


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowgauge", "narrowgauge: cases of kernels of narrow formats")

    def add(name: str, help: str, **options: Any) -> None:
        group.addoption(f"--ng-{name}", dest=f"ng_{name.replace('-', '_')}", help=help, **options)

    def setting(name: str, help: str, **options: Any) -> None:
        default = DEFAULTS[name]
        help = f"{help} (default: narrowgauge_{name} in the ini file, else {default or 'none'})"
        add(name.replace("_", "-"), help, default=None, **options)
        parser.addini(f"narrowgauge_{name}", help=f"as --ng-{name.replace('_', '-')}", default=str(default))

    add(
        "cases", "case file, or folder of case files, to collect; may be given again. shipped: those of the package "
        "(default: narrowgauge_cases in the ini file)", action="append", metavar="PATH",
    )  # fmt: skip
    parser.addini("narrowgauge_cases", help="case files and folders, relative to the ini file", type="args", default=[])
    for name, noun in (("operations", "file or folder of your own operations"), ("rules", "file of your own rules")):
        help = f"{noun}; may be given again (default: narrowgauge_{name} in the ini file)"
        add(name, help, action="append", metavar="PATH")
        parser.addini(f"narrowgauge_{name}", help=f"{noun}, relative to the ini file", type="args", default=[])
    setting("backend", "native, reference, package.module:Name or folder/file.py:Name", metavar="NAME")
    setting("device", "cpu or cuda: where the cases run")
    setting("tier", "quick or full: cases to collect; full contains the quick cases")
    setting("keyword", "keyword expression for the ids of the cases to collect", metavar="EXPRESSION")
    setting("seed", "seed of the inputs, beside the id of the case", metavar="N")
    setting("report_dir", "folder of the report of the cases", metavar="DIR")
    setting("known", "ledger of known failures; none: known.toml beside the case files", metavar="FILE")
    setting("schedules", "orders of threads, seeded shuffles, beside forward and reverse; on a CPU", metavar="N")
    add(
        "sanitize", "build native kernels with sanitizers (address, undefined behaviour); on a CPU", action="store_true"
    )
    add("link", "address of the report, for its summary (default: that of a GitHub run)", default="", metavar="URL")
    add("resume", "go on with the run in --ng-report-dir that was ended", action="store_true")
    add("no-history", "do not append the run to history.sqlite beside --ng-report-dir", action="store_true")
    add("shard", "the I-th of N parts of the cases, which take about equally long", default="", metavar="I/N")
    add("durations", "report or journal of an earlier run, whose times divide the cases of --ng-shard", default="",
        metavar="PATH")  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the session of cases if cases are asked for: by --ng-cases, by narrowgauge_cases, or as arguments.

    Raises UsageError for a path that does not exist, an invalid option and a device that is not available.
    """
    asked = asked_for(config)
    if not asked:
        return
    from narrowgauge.harness.pytest_plugin.session import start

    start(config, asked)
