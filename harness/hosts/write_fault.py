"""Finding the input that a kernel on a CPU writes to: inputs are mapped read-only: the write raises SIGSEGV.

The handler sends the place of the write to the judge and ends the process. A fault at a different address gets the
earlier handler: of further inputs, of a sanitizer, or the default, which ends the process by the signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_SA_SIGINFO = 4
_CODE, _ADDRESS = 8, 16
"""Offsets of si_code and si_addr in siginfo_t on 64-bit Linux."""


class _Action(ctypes.Structure):
    """struct sigaction of glibc on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_kept: list[object] = []
"""Handlers, which ctypes must not free."""


def on_write(find: Callable[[int], int | None], tell: Callable[[int], None]) -> None:
    """Install the handler. `find`: the offset of an address in the inputs, None for an address elsewhere; `tell` sends
    the offset to the judge. Does nothing on systems other than 64-bit Linux."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    libc = ctypes.CDLL(None)

    def handle(number: int, info: int, context: int) -> None:
        offset = find(ctypes.c_uint64.from_address(info + _ADDRESS).value)
        if offset is None:
            libc.sigaction(number, ctypes.byref(before), None)  # the instruction runs again, and faults again
            if ctypes.c_int.from_address(info + _CODE).value <= 0:  # no instruction: a process sent the signal
                signal.raise_signal(number)
            return
        tell(offset)
        os._exit(128 + signal.SIGSEGV)

    before = _Action()
    handler = _HANDLER(handle)
    _kept.append(handler)
    action = _Action(ctypes.cast(handler, ctypes.c_void_p).value, (ctypes.c_ulong * 16)(), _SA_SIGINFO, None)
    libc.sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(before))
