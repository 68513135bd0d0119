"""The `narrowgauge` command: what pytest is not for. torch and pandas are imported by the commands that need them."""

from narrowgauge.harness.cli.commands import app, main

__all__ = ["app", "main"]
