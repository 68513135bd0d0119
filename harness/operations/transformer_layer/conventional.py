"""Calls of TransformerLayer in conventional tests."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.modules.conventional import trained
from narrowgauge.harness.operations.stages.sample import Door

_SIZES = (128, 256, 4)
"""Hidden size, feed-forward size, and heads."""
DOORS = {
    "TransformerLayer": Door(partial(trained, kind="TransformerLayer", sizes=_SIZES, hidden=_SIZES[0]), of_module=True),
}
