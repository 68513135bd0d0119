"""The `narrowgauge` command. Commands import torch and pandas only if needed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typer import Typer

    app: Typer

__all__ = ["app", "main"]


def main() -> None:
    """Entry point. `narrowgauge run` starts its processes before it imports the commands: they import torch."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("narrowgauge: the current folder was deleted; change to another folder", file=sys.stderr)
        sys.exit(2)
    if sys.argv[1:2] == ["run"] and "--help" not in sys.argv:
        from narrowgauge.harness.hosts.starter import end_orphans_at_exit
        from narrowgauge.harness.running.supervisor import start_server

        end_orphans_at_exit()
        start_server()
    from narrowgauge.harness.cli import commands

    commands.main()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from narrowgauge.harness.cli.commands import app

    return app
