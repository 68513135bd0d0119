"""The process that judges calls of a running program. It receives calls and sends answers.

A call is the name of an assertion with a file of its arguments, which `torch.load` reads with weights_only=True. An
answer has the key `passed`, `failed` or `error`.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import IO, Any

from narrowgauge.harness.hosts.frames import Connection, FrameError

NICENESS = 19


def main(descriptor: int) -> None:
    """Judge calls until the program closes the connection."""
    connection = Connection(socket.socket(fileno=descriptor))
    os.nice(NICENESS)
    import torch

    torch.set_num_threads(1)
    with suppress(FrameError):
        while True:
            call, (file,) = connection.receive()
            with open(file, "rb") as arguments:
                answer = judge(call["assertion"], arguments)
            connection.send(answer)


def judge(assertion: str, arguments: IO[bytes]) -> dict[str, Any]:
    """The answer to a call of an assertion of `narrowgauge`, by name."""
    import torch

    from narrowgauge.harness.api import assert_result, assertions
    from narrowgauge.harness.api.verdict import WrongResult

    try:
        module = assert_result if hasattr(assert_result, assertion) else assertions
        getattr(module, assertion)(**torch.load(arguments, weights_only=True, map_location="cpu"))
    except WrongResult as wrong:
        return {"failed": str(wrong), "reproduction": wrong.verdict.reproduction}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"passed": True}
