"""Calls of MoELayer in conventional tests."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.modules.conventional import trained
from narrowgauge.harness.operations.stages.sample import COLUMNS, Door

_SIZES = (4, COLUMNS, 64)
"""Experts, hidden size, and feed-forward size."""
DOORS = {
    "MoELayer": Door(
        partial(trained, kind="MoELayer", sizes=_SIZES, hidden=COLUMNS, experts=_SIZES[0]), of_module=True
    ),
}
