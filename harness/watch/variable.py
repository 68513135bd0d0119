"""The environment variable that starts watches: NARROWGAUGE_WATCH=module:name."""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

from narrowgauge.harness.watch.judge_process import VARIABLE
from narrowgauge.harness.watch.watch import watch


def start_named() -> None:
    """Start the watches that the variable names, separated by commas, and stop them at the end of the process.

    The summary of a watch that saw a call goes to stderr. A watch that cannot start is named on stderr; nothing is
    raised.
    """
    for place in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            module, _, name = place.strip().partition(":")
            found = getattr(import_module(module), name)
            if not isinstance(found, watch):
                raise TypeError(f"{name} is a {type(found).__name__}; make it with narrowgauge.watch(...)")
            found.start()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"{VARIABLE}={place}: not started: {reason}; give module:name of a watch", file=sys.stderr)
        else:
            atexit.register(_stop, found)


def _stop(found: watch) -> None:
    if not found.stop() and found.calls:
        print(found.summary(), file=sys.stderr)
