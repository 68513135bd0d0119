"""Shards under pytest: of the collected cases, those of one shard are left."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.pytest_plugin.items import CaseItem
from narrowgauge.harness.records.journal import JournalError
from narrowgauge.harness.running.shard import Part, Shard, ShardError, part_of, read_durations

_DURATIONS = "narrowgauge_durations"
"""What an xdist worker is told: the durations, read once, lest a run that writes them change what it divides."""
_SELECTION = "narrowgauge_selection"
"""Of a report of a case's setup: what the controller, which collects nothing under xdist, has to know."""


class Sharding:
    """`--shard`, where it is given. Items that are no cases are left in every shard."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises UsageError where the options are no shard, or there are no durations where they say."""
        option = config.option
        try:
            self.shard = Shard.parse(option.shard)
            if hasattr(config, "workerinput"):
                self._seconds: dict[str, float] = config.workerinput[_DURATIONS]
            else:
                path = option.case_durations
                self._seconds = read_durations(config.rootpath / Path(path)) if path else {}
        except (ShardError, JournalError) as error:
            raise pytest.UsageError(str(error).replace("--durations", "--case-durations")) from error
        self.part: Part | None = None
        """Where cases were collected in this process."""
        self.selection = ""
        """Of the cases of all shards (`harness.running.shard.digest`)."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        """Divide what -k, -m and the like leave."""
        yield
        cases = [item.case for item in items if isinstance(item, CaseItem)]
        try:
            self.part = part_of(cases, self.shard, self._seconds)
        except ShardError as error:
            words = str(error).replace("--durations", "--case-durations")
            if not hasattr(config, "workerinput"):
                raise pytest.UsageError(words) from error
            # xdist takes an error here for a worker that died, and hands on what could not be collected.
            config.hook.pytest_collectreport(report=pytest.CollectReport("--shard", "failed", words, []))
            items.clear()
            return
        self.selection = self.part.selection
        mine = {case.id for case in self.part.cases}
        others = [item for item in items if isinstance(item, CaseItem) and item.case.id not in mine]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist."""
        node.workerinput[_DURATIONS] = self._seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        setattr(report, _SELECTION, self.selection)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.selection = getattr(report, _SELECTION, self.selection)
