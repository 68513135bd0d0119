"""Sanitizers in the output of `narrowgauge doctor`."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from narrowgauge.harness.records.environment import Fact


def sanitizer_facts() -> list[Fact]:
    """Facts on the tools for `--sanitize` and `narrowgauge sanitize`. They are run, which takes a second. Never
    raises."""
    return [_host_sanitizers(), _compute_sanitizer()]


def _host_sanitizers() -> Fact:
    from narrowgauge.native.runtime import host, sanitizer
    from narrowgauge.native.runtime.sources import ToolchainError

    name = "sanitizers of the compiler"
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        try:
            command = [host.compiler(), *host.SANITIZED, "-x", "c++", "-o", f"{folder}/empty.so", "-"]
            process = subprocess.run(
                command, input="int empty() { return 0; }", capture_output=True, text=True, check=False
            )
            if process.returncode != 0:
                reason = " ".join(process.stderr.split())[:300]
                remedy = (
                    "only --sanitize needs them; they come with g++ (Fedora: dnf install libasan libubsan), or set CXX "
                    "to another compiler"
                )
                return Fact(name, f"do not link: {reason}", ok=False, remedy=remedy)
            sanitizer.environment(Path(folder) / "findings")
        except ToolchainError as error:
            return Fact(name, "missing", ok=False, remedy=str(error))
        except OSError as error:
            return Fact(name, f"cannot be tried: {error.strerror}", ok=False, remedy="set CXX to another compiler")
    return Fact(name, "address and undefined link and run, for --sanitize")


def _compute_sanitizer() -> Fact:
    from narrowgauge.harness.tools.sanitize.compute_sanitizer import ComputeSanitizerError, find_tool

    try:
        return Fact("compute-sanitizer", find_tool())
    except ComputeSanitizerError as error:
        return Fact("compute-sanitizer", "missing", ok=False, remedy=f"only `narrowgauge sanitize` needs it: {error}")
