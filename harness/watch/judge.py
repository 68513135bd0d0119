"""The process that judges calls of another program. It reads calls from its input and writes answers to its output.

A call is a line of JSON, {"assertion", "bytes"}, and as many bytes, which `torch.load` reads with weights_only=True as
the arguments of the assertion. An answer is a line of JSON with the key `passed`, `failed` or `error`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

NICENESS = 19


def main() -> None:
    """Judge calls until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints does not write into the answers
    os.nice(NICENESS)
    import torch

    torch.set_num_threads(1)
    while line := sys.stdin.buffer.readline():
        call = json.loads(line)
        answer = judge(call["assertion"], sys.stdin.buffer.read(call["bytes"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def judge(assertion: str, data: bytes) -> dict[str, Any]:
    """The answer to a call of an assertion of `narrowgauge`, by name."""
    import torch

    from narrowgauge.harness.api import assertions
    from narrowgauge.harness.api.verdict import WrongResult

    try:
        getattr(assertions, assertion)(**torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))
    except WrongResult as wrong:
        return {"failed": str(wrong), "reproduction": wrong.verdict.reproduction}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"passed": True}
