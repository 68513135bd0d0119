"""Makes a plain checkout run its case files, also where narrowgauge is not installed."""

pytest_plugins = ["harness.plugin"]
