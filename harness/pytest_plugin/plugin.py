"""The pytest plugin: its options, and the session of cases in a project that asks for cases.

A project that asks for none gets options and ini settings, and nothing else. This module therefore imports only pytest
and the standard library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SHIPPED = "shipped"
"""Value of --ng-cases and narrowgauge_cases: the case files of the package."""
DEFAULTS = {
    "backend": "native", "device": "cpu", "tier": "quick", "keyword": "", "seed": 0, "report_dir": "reports/latest",
    "known": "", "schedules": 1,
}  # fmt: skip
"""Settings of the command line, `--ng-report-dir`, and of the ini file, `narrowgauge_report_dir`, and their defaults.
The command line wins."""


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
        "cases", f"case file, or folder of case files, to collect; may be given again. {SHIPPED}: those of the package "
        "(default: narrowgauge_cases in the ini file)", action="append", metavar="PATH",
    )  # fmt: skip
    parser.addini("narrowgauge_cases", help="case files and folders, relative to the ini file", type="args", default=[])
    setting("backend", "native, reference, or package.module:Name", metavar="NAME")
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


class Asked(NamedTuple):
    """Case files that a session collects, beside TOML files among its arguments."""

    paths: tuple[Path, ...]
    """Files and folders of --ng-cases or of narrowgauge_cases."""
    chosen: frozenset[Path]
    """Files of arguments with the id of a case: `small.toml::quantize/nvfp4/…`. The tier does not limit them."""


def asked_for(config: pytest.Config) -> Asked | None:
    """Case files of the session, absolute paths. None if no cases are asked for.

    Raises UsageError for a path that does not exist.
    """
    words, base = config.option.ng_cases, config.invocation_params.dir
    if words is None:
        words = config.getini("narrowgauge_cases")
        base = config.inipath.parent if config.inipath else config.rootpath
    paths = tuple(_case_path(word, base) for word in words)
    arguments = [argument.partition("::") for argument in config.args]
    named = {
        _absolute(config.invocation_params.dir, file): case
        for file, _, case in arguments
        if Path(file).suffix == ".toml"
    }
    return Asked(paths, frozenset(file for file, case in named.items() if case)) if paths or named else None


def _absolute(base: Path, word: str) -> Path:
    return Path(os.path.abspath(base / word))


def _case_path(word: str, base: Path) -> Path:
    """Absolute path of a value of --ng-cases or narrowgauge_cases. Raises UsageError if there is none."""
    path = _absolute(base, word)
    if word == SHIPPED and not path.exists():
        return (Path(__file__).parents[2] / "cases").resolve()
    if not path.exists():
        raise pytest.UsageError(f"narrowgauge: there is no case file or folder {path}")
    return path


_OPTION = re.compile("--(?=backend|device|schedules|sanitize|durations|report-dir|resume|shard|known|link)")


def plugin_options(message: object) -> str:
    """A message of `narrowgauge run` with the names of the options of pytest."""
    return _OPTION.sub("--ng-", str(message))
