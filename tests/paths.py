"""Folders of the checkout that tests read, and the name of the pytest plugin."""

from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = ROOT / "cases"
_INSTALLED = entry_points(group="pytest11", name="narrowgauge")
PLUGIN = "narrowgauge" if _INSTALLED else "narrowgauge.harness.pytest_plugin.plugin"
"""Name of the plugin for `pytest -p`: the entry point, or the module where narrowgauge is not installed."""
