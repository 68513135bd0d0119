"""Output of a backend: a pipe emptied by the judge (no flood fills a disk or stops a run), and the stacks of its
threads at the end of its process, in a file of the judge."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from narrowgauge.harness.backends.loading import owner_of
from narrowgauge.harness.machine.plain_text import escape

LIMIT = 1 << 16
"""Largest number of printed bytes of the output of a case."""
_PART = 1 << 16
_READS = 64
_STACKS = 1 << 16
"""Bytes of the file of stacks. faulthandler writes at most 100 frames of 100 threads."""
_DUMP = signal.SIGRTMAX - 3
"""Signal that asks a host for its stacks. Kernels and libraries rarely use it."""
_WAIT = 1.0
"""Seconds for a host's writing of its stacks. The handler is C code: the handler needs no lock of Python."""
_FRAMES = 12
"""Largest number of kept frames of a stack."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_FATAL = "Fatal Python error: "


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


def write_stacks(file: int, *, fatal: bool) -> None:
    """Let this process, a host, write the stacks of all threads into a file if the judge asks for them, and, if
    `fatal`, before it dies by a signal. faulthandler works while a thread is in C code."""
    if fatal:
        faulthandler.enable(file)
    faulthandler.register(_DUMP, file)


@dataclass(frozen=True)
class Stack:
    """The place of a host at its end."""

    place: str = ""
    """The innermost line of the user in the thread that died, or took the signal: `kernels.py:12 in quantize`.
    Without a line of the user, the line of a further thread or of a package. Empty if unknown."""
    frames: str = ""
    """The frames of the threads with code of the user, each on a line, the innermost first."""

    @classmethod
    def parse(cls, text: str) -> Stack:
        """The stack in the text of faulthandler: of the last fatal error, if any."""
        text = text[text.rfind(_FATAL) :] if _FATAL in text else text
        parts = re.split(r"^(Current thread|Thread) 0x.*$", text, flags=re.MULTILINE)[1:]
        by_thread = sorted(zip(parts[::2], parts[1::2], strict=True), key=lambda part: part[0] != "Current thread")
        threads = [_frames(lines) for _, lines in by_thread]
        users = [thread for thread in threads if any(frame.owner == "user" for frame in thread)]
        # The rest of a stack are the frames of the host.
        kept = [list(dropwhile(lambda f: f.owner != "user", thread[::-1]))[::-1] for thread in users] or threads[:1]
        named = [frame for thread in kept for frame in thread]
        first = next((f for owner in ("user", "installed") for f in named if f.owner == owner), None)
        shown = []
        for number, thread in enumerate(kept):
            shown += ["another thread:"] if number else []
            shown += map(str, thread[:_FRAMES])
            shown += [f"and {len(thread) - _FRAMES} more"] if len(thread) > _FRAMES else []
        return cls("" if first is None else str(first), "\n".join(shown))


@dataclass(frozen=True)
class _Frame:
    file: str
    line: str
    function: str

    @property
    def owner(self) -> str:
        return owner_of(self.file)

    def __str__(self) -> str:
        for root in (os.getcwd(), *(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))):
            if Path(self.file).is_relative_to(root):
                return f"{Path(self.file).relative_to(root)}:{self.line} in {self.function}"
        return f"{self.file}:{self.line} in {self.function}"


def _frames(text: str) -> list[_Frame]:
    return [_Frame(*match.groups()) for line in text.splitlines() if (match := _FRAME.fullmatch(line))]


class StackFile:
    """The file of the stacks of a host, on the side of the judge. Its size is fixed: a host can fill no memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("narrowgauge-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, _STACKS)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def ask(self, process: int) -> None:
        """Ask a host for its stacks, and wait until they are written, or `_WAIT` seconds."""
        os.pwrite(self.descriptor, bytes(_STACKS), 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)  # the host shares the position
        try:
            os.kill(process, _DUMP)
        except OSError:  # it has ended
            return
        written, until = -1, time.monotonic() + _WAIT
        while written <= 0 or written != len(self._text()):
            if time.monotonic() >= until:
                return
            written = len(self._text())
            time.sleep(_WAIT / 50)

    def _text(self) -> bytes:
        return os.pread(self.descriptor, _STACKS, 0).rstrip(b"\0")

    def look(self) -> Stack:
        """The written stack of the host."""
        return Stack.parse(self._text().decode(errors="replace"))

    def read(self) -> Stack:
        """The stack of the host at its end, and close the file."""
        found = self.look()
        self.close()
        return found

    def close(self) -> None:
        """Close the file, once or more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
