"""Calls of Linear in conventional tests."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.modules.conventional import trained
from narrowgauge.harness.operations.stages.sample import Door

DOORS = {
    "Linear": Door(partial(trained, kind="Linear"), of_module=True),
    "Linear, two steps": Door(partial(trained, kind="Linear", steps=2), of_module=True),
}
