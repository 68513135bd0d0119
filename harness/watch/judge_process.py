"""The judging process, seen from the watched program: a thread hands calls over and receives the answers."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

import torch

from narrowgauge.harness.running.supervisor import Died, Interpreter
from narrowgauge.harness.watch.copies import HostCopy

Answer = Callable[[int, dict[str, Any]], None]
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The judge uses one thread of a CPU and makes no CUDA context."""
VARIABLE = "NARROWGAUGE_WATCH"
_LONGEST_ERROR = 2000
"""Characters of the output of a judge that ended."""


class JudgeProcess:
    """A process that judges call after call. It starts with the first call, by exec, never by fork alone."""

    def __init__(self, assertion: str, most: int, answer: Answer) -> None:
        """`most`: calls that are copied and not yet judged. `answer(number, reply)` is called for each judged call, in
        a thread of its own."""
        self._assertion, self._answer = assertion, answer
        self._free = threading.Semaphore(most)
        self._calls: queue.SimpleQueue[tuple[int, HostCopy] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: Interpreter | None = None
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
            self._process.end()
        self._thread.join(wait)

    def _serve(self) -> None:
        with tempfile.TemporaryFile() as output:
            while (item := self._calls.get()) is not None:
                number, arguments = item
                try:
                    reply = self._judge(arguments.wait(), output)
                except Died as died:
                    words = f"RuntimeError: the judge ended with status {died.status}"
                    reply = {"error": words + _last_words(output)}
                except Exception as error:  # the GPU has an error that the program will see
                    reply = {"error": f"{type(error).__name__}: {error}{_last_words(output)}"}
                del item, arguments
                self._answer(number, reply)
                self._free.release()
            if self._process is not None:
                self._process.stop()

    def _judge(self, arguments: dict[str, Any], output: IO[bytes]) -> dict[str, Any]:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | _ENVIRONMENT
            self._process = Interpreter("narrowgauge.harness.watch.judge:main", output, environment)
        with open(os.memfd_create("narrowgauge-call"), "w+b") as file:
            torch.save(arguments, file)
            file.seek(0)
            self._process.send({"assertion": self._assertion}, [file.fileno()])
        return self._process.receive()


def _last_words(output: IO[bytes]) -> str:
    """The end of the judge's output."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _LONGEST_ERROR))
    text = output.read().decode(errors="replace").strip()
    return f"\n{text}" if text else ""
