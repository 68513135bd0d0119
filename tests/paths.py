"""Folders of the checkout that tests read, and the name of the pytest plugin."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = ROOT / "cases"
PLUGIN = "narrowgauge.harness.pytest_plugin.plugin"
