"""Output of a backend: a pipe that the judge empties, so that no flood fills a disk or stops a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from narrowgauge.harness.machine.plain_text import escape

LIMIT = 1 << 16
"""Bytes of the output of a case that are printed."""
_PART = 1 << 16
_READS = 64


def forward(pipe: int, printed: int) -> tuple[int, bool]:
    """Print the text in a pipe, up to `LIMIT` bytes of a case, of which `printed` are printed. Control characters are
    escaped: the text may reach the log of a CI system.

    Gives the bytes printed so far, and whether the pipe is open.
    """
    for _ in range(_READS):
        try:
            content = os.read(pipe, _PART)
        except BlockingIOError:
            return printed, True
        except OSError:
            return printed, False
        if not content:
            return printed, False
        shown = content[: max(0, LIMIT - printed)]
        if printed <= LIMIT < printed + len(content):
            shown += b"\n(the case printed more than 64 KiB; the rest is left out)\n"
        printed += len(content)
        if shown:
            with suppress(OSError, ValueError):
                sys.stdout.write(escape(shown.decode(errors="replace")))
                sys.stdout.flush()
    return printed, True
