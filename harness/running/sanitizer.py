"""--sanitize: kernel hosts with the address sanitizer and the undefined-behaviour sanitizer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.native.runtime import sanitizer
from narrowgauge.native.runtime.sources import ToolchainError


def check_sanitizer(device: str) -> None:
    """Raises BackendError, with the remedy, if cases on `device` cannot run under the sanitizers."""
    if device != "cpu":
        raise BackendError(
            f"--sanitize is for kernels on a CPU, not on {device}; `narrowgauge sanitize` runs cases on a GPU under "
            "compute-sanitizer"
        )
    Sanitizer().close()


class Sanitizer:
    """The interpreter of a kernel host with the sanitizers, and the file of their finding."""

    def __init__(self) -> None:
        """Raises BackendError without sanitizers."""
        self._folder = tempfile.TemporaryDirectory(prefix="narrowgauge-")
        self._findings = Path(self._folder.name) / "findings"
        try:
            self.variables = sanitizer.environment(self._findings)
        except ToolchainError as error:
            self.close()
            raise BackendError(str(error)) from error

    def finding(self, process: int) -> str:
        """The finding that ended a process, in a sentence. Empty without a finding."""
        return sanitizer.finding(self._findings, process)

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()
