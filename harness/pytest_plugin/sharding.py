"""Shards under pytest: only the collected cases of a shard remain."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.pytest_plugin.items import CaseItem
from narrowgauge.harness.pytest_plugin.options import plugin_options
from narrowgauge.harness.records.journal import JournalError
from narrowgauge.harness.running.shard import Part, Shard, ShardError, part_of, read_durations

_DURATIONS = "narrowgauge_durations"
"""Key of an xdist worker's input: the durations. The durations are read once, because the run may overwrite them."""
_SELECTION = "narrowgauge_selection"
"""Attribute of a case's setup report: the digest, for an xdist controller, which does not collect."""


class Sharding:
    """`--ng-shard`. Items that are no cases remain in every shard."""

    def __init__(self, config: pytest.Config, shard: str, durations: str) -> None:
        """`shard`: `2/4`. `durations`: path of a report or journal, or empty.

        Raises UsageError if an option is invalid, or if the durations cannot be read.
        """
        try:
            self.shard = Shard.parse(shard)
            if hasattr(config, "workerinput"):
                self._seconds: dict[str, float] = config.workerinput[_DURATIONS]
            else:
                self._seconds = read_durations(config.rootpath / Path(durations)) if durations else {}
        except (ShardError, JournalError) as error:
            raise pytest.UsageError(plugin_options(error)) from error
        self.part: Part | None = None
        """Part of the cases collected in this process."""
        self.selection = ""
        """Digest of the cases of all shards (`harness.running.shard.digest`)."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        """Divide the cases that remain after -k, -m and similar options."""
        yield
        cases = [item.case for item in items if isinstance(item, CaseItem)]
        try:
            self.part = part_of(cases, self.shard, self._seconds)
        except ShardError as error:
            message = plugin_options(error)
            if not hasattr(config, "workerinput"):
                raise pytest.UsageError(message) from error
            # An error here counts as a died worker for xdist; a failed collection report reaches the controller.
            config.hook.pytest_collectreport(report=pytest.CollectReport("--ng-shard", "failed", message, []))
            items.clear()
            return
        self.selection = self.part.selection
        shard_ids = {case.id for case in self.part.cases}
        others = [item for item in items if isinstance(item, CaseItem) and item.case.id not in shard_ids]
        config.hook.pytest_deselected(items=others)
        removed = set(others)
        items[:] = [item for item in items if item not in removed]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the durations to an xdist worker."""
        node.workerinput[_DURATIONS] = self._seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        setattr(report, _SELECTION, self.selection)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.selection = getattr(report, _SELECTION, self.selection)
