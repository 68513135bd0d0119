"""The judging process, seen from the watched program: a thread hands calls over and receives the answers."""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from narrowgauge.harness.watch.copies import HostCopy

Answer = Callable[[int, dict[str, Any]], None]
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from narrowgauge.harness.watch.judge import main; main()"
)
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The judge uses one thread of a CPU and makes no CUDA context."""
VARIABLE = "NARROWGAUGE_WATCH"
_LONGEST_ERROR = 2000
"""Characters of the error output of a judge that ended."""


class JudgeProcess:
    """A process that judges one call after the other. It starts with the first call, by exec, never by fork alone."""

    def __init__(self, assertion: str, most: int, answer: Answer) -> None:
        """`most`: calls that are copied and not yet judged. `answer(number, reply)` is called for each judged call, in
        a thread of its own."""
        self._assertion, self._answer = assertion, answer
        self._free = threading.Semaphore(most)
        self._calls: queue.SimpleQueue[tuple[int, HostCopy] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._lock = threading.Lock()

    def reserve(self) -> bool:
        """A place for a call; whether there was one. Each place is used by `submit` or given back by `release`."""
        return self._free.acquire(blocking=False)

    def release(self) -> None:
        self._free.release()

    def submit(self, number: int, arguments: HostCopy) -> None:
        """Judge a call with this number."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="narrowgauge-watch", daemon=True)
                self._thread.start()
        self._calls.put((number, arguments))

    def close(self, wait: float) -> None:
        """Wait up to `wait` seconds for the answers, and end the process."""
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(wait)
        if self._process is not None:
            self._process.kill()
        self._thread.join(wait)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            number, arguments = item
            try:
                reply = self._judge(arguments.wait())
            except Exception as error:  # the judge ended, or the GPU has an error that the program will see
                reply = {"error": f"{type(error).__name__}: {error}{self._last_words()}"}
            del item, arguments
            self._answer(number, reply)
            self._free.release()
        self._end()

    def _end(self) -> None:
        """End of input for the process, which ends, and of its files here."""
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        if self._errors is not None:
            self._errors.close()

    def _judge(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        buffer = io.BytesIO()
        torch.save(arguments, buffer)
        header = {"assertion": self._assertion, "bytes": buffer.tell()}
        self._process.stdin.write(json.dumps(header).encode() + b"\n")
        self._process.stdin.write(buffer.getbuffer())
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the judge ended with status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_end`)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=environment | _ENVIRONMENT, start_new_session=True,
        )  # fmt: skip

    def _last_words(self) -> str:
        """The end of the judge's error output."""
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LONGEST_ERROR))
        text = self._errors.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""
