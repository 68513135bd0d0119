"""Calls of GroupedLinear in conventional tests."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.modules.conventional import trained
from narrowgauge.harness.operations.stages.sample import COLUMNS, SIZES, SUM, Door

_SIZES = (len(SIZES), SUM, COLUMNS)
DOORS = {
    "GroupedLinear": Door(partial(trained, kind="GroupedLinear", sizes=_SIZES, sections=True), of_module=True),
}
