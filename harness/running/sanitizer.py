"""--sanitize: workers that have the address and the undefined-behaviour sanitizer, and what those find."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.native.runtime import sanitizer
from narrowgauge.native.runtime.sources import ToolchainError


def check_sanitizer(device: str) -> None:
    """Raises BackendError where cases on `device` cannot run under the sanitizers, with what to do."""
    if device != "cpu":
        raise BackendError(
            f"--sanitize is for kernels on a CPU, not on {device}; `narrowgauge sanitize` runs cases on a GPU under "
            "compute-sanitizer"
        )
    Sanitizer().close()


class Sanitizer:
    """What a worker under the sanitizers is started with, and the file of what they find in it."""

    def __init__(self) -> None:
        """Raises BackendError where there are no sanitizers."""
        self._folder = tempfile.TemporaryDirectory(prefix="narrowgauge-")
        self._findings = Path(self._folder.name) / "findings"
        try:
            self._environment = sanitizer.environment(self._findings)
        except ToolchainError as error:
            self.close()
            raise BackendError(str(error)) from error

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Within the context this process starts others that have the sanitizers."""
        resource_tracker.ensure_running()  # multiprocessing's own, which a start would start too
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def finding(self, process: int | None) -> str:
        """What the sanitizers ended a process for, in a sentence; nothing where they did not."""
        return sanitizer.finding(self._findings, process)

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


settle_sanitizer = sanitizer.settle
"""In a worker: what it starts itself has no sanitizers."""
