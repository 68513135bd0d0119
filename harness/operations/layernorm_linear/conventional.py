"""Calls of LayerNormLinear in conventional tests."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.modules.conventional import trained
from narrowgauge.harness.operations.stages.sample import Door

DOORS = {"LayerNormLinear": Door(partial(trained, kind="LayerNormLinear"), of_module=True)}
