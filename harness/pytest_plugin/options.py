"""What a session is asked for: the settings, and the case files. Imports only pytest and the standard library."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

DEFAULTS = {
    "backend": "native", "device": "cpu", "tier": "quick", "keyword": "", "seed": 0, "report_dir": "reports/latest",
    "known": "", "schedules": 1,
}  # fmt: skip
"""Settings of the command line, `--ng-report-dir`, and of the ini file, `narrowgauge_report_dir`, and their defaults.
The command line wins."""


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


def paths_of(config: pytest.Config, setting: str) -> list[Path]:
    """Absolute paths of the values of --ng-SETTING or narrowgauge_SETTING: `operations`, `rules`."""
    words, base = getattr(config.option, f"ng_{setting}"), config.invocation_params.dir
    if words is None:
        words = config.getini(f"narrowgauge_{setting}")
        base = config.inipath.parent if config.inipath else config.rootpath
    return [_absolute(base, word) for word in words]


def _absolute(base: Path, word: str) -> Path:
    return Path(os.path.abspath(base / word))


def _case_path(word: str, base: Path) -> Path:
    """Absolute path of a value of --ng-cases or narrowgauge_cases. Raises UsageError if there is none."""
    path = _absolute(base, word)
    if not path.exists():
        from narrowgauge.harness.cases.case_file import SHIPPED, case_path

        if (shipped := case_path(Path(word))).exists():
            return shipped
        raise pytest.UsageError(f"narrowgauge: there is no case file or folder {path}; {SHIPPED} is the package's own")
    return path


_OPTION = re.compile("--(?=backend|device|schedules|sanitize|durations|report-dir|resume|no-history|shard|known|link)")


def plugin_options(message: object) -> str:
    """A message of `narrowgauge run` with the names of the options of pytest."""
    return _OPTION.sub("--ng-", str(message))
