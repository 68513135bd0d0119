"""The `narrowgauge` command. Commands import torch and pandas only if needed."""

from narrowgauge.harness.cli.commands import app, main

__all__ = ["app", "main"]
